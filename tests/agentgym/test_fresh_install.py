"""`pip install agentgym-toolkit`, and nothing else: a new virtual environment with the wheel of this tree and its light dependencies.

What people use first and every day must work there: list, evaluate, check, make an environment, look at the run. The environment
is made once for all tests here. Where no package index answers there is nothing to test, which CI calls an error.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from agentgym.scaffold import scaffold

pytestmark = pytest.mark.timeout(600)  # the first test waits for all that is installed
ROOT = Path(__file__).parents[2]
IN_CI = bool(os.environ.get("CI") or os.environ.get("AGENTGYM_NEED_SANDBOXES"))
LEFT_OUT = (
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "AGENTGYM_DATA",
    "AGENTGYM_SANDBOX",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
)
# Without it every command would compile all that it imports again.
LEFT_OUT += ("PYTHONDONTWRITEBYTECODE",)
HEAVY = ("torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "docker", "openai", "pandas", "scipy")


class Fresh:
    """A virtual environment and the commands in it."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        self.environment = {k: v for k, v in os.environ.items() if k not in LEFT_OUT} | {
            "PIP_DISABLE_PIP_VERSION_CHECK": "1"
        }

    def run(self, *words, cwd=None, code=0, seconds=120, **more):
        """What a program of this environment prints; it must end with `code`. `told` has its standard error."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=cwd or self.folder,
            env=self.environment | more,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        self.told = done.stderr
        return done.stdout

    def pip(self, *words):
        """This process's pip, working on that environment: one of its own would take longer to install than all the rest."""
        there = ["--python", str(self.bin / "python")] if words[0] != "wheel" else []
        return self.run(sys.executable, "-m", "pip", *there, *words, seconds=200)

    def json(self, *words, **more):
        """What `agentgym ... --json` prints."""
        return json.loads(self.run("agentgym", *words, "--json", **more))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        check=True,
        timeout=120,
        capture_output=True,
    )
    made = Fresh(folder)
    try:
        made.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", str(ROOT))
        (wheel,) = (folder / "dist").glob("agentgym_toolkit-*.whl")
        made.pip("install", "--quiet", "--no-compile", str(wheel))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        if IN_CI or "No matching distribution" not in str(error):
            raise
        pytest.skip(f"no package index that has the build's requirements answers here: {str(error)[-300:]}")
    return made


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(fresh):
    (wheel,) = (fresh.folder / "dist").glob("*.whl")
    moved = {"configs": "agent_train/configs", "sandboxes": "agentgym/sandboxes"}
    here = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "agentgym", "agentgym_envs", "agent_train"]
    listed = subprocess.run([*here, *moved], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    places = (path.partition("/") for path in listed.split("\n") if (ROOT / path).is_file())
    wanted = {f"{moved.get(top, top)}/{rest}" for top, _, rest in places}
    assert {f"{package}/py.typed" for package in ("agentgym", "agentgym_envs", "agent_train")} <= wanted
    inside = set(ZipFile(wheel).namelist())
    assert {name for name in inside if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_a_wheel_of_the_same_files_is_the_same_to_the_byte(fresh):
    """Built in another folder, of files that were written at another time and by a user with other habits."""
    copy = fresh.folder / "copy"
    copy.mkdir()
    before = os.umask(0o077)
    try:
        for name in ("agentgym", "agentgym_envs", "agent_train", "configs", "sandboxes"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, copy_function=shutil.copyfile, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / name, copy / name)
    finally:
        os.umask(before)
    fresh.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", "again", str(copy))
    (wheel,), (again,) = ((fresh.folder / folder).glob("*.whl") for folder in ("dist", "again"))
    assert again.read_bytes() == wheel.read_bytes()


def test_it_is_small_and_holds_nothing_heavy(fresh):
    code = (
        "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"
    )
    assert json.loads(fresh.run("python", "-c", code, *HEAVY)) == []
    fresh.pip("check")
    place = fresh.run("python", "-c", "import agentgym; print(agentgym.__file__)").strip()
    assert place.startswith(str(fresh.folder)), "the tree itself must not be what is tested"
    installed = {row["name"] for row in json.loads(fresh.pip("list", "--format", "json"))}
    assert len(installed) < 30, installed


def test_the_environments_are_listed_with_what_they_lack(fresh):
    rows = {row["id"]: row for row in fresh.json("list")}
    assert {"frozen_lake", "gsm8k", "math_python", "gymnasium:NAME"} <= set(rows)
    (need,) = [need for need in rows["math_python"]["needs"] if need["what"] == "agentgym-toolkit[math]"]
    assert (need["here"], need["remedy"]) == (False, "pip install 'agentgym-toolkit[math]'")
    assert "frozen_lake" in fresh.run("agentgym", "list")


def test_the_doctor_finds_what_is_needed_and_names_the_rest(fresh):
    environment = fresh.environment.pop("DOCKER_HOST", None)
    report = fresh.json("doctor")
    if environment:
        fresh.environment["DOCKER_HOST"] = environment
    seen = {f["name"]: f for f in report["findings"]}
    assert report["ok"] is True
    assert seen["torch"]["state"] == "missing"
    assert seen["torch"]["todo"] == "pip install 'agentgym-toolkit[train]'"
    assert seen["Docker"]["todo"] == "pip install 'agentgym-toolkit[docker]'"


def test_completion_works_there(fresh):
    script = fresh.run("agentgym", "completion", "bash")
    ask = f'{script}\nCOMP_LINE="agentgym eval froz" COMP_POINT=18 COMP_TYPE=9; _python_argcomplete agentgym; echo $COMPREPLY'
    path = f"{fresh.bin}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, timeout=60, env={"PATH": path}, check=True
    )
    assert done.stdout == "frozen_lake\n"


# ---- evaluate, look, write


AGENT = """
def run(messages):
    return "right"
"""


@pytest.fixture(scope="module")
def played(fresh):
    """A run of the expert."""
    folder = fresh.folder / "work"
    folder.mkdir()
    results = fresh.json("eval", "frozen_lake", "--policy", "expert", "-n", "20", "--out", "runs/expert", cwd=folder)
    return folder, results


def test_an_evaluation_by_the_expert(fresh, played):
    folder, results = played
    (cell,) = results["cells"]
    assert (cell["episodes"], cell["errors"], cell["success"]) == (20, 0, 1.0)
    assert json.loads((folder / "runs/expert/results.json").read_text())["cells"] == [cell]
    assert (folder / "runs/expert/report.html").is_file()
    again = fresh.json("eval", "frozen_lake", "--policy", "expert", "-n", "20", "--out", "runs/expert", cwd=folder)
    assert again["cells"][0]["success"] == 1.0
    assert len((folder / "runs/expert/episodes/frozen_lake@expert.jsonl").read_text().splitlines()) == 20, (
        "all was there"
    )


def test_a_script_and_an_agent_of_ones_own(fresh, played):
    folder, _ = played
    (folder / "answers.txt").write_text("right\ndown\nright\ndown\n")
    (folder / "my_agent.py").write_text(AGENT)
    both = fresh.json(
        *("eval", "frozen_lake", "--script", "answers.txt", "--agent", "my_agent:run", "-n", "20", "-k", "2"),
        *("--max-turns", "6", "--out", "runs/scripted"),
        cwd=folder,
    )
    cells = {cell["agent"]: cell for cell in both["cells"]}
    assert set(cells) == {"answers", "my_agent:run"}
    assert all((cell["episodes"], cell["errors"]) == (40, 0) for cell in cells.values())
    assert cells["my_agent:run"]["turns"] > 1
    assert cells["answers"]["success"] < 1.0


def test_runs_are_compared_and_shown_in_one_file(fresh, played):
    folder, _ = played
    fresh.json("eval", "frozen_lake", "--policy", "random", "-n", "20", "--out", "runs/random", cwd=folder)
    (cell,) = fresh.json("compare", "runs/expert", "runs/random", cwd=folder)["cells"]
    success = cell["measures"]["success"]
    assert success["tasks"] == 20
    assert success["high"] < 0, "chance is worse than the expert"
    told = fresh.json("view", "runs/expert", "runs/random", "--export", "page.html", cwd=folder)
    assert (told["runs"], told["episodes"]) == (2, 40)
    assert "frozen_lake" in (folder / "page.html").read_text()


def test_an_environment_of_ones_own(fresh, played):
    folder, _ = played
    assert "ok" in fresh.run("agentgym", "check", "frozen_lake", "tic_tac_toe")
    fresh.run("agentgym", "init", "my_env", cwd=folder)
    fresh.pip("install", "--quiet", "--no-deps", "--no-compile", str(folder / "my_env"))
    assert "my_env" in {row["id"] for row in fresh.json("list")}
    fresh.run("agentgym", "check", "my_env", cwd=folder)


def test_what_needs_more_says_what_to_install(fresh):
    fresh.run("agentgym", "eval", "search", "--policy", "random", "-n", "1", "--no-store", code=2)
    assert (
        fresh.told
        == "agentgym eval: search needs agentgym-toolkit[search], which is not installed: pip install 'agentgym-toolkit[search]'\n"
    )


# ---- the image of an environment of one's own

# What a base image from a registry would bring: Python with pip. What the index would answer with is there already.
BASE = """\
FROM {image}
COPY site /opt/site
# pip reads 0 here as --no-build-isolation.
ENV PYTHONPATH=/opt/site PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0
RUN mkdir -p -m 1777 /tmp
"""


@pytest.fixture(scope="module")
def base(fresh):
    """A Docker client, and an image that holds pip and all that agentgym needs, but not agentgym."""
    from docker import DockerClient

    from agentgym.sandbox.backends import engine
    from agentgym.sandbox.images import build as images

    client = DockerClient(base_url=engine.address(), timeout=120)
    folder, tag = fresh.folder / "base", f"agentgym-test-base:{os.getpid()}"
    (site,) = fresh.folder.glob("venv/lib/python*/site-packages")
    no_caches = shutil.ignore_patterns("__pycache__", "agent*")
    shutil.copytree(site, folder / "site", ignore=no_caches)
    for package in ("pip", "setuptools"):
        here = distribution(package)
        for part in {Path(file).parts[0] for file in here.files or [] if len(Path(file).parts) > 1} - {".."}:
            shutil.copytree(here.locate_file(part), folder / "site" / part, ignore=no_caches)
    (folder / "Dockerfile").write_text(BASE.format(image=images.docker_tag("search")))
    client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, network_mode="none")
    yield client, tag
    client.images.remove(tag, force=True)
    client.close()


@pytest.mark.docker
def test_its_image_is_built_and_checks_itself_with_no_network(fresh, base, tmp_path):
    client, tag = base
    root, _ = scaffold("creek_env", tmp_path)
    (wheel,) = (fresh.folder / "dist").glob("agentgym_toolkit-*.whl")
    shutil.copy(wheel, root)
    built, _ = client.images.build(
        path=str(root),
        buildargs={"BASE": tag, "AGENTGYM": f"./{wheel.name}"},
        rm=True,
        forcerm=True,
        network_mode="none",
    )

    def run(**words):
        printed = client.containers.run(
            built, network_mode="none", read_only=True, tmpfs={"/tmp": ""}, remove=True, **words
        )
        return printed.decode()

    try:
        assert run().startswith("creek_env: ok"), "the image's own command is the check"
        assert run(entrypoint=["id", "-u"]).strip() == "65534"
    finally:
        client.images.remove(built.id, force=True)


# ---- a real endpoint: vLLM, of the development environment


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_endpoint(fresh, tmp_path):
    from agent_train.config.schema import TinyConfig
    from agent_train.learner.tiny import build_tiny
    from agentgym.evaluate.serving import serve_model

    shape = replace(TinyConfig(), hidden=64, layers=2, heads=2, intermediate=128, vocab=512)
    build_tiny(tmp_path / "tiny", ["up down left right\n"] * 8, shape, 1024, seed=0)
    with serve_model(tmp_path / "tiny", log=tmp_path / "vllm.log", timeout=300) as (url, model):
        results = fresh.json(
            *("eval", "frozen_lake", "--model", model, "--base-url", url, "-n", "6", "-k", "2", "--max-turns", "3"),
            *("--max-tokens", "8", "--concurrency", "6", "--out", "real"),
            cwd=tmp_path,
            seconds=200,
        )
    (cell,) = results["cells"]
    assert (cell["episodes"], cell["errors"]) == (12, 0)
    assert cell["requests"] >= 12
    assert cell["tokens"]["completion_tokens"] > 0
    episodes = [json.loads(line) for line in (tmp_path / "real/episodes").glob("*.jsonl").__next__().open()]
    assert len(episodes) == 12
    assert all(turn["reply"]["role"] == "assistant" for episode in episodes for turn in episode["turns"])
