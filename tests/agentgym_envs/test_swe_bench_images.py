"""Images of instances: rebuilt from the package index, one commit and no trace of the solution in them."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agentgym import datasets
from agentgym.cli import main
from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.backends import docker, engine
from agentgym.sandbox.backends.bubblewrap import open_bubblewrap
from agentgym.sandbox.backends.docker import open_docker
from agentgym.sandbox.images import build as sandbox_images
from agentgym.sandbox.images import debian, interpreters
from agentgym_envs.swe_bench import images, repository
from agentgym_envs.swe_bench.commands import command_of
from agentgym_envs.swe_bench.instances import Instance, read_instances
from agentgym_envs.swe_bench.logs import log_parser
from agentgym_envs.swe_bench.patches import touched_files
from agentgym_envs.swe_bench.verdict import judge_statuses

MEGABYTE = 1 << 20
FILE = "swe_bench/lite_from_sdist.jsonl"
ID = "django__django-10924"  # its test patch adds a file


def instance(**fields):
    given = {"id": "o__r-1", "repo": "o/r", "base_commit": "", "problem_statement": "", **fields}
    return Instance(**given)


@pytest.fixture(scope="module")
def file():
    if (found := datasets.locate(FILE)) is None:
        pytest.skip(f"there is no {FILE} in the data folder")
    return str(found)


@pytest.fixture(scope="module")
def django(file):
    return next(one for one in read_instances(file) if one.id == ID)


@pytest.fixture(scope="module")
def built(django):
    """Built in the user's own cache: only the first time takes minutes."""
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    try:
        interpreters.find("3.6")
    except SandboxError as error:
        pytest.skip(str(error))
    (made,) = images.build([django])
    assert made.built is not None, made.error
    return made.built


@pytest.fixture(params=["bubblewrap", "docker"])
def box(built, django, request, monkeypatch):
    monkeypatch.setenv(docker.UNLIMITED, "1")
    if request.param == "docker" and engine.unavailable():
        pytest.skip("no Docker Engine")
    if request.param == "bubblewrap" and os.getuid():
        pytest.skip("bubblewrap mounts layers for root only")
    opens = {"bubblewrap": open_bubblewrap, "docker": open_docker}[request.param]
    spec = SandboxSpec(
        image=images.image_of(django), writable_root=True, memory=1024 * MEGABYTE, pids=256, output=8 * MEGABYTE
    )
    opened = opens(spec, "tests")
    yield opened
    opened.close()


def test_the_gold_patch_makes_the_failing_tests_pass(box, django):
    def resolution():
        result = box.exec(f"{command_of(django)} 2>&1", cwd="/testbed", timeout=300)
        return judge_statuses(django, log_parser(django.repo)(result.stdout), exit_code=result.exit_code).resolution

    for patch, expected in (django.test_patch, "RESOLVED_NO"), (django.patch, "RESOLVED_FULL"):
        assert box.exec("git apply -", stdin=patch, cwd="/testbed").ok
        assert resolution() == expected


def test_git_tells_nothing_but_one_commit(box, django):
    def git(words):
        result = box.exec(f"git {words}", cwd="/testbed", timeout=60)
        assert result.ok, result
        return result.stdout.split("\n")[:-1]

    assert git("status --porcelain --branch") == ["## main"]
    assert len(git("log --all --format=%H")) == 1
    assert git("tag") == git("remote") == git("stash list") == git("reflog") == git("fsck --unreachable --strict") == []
    reachable = {line.split()[0] for line in git("rev-list --objects --all")}
    assert {line.split()[0] for line in git("cat-file --batch-all-objects --batch-check")} == reachable
    assert sorted(box.exec("ls -A .git", cwd="/testbed").stdout.split()) == [
        "HEAD",
        "config",
        "index",
        "info",
        "objects",
        "refs",
    ]


def test_neither_the_solution_nor_the_tests_are_there(box, django):
    for patch in django.patch, django.test_patch:
        assert box.exec("git apply --check -", stdin=patch, cwd="/testbed").ok
    assert not box.exec(f"cat {touched_files(django.test_patch)[0]}", cwd="/testbed").ok
    found = box.exec("find / -xdev -iname 'django*' -not -path '/testbed/*' -not -path '/proc/*' 2>/dev/null").stdout
    assert found.split() == ["/usr/local/bin/django-admin"] or found.split() == []


def test_programs_work_in_it_and_reset_forgets_that(box):
    work = "echo x >> setup.py && mkdir new && echo y > new/a && git add -A && git -c user.name=a -c user.email=b commit -qm c"
    assert box.exec(work, cwd="/testbed").ok
    box.reset()
    assert box.exec("git status --porcelain; git rev-list --count HEAD; ls new", cwd="/testbed").stdout == "1\n"


def test_the_commit_has_the_files_without_the_solution_also_where_that_does_not_change_their_size(tmp_path):
    """All files have one time, so size and time do not tell git which of them the patches were taken out of."""
    release, root = tmp_path / "digest" / "rootfs", tmp_path / "root"
    (release / "testbed").mkdir(parents=True)
    root.mkdir()
    patches = {}
    for name in "client.py", "tests.py":
        (release / "testbed" / name).write_text("second\nfirst\n")
        os.utime(release / "testbed" / name, (repository.TIME, repository.TIME))
        begin = f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n"
        patches[name] = f"{begin}@@ -1,2 +1,2 @@\n+second\n first\n-second\n"
    changed = instance(patch=patches["client.py"], test_patch=patches["tests.py"], sdist="client==1")
    repository.make_instance(changed, tmp_path / "cache", release, root)
    committed = subprocess.run(
        ["git", "-C", str(root / "testbed"), "show", "HEAD:client.py"], capture_output=True, text=True, check=True
    )
    assert committed.stdout == (root / "testbed" / "client.py").read_text() == "first\nsecond\n"


def test_an_instance_adds_little_to_its_release(built):
    top, release, environment, base = sandbox_images.layers_of(built.rootfs)
    assert built.bytes < 20 * MEGABYTE
    assert {path.name for path in top.iterdir()} == {"testbed"}
    assert (release / "testbed/django").is_dir()
    assert (environment / "opt/python3.6").is_dir()
    assert sandbox_images.rootfs("swe") == base


class TestNames:
    def test_a_published_image_where_nothing_can_be_rebuilt(self):
        for case in instance(image="x/y:1"), instance(image="x/y:1", sdist="r==1", version="1.0"):
            assert Path(images.image_of(case), "Dockerfile").read_text().startswith("FROM x/y:1\n")

    def test_only_an_image_with_hidden_tests_is_another_to_grade(self):
        hidden = instance(image="x/y:1", expected={"test_a": "PASSED"})
        assert images.image_of(hidden, tests=True) != images.image_of(hidden)
        assert images.image_of(instance(image="x/y:1"), tests=True) == images.image_of(instance(image="x/y:1"))

    def test_no_image_at_all_says_what_to_do(self):
        with pytest.raises(
            ValueError, match='instance o__r-1: no image is known for o/r 2: give the record an "image"'
        ):
            images.image_of(instance(version="2"))

    def test_another_patch_is_another_image(self, django):
        assert images.image_of(django) == images.image_of(django)
        assert images.image_of(django) != images.image_of(replace(django, patch=django.test_patch))

    def test_an_image_that_is_not_built_names_the_command(self, django):
        other = images.image_of(replace(django, problem_statement="", patch=django.test_patch))
        command = sandbox_images.docker_command(other)
        assert command == f"agentgym sandbox build swe --instances FILE --only {ID}"


@pytest.fixture
def of_the_test():
    """Instances' images that only the test has use for."""
    yield
    for name in "o-r-1", "o-r-2":
        shutil.rmtree(sandbox_images.cache_folder() / name, ignore_errors=True)


class TestFailures:
    def test_one_that_fails_is_told_and_the_others_go_on(self, built, django, of_the_test):
        wrong = replace(django, id="o__r-1", patch=re.sub(r"\n\+(?!\+)", "\n+x", django.patch))
        failed, other, foreign = images.build([wrong, django, instance(image="x/y:1")], docker=False)
        assert f"the gold patch does not come out of {django.sdist}" in failed.error
        assert other.built is not None
        assert "without a Docker Engine" in foreign.error
        assert not list(sandbox_images.recipe(images.image_of(wrong)).place.parent.glob("*.part"))

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["swe", "--only", "x"], "has no instance 'x'"),
            (["python"], "no images of instances are called 'python'; there are swe"),
            ([], "needs the name of one builder"),
            (["swe", "--how", "registry"], "needs the name of one builder"),
        ],
    )
    def test_mistakes_are_one_line(self, file, capsys, arguments, text):
        assert main(["sandbox", "build", *arguments, "--instances", file]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1

    def test_a_file_of_the_data_folder_is_found_from_anywhere(self, file, capsys, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", str(Path(file).parent))
        monkeypatch.chdir("/")
        assert main(["sandbox", "build", "swe", "--only", "x", "--instances", Path(file).name]) == 2
        assert "has no instance 'x'" in capsys.readouterr().err

    def test_a_missing_file_too(self, capsys):
        assert main(["sandbox", "build", "swe", "--instances", "/no/such.jsonl"]) == 2
        assert "there is no such file" in capsys.readouterr().err

    def test_ids_without_a_file(self, capsys):
        assert main(["sandbox", "build", "swe", "--only", "x"]) == 2
        assert "add --instances FILE" in capsys.readouterr().err


def test_the_command_builds_and_lists(built, file, capsys):
    assert main(["sandbox", "build", "swe", "--instances", file, "--only", ID]) == 0
    out = capsys.readouterr().out
    assert f"{ID}: already there" in out
    assert "1 of 1 images are there" in out


def test_git_of_this_machine_is_not_asked_for_settings(built, django, of_the_test, monkeypatch, tmp_path):
    (tmp_path / "config").write_text(
        "[commit]\n\tgpgSign = true\n[core]\n\tautocrlf = true\n[init]\n\ttemplateDir = /nowhere\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    (again,) = images.build([replace(django, id="o__r-2")], docker=False)
    assert again.built is not None, again.error
    heads = {root.joinpath("testbed/.git/refs/heads/main").read_text() for root in (again.built.rootfs, built.rootfs)}
    assert len(heads) == 1
    assert (
        subprocess.run(
            ["git", "-C", again.built.rootfs / "testbed", "fsck"], env={"PATH": os.environ["PATH"]}, check=False
        ).returncode
        == 0
    )
