"""harbor:PATH plays Harbor's task folders in real sandboxes: the agent works, then the tests of the task judge its files."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

import agentgym
from agentgym import sandbox as sandboxes
from agentgym.checks.validate import validate
from agentgym.core.tasks import TaskSet
from agentgym.sandbox import SandboxError
from agentgym.sandbox.backends import docker
from agentgym.sandbox.guest.guest_sandbox import GuestSandbox
from agentgym.sandbox.images import build as images
from agentgym.tools.text_forms import call_text
from agentgym_envs.adapters import harbor
from agentgym_envs.adapters.harbor_images import place_of
from agentgym_envs.adapters.harbor_tasks import Unsupported, read_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor" / "fix-script"
SUBMIT = call_text("submit")
BOTH = [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """The engine of the tests is on ext4, where it cannot limit layers."""
    monkeypatch.setenv(docker.UNLIMITED, "1")


@pytest.fixture
def folder(tmp_path):
    """A copy of the example that a test changes: `folder("tests/test.sh", "...")` writes a file of it."""
    shutil.copytree(EXAMPLE, tmp_path / "task")

    def write(name, text):
        place = tmp_path / "task" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
        return tmp_path / "task"

    return write


def play(path, *actions, sandbox="bubblewrap", **settings):
    """The last step of an episode; an action None is the expert's."""
    images.build("python")
    env = agentgym.make(f"harbor:{path}", sandbox=sandbox, **settings)
    try:
        env.reset(seed=0)
        for action in actions:
            step = env.step(env.unwrapped.expert_action() if action is None else action)
        return step
    finally:
        env.close()


def bash(command):
    return call_text("bash", command=command)


@pytest.mark.parametrize("sandbox", BOTH)
def test_the_tests_of_the_task_give_the_reward(sandbox):
    solved, unsolved = play(EXAMPLE, None, None, sandbox=sandbox), play(EXAMPLE, SUBMIT, sandbox=sandbox)
    assert (solved[1], solved[2], solved[4]["success"], solved[4]["exit"]) == (1.0, True, True, "submitted")
    assert (unsolved[1], unsolved[4]["success"], unsolved[4]["rewards"]) == (0.0, False, {"reward": 0.0})


@pytest.mark.bubblewrap
def test_validate_finds_no_problem():
    images.build("python")
    found = asyncio.run(validate(agentgym.spec(f"harbor:{EXAMPLE.parent}"), n=1))
    assert [finding for finding in found.findings if finding.state == "problem"] == []


@pytest.mark.bubblewrap
def test_the_agent_sees_the_instruction_and_its_folder_and_no_tests(folder):
    task = folder("instruction.md", "<!-- harbor-canary GUID 1 -->\n\nMend it.\n")
    env = agentgym.make(f"harbor:{task}", sandbox="bubblewrap")
    opening = env.reset(seed=0)[0][0]["content"]
    assert opening.startswith("Mend it.\n\nWork in /app with the tools bash and edit.")
    seen = env.step(bash("pwd; ls; ls /tests /solution"))[0][0]["content"]
    env.close()
    assert "/app\norders.csv\ntotals.sh\n" in seen
    assert "/tests': No such file" in seen
    assert "solve.sh" not in seen


@pytest.mark.bubblewrap
def test_the_work_is_judged_as_it_is_when_the_turns_or_the_time_are_used_up(folder):
    mended = bash("sed -i \"s/-F';'/-F,/; s/order.csv/orders.csv/\" totals.sh")
    _, reward, terminated, truncated, info = play(EXAMPLE, mended, max_turns=1)
    assert (reward, terminated, truncated, info["exit"]) == (1.0, False, True, "turns")
    text = (EXAMPLE / "task.toml").read_text().replace("timeout_sec = 600", "timeout_sec = 1e-9")
    _, reward, terminated, _, info = play(folder("task.toml", text), mended)
    assert (reward, terminated, info["exit"]) == (0.0, True, "time")


@pytest.mark.bubblewrap
def test_what_the_agent_leaves_running_or_writes_beforehand_earns_nothing():
    forge = "echo 1 > /logs/verifier/reward.txt"
    left = f"(while sleep 0.1; do {forge}; done) >/dev/null 2>&1 & mkdir -p /logs/verifier /tests; {forge}; true"
    assert play(EXAMPLE, bash(left), SUBMIT)[1] == 0.0


@pytest.mark.bubblewrap
def test_an_agent_that_breaks_the_tests_earns_nothing(folder):
    text = (EXAMPLE / "tests" / "test.sh").read_text()
    needs_its_folder = folder("tests/test.sh", text.replace("passed=1", "passed=1\n[ -f orders.csv ] || exit 3"))
    _, reward, _, _, info = play(needs_its_folder, bash("rm orders.csv"), SUBMIT)
    assert (reward, info["verifier"], info["success"]) == (0.0, "no reward file", False)


@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "no reward file"),
        ("echo much > /logs/verifier/reward.txt", "no number in /logs/verifier/reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "no number in"),
        ("""printf '{"reward": 1%0400d}' 0 > /logs/verifier/reward.json""", "no number in"),
        ("printf '[%.0s' {1..100000} > /logs/verifier/reward.json", "no number in"),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""", "no reward 'reward' in .* which has a, b"),
    ],
)
def test_tests_that_never_give_a_reward_are_an_error(folder, script, why):
    with pytest.raises(SandboxError, match=f"{why}.*also on untouched files"):
        play(folder("tests/test.sh", f"#!/bin/bash\n{script}\n"), SUBMIT)


@pytest.mark.bubblewrap
@pytest.mark.parametrize("control", [True, False])
def test_whose_fault_it_is_that_the_tests_cannot_be_put_in_is_told_by_the_control(control, monkeypatch):
    """A double of an image in which root owns `/tests`, and of one in which the control has no such folder."""
    asked, put = [], GuestSandbox.put_archive

    def acquire(spec, sandbox, first=False):
        asked.append(first)
        return sandboxes.acquire(spec, sandbox, first=first)

    def put_archive(box, data, to, *more):
        if to == "/tests" and (len(asked) == 1 or not control):
            raise PermissionError(13, "Permission denied", to)
        put(box, data, to, *more)

    monkeypatch.setattr(harbor, "acquire", acquire)
    monkeypatch.setattr(GuestSandbox, "put_archive", put_archive)
    if control:
        _, reward, terminated, _, info = play(EXAMPLE, SUBMIT)
        assert (reward, terminated) == (0.0, True)
        assert info["verifier"].startswith("the tests cannot be put in")
    else:
        with pytest.raises(SandboxError, match=r"the tests cannot be put in.*also on untouched files"):
            play(EXAMPLE, SUBMIT)
    assert asked == [False, True], "the control comes before new episodes: this one cannot end without it"


@pytest.mark.bubblewrap
def test_a_reward_file_may_be_json_with_several_rewards(folder):
    told = """echo '{"reward": 0.25, "style": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"""
    task = folder("tests/test.sh", f"#!/bin/bash\n{told}\n")
    _, reward, _, _, info = play(task, SUBMIT)
    assert (reward, info["rewards"], info["success"]) == (0.25, {"reward": 0.25, "style": 1.0}, False)
    assert play(task, SUBMIT, key="style")[1] == 1.0


@pytest.mark.bubblewrap
def test_tests_that_do_not_end_earn_nothing(folder):
    text = (EXAMPLE / "task.toml").read_text().replace("timeout_sec = 60\n", "timeout_sec = 1\n")
    folder("task.toml", text)
    _, reward, _, _, info = play(folder("tests/test.sh", "#!/bin/bash\nsleep 60\n"), SUBMIT)
    assert (reward, info["verifier"]) == (0.0, "timed out after 1 seconds")


@pytest.mark.bubblewrap
def test_variables_and_the_folder_of_the_task_hold_for_the_agent_and_the_tests(folder):
    config = (EXAMPLE / "task.toml").read_text()
    config = config.replace("timeout_sec = 60\n", 'timeout_sec = 60\nenv = { SEEN = "${HOST_KEY:-tests only}" }\n')
    folder("task.toml", f'{config}workdir = "/work/inner"\nenv = {{ WHO = "task" }}\n')
    folder("environment/Dockerfile", "FROM agentgym/python:1\nENV A=1 B='two words'\nCOPY . /data/\n")
    script = '#!/bin/bash\n[ "$PWD:$A:$B:$WHO:$SEEN" = "/work/inner:1:two words:task:tests only" ]\n'
    task = folder("tests/test.sh", f"{script}echo $((! $?)) > /logs/verifier/reward.txt\n")
    env = agentgym.make(f"harbor:{task}", sandbox="bubblewrap")
    env.reset(seed=0)
    seen = env.step(bash('echo "$PWD:$A:$B:$WHO:$SEEN"; ls /data'))[0][0]["content"]
    assert "/work/inner:1:two words:task:\norders.csv\ntotals.sh" in seen
    assert env.step(SUBMIT)[1] == 1.0
    env.close()


@pytest.mark.bubblewrap
def test_a_published_image_gets_the_files_of_the_environment(folder):
    config = (EXAMPLE / "task.toml").read_text()
    task = folder("task.toml", f'{config}docker_image = "agentgym/python"\nworkdir = "/app"\n')
    (task / "environment" / "Dockerfile").unlink()
    assert play(task, None, None)[1] == 1.0


@pytest.mark.bubblewrap
def test_packages_stand_for_what_a_dockerfile_installs(folder):
    dockerfile = "FROM ubuntu:24.04\nRUN apt-get update && \\\n  apt-get install -y gawk\nWORKDIR /app\nCOPY . /app\n"
    folder("environment/Dockerfile", dockerfile)
    task = folder("environment/packages.txt", (images.image_folder() / "python" / "packages.txt").read_text())
    place = place_of(read_task(task))
    assert (place.workdir, [name for _, name in place.files]) == ("/app", ["/app/orders.csv", "/app/totals.sh"])
    with pytest.raises(SandboxError, match=re.escape(f"agentgym sandbox build {place.image}")):
        play(task, SUBMIT)


@pytest.mark.parametrize("line", ["ENV", "ENV A", "ENV A=1 B", 'ENV A="1'])
def test_an_env_line_that_sets_nothing_is_refused(folder, line):
    folder("environment/Dockerfile", f"FROM ubuntu:24.04\n{line}\n")
    task = folder("environment/packages.txt", "gawk\n")
    with pytest.raises(Unsupported, match=re.escape(f"has {line}, which sets no variable")):
        place_of(read_task(task))


@pytest.mark.parametrize("line", ["ENV PATH=/app/bin:$PATH", "WORKDIR $HOME/app", "ADD https://host/app /app"])
def test_what_only_a_build_can_know_is_refused_beside_packages(folder, line):
    folder("environment/Dockerfile", f"FROM ubuntu:24.04\nENV URL=https://host\n{line}\n")
    task = folder("environment/packages.txt", "gawk\n")
    with pytest.raises(Unsupported, match=re.escape(f"because of {line}: leave out packages.txt")):
        place_of(read_task(task))


@pytest.mark.bubblewrap
def test_the_working_folder_may_be_the_root_where_no_file_belongs_into_it(folder):
    config = (EXAMPLE / "task.toml").read_text()
    task = folder("task.toml", f'{config}workdir = "/"\n')
    seen, *_ = play(task, bash("pwd; ls /app"))
    assert "/\norders.csv\ntotals.sh" in seen[0]["content"]
    folder("task.toml", f'{config}workdir = "/"\ndocker_image = "agentgym/python"\n')
    (task / "environment" / "Dockerfile").unlink()
    with pytest.raises(ValueError, match="no file can be put into /: give workdir in"):
        play(task, SUBMIT)


def test_the_agent_is_told_that_there_is_no_network_unless_there_is():
    told = [agentgym.make(f"harbor:{EXAMPLE}", network=on).tools[0]["function"]["description"] for on in (False, True)]
    assert ["There is no network" in text for text in told] == [True, False]
    assert told[1].endswith("There is no input.")


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("WORKDIR /app\nCOPY orders.csv /app", ["/app/orders.csv"]),
        ("WORKDIR /srv/app\nCOPY orders.csv /srv", ["/srv/orders.csv"]),
        ("WORKDIR /app\nCOPY orders.csv .", ["/app/orders.csv"]),
        ("WORKDIR /app\nCOPY orders.csv ../data/all.csv", ["/data/all.csv"]),
        ("COPY orders.csv totals.sh /data", ["/data/orders.csv", "/data/totals.sh"]),
        ("COPY orders.csv /orders.csv", None),
        ("WORKDIR /\nCOPY orders.csv ./", None),
        ("COPY --chmod=755 orders.csv /bin/run", None),
        ("COPY orders.csv /usr/local/bin/", None),
        ("WORKDIR /root\nCOPY orders.csv .", None),
        ("WORKDIR\t/app\nCOPY\torders.csv .", ["/app/orders.csv"]),
    ],
)
def test_files_go_where_docker_puts_them_or_an_engine_builds_the_image(folder, lines, files):
    place = place_of(read_task(folder("environment/Dockerfile", f"FROM agentgym/python\n{lines}\n")))
    assert ([name for _, name in place.files] if place.workdir else None) == files


def test_requirements_are_a_file_like_others_unless_they_are_the_image_s(folder):
    folder("environment/Dockerfile", "FROM agentgym/python\nWORKDIR /app\nCOPY . .\n")
    task = folder("environment/requirements.txt", "six\n")
    names = ["/app/orders.csv", "/app/requirements.txt", "/app/totals.sh"]
    assert [name for _, name in place_of(read_task(task)).files] == names
    folder("environment/packages.txt", "gawk\n")
    assert [name for _, name in place_of(read_task(task)).files] == ["/app/orders.csv", "/app/totals.sh"]
    folder("environment/Dockerfile", "FROM debian\nCOPY requirements.txt /app/\n")
    assert [name for _, name in place_of(read_task(task)).files] == ["/app/requirements.txt"]


@pytest.mark.parametrize(
    ("patterns", "left_out"),
    [
        ("*.csv", {"orders.csv"}),
        ("# *.sh\n\n/orders.csv", {"orders.csv"}),
        ("**/key", {"key", "a/key", "a/b/key"}),
        ("a", {"a/key", "a/b/key"}),
        ("a/*\n!a/b", {"a/key"}),
        ("*/key\n[k-l]ey\ntotals.??", {"a/key", "key", "totals.sh"}),
        ("key/*", set()),
    ],
)
def test_what_dockerignore_leaves_out_is_not_shown_to_the_agent(folder, patterns, left_out):
    for name in "key", "a/key", "a/b/key":
        (folder("task.toml", "") / "environment" / name).parent.mkdir(exist_ok=True)
        folder(f"environment/{name}", "x")
    folder("environment/Dockerfile", "FROM agentgym/python\nCOPY . /app\n")
    task = folder("environment/.dockerignore", patterns)
    files = {name.removeprefix("/app/") for _, name in place_of(read_task(task)).files}
    assert {"orders.csv", "totals.sh", "key", "a/key", "a/b/key"} - files == left_out


@pytest.mark.bubblewrap
def test_a_link_stays_a_link_and_nothing_of_this_machine_is_copied_through_one(folder):
    folder("environment/Dockerfile", "FROM agentgym/python\nWORKDIR /app\nCOPY . .\n")
    task = folder("environment/v1/data", "x")
    (task / "environment/current").symlink_to("v1")
    seen, *_ = play(task, bash("readlink current; cat current/data"))
    assert "v1\nx" in seen[0]["content"]
    (task / "environment/secret").symlink_to("/etc/hostname")
    place = place_of(read_task(task))
    assert (place.files, (Path(place.image) / "secret").readlink()) == ([], Path("/etc/hostname"))


@pytest.mark.docker
def test_an_engine_builds_other_dockerfiles(folder):
    images.build("python")
    dockerfile = "FROM agentgym/python\nENV GREETING=hello\nWORKDIR /app\nCOPY . /app\nRUN touch /made-by-run\n"
    task = folder("environment/Dockerfile", dockerfile)
    image = place_of(read_task(task)).image
    built = images.build(image)
    for sandbox in "docker", "bubblewrap":
        env = agentgym.make(f"harbor:{task}", sandbox=sandbox)
        env.reset(seed=0)
        assert "hello:/app\n/made-by-run" in env.step(bash("echo $GREETING:$PWD; ls /made-by-run"))[0][0]["content"]
        env.close()
        assert play(task, None, None, sandbox=sandbox)[1] == 1.0
    shutil.rmtree(built.rootfs.parent)
    shutil.rmtree(image)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('[[steps]]\nname = "one"', "it has several steps"),
        ('[environment]\nos = "windows"', "it is for Windows"),
        ("[environment]\ngpus = 1", "it wants accelerators"),
        ('[verifier]\nenvironment_mode = "separate"', "its tests want a container of their own"),
        ('[verifier]\nenv = { KEY = "${OPENAI_API_KEY}" }', "it wants OPENAI_API_KEY from this machine's environment"),
    ],
)
def test_tasks_beyond_this_adapter_are_left_out_and_say_why(folder, config, why, caplog):
    task = folder("task.toml", config)
    with pytest.raises(Unsupported, match=f"{task}: {why}"):
        read_task(task)
    with pytest.raises(ValueError, match=f"no task can be played here: {task}: {why}"):
        TaskSet.load(f"harbor:{task}", split="test")
    shutil.copytree(EXAMPLE, task.parent / "other")
    assert [each.id for each in TaskSet.load(f"harbor:{task.parent}", split="test")] == ["other"]
    assert why in caplog.text


def test_sizes_are_megabytes_or_in_older_tasks_texts(folder):
    task = folder("task.toml", '[environment]\nmemory = "2G"\nstorage_mb = 100\nallow_internet = false\n')
    read = read_task(task)
    assert (read.memory, read.disk, read.network, read.verifier_seconds) == (2 << 30, 100 << 20, False, 600.0)


def test_a_folder_has_the_splits_of_its_folders(tmp_path):
    for name in "train/a", "train/deep/b", "test/c":
        shutil.copytree(EXAMPLE, tmp_path / name)
    sets = {split: [task.id for task in TaskSet.load(f"harbor:{tmp_path}", split=split)] for split in ("train", "test")}
    assert sets == {"train": ["train/a", "train/deep/b"], "test": ["test/c"]}
    with pytest.raises(ValueError, match="has no split 'train': put its tasks into"):
        TaskSet.load(f"harbor:{tmp_path}/test", split="train")


def test_mistakes_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match=r"there is no task.toml at or below it"):
        agentgym.make(f"harbor:{tmp_path / 'none'}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x")
    with pytest.raises(ValueError, match="is a task of Terminal-Bench's older form: `harbor task migrate`"):
        agentgym.make(f"harbor:{tmp_path / 'old'}")
    task = folder("environment/Dockerfile", "FROM agentgym/python\nCOPY missing.txt /app/\n")
    with pytest.raises(ValueError, match=r"COPY missing.txt /app/: there is no missing.txt in"):
        place_of(read_task(task))
    (task / "environment" / "Dockerfile").unlink()
    with pytest.raises(ValueError, match=r"neither a Dockerfile nor a packages.txt, and task.toml no docker_image"):
        place_of(read_task(task))
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(ValueError, match=r"no valid task of Harbor: there is no tests/test.sh"):
        read_task(task)
