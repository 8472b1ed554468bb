"""Images that others publish: root's own repository with a future, as on a registry, but made here. Ready for an agent, and no way to the future."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest
from swe_bench_cases import instance, require

import agentgym
from agentgym.core.tasks import TaskSet
from agentgym.sandbox import SandboxError
from agentgym.sandbox.backends import engine
from agentgym.sandbox.backends.select import close_pools
from agentgym.sandbox.images import build as images
from agentgym.tools.text_forms import call_text
from agentgym_envs import register_all
from agentgym_envs.swe_bench.grading import grade
from agentgym_envs.swe_bench.images import build, image_of
from agentgym_envs.swe_bench.tasks import task_of
from agentgym_envs.swe_bench.worktree import base_of, open_repository, patch_of, run

register_all()
pytestmark = [pytest.mark.docker]

SOUND, BROKEN = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
FIX = """\
diff --git a/pkg/calc.py b/pkg/calc.py
--- a/pkg/calc.py
+++ b/pkg/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
BUG = FIX.replace("a - b", "a * b").replace("a + b", "a - b").replace("a * b", "a + b")
TESTS = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,2 +1,5 @@
 def test_old():
     assert True
+def test_new():
+    from pkg.calc import add
+    assert add(2, 3) == 5
"""
# A base commit with a file that git ignores and tracks; then the future: the fix, in commits, a tag, a remote, a stash and a reflog.
DOCKERFILE = """\
FROM {swe}
COPY site /opt/site
RUN rm /etc/gitconfig && echo /opt/site > /usr/lib/python3/dist-packages/site.pth \\
 && mkdir -p /usr/local/bin && printf '#!/bin/sh\\nexec python3 -m pytest "$@"\\n' > /usr/local/bin/pytest && chmod 755 /usr/local/bin/pytest
COPY make.sh /make.sh
RUN bash /make.sh && rm /make.sh
ENV PATH=/nowhere:/usr/bin:/bin
USER 1000
"""
MAKE = """\
set -euo pipefail
mkdir -p /testbed/pkg /testbed/tests && cd /testbed
git init -q --initial-branch=main . && git config user.name a && git config user.email a@b
printf '*.log\\n' > .gitignore
printf 'kept' > kept.log
printf '{broken}' > pkg/calc.py && touch pkg/__init__.py
printf 'def test_old():\\n    assert True\\n' > tests/test_calc.py
git add -A && git add -f kept.log && git commit -qm base
printf '{sound}' > pkg/calc.py && git commit -qam 'the fix of the future' && git tag v2
git clone -q --bare . /srv/upstream.git && git remote add origin /srv/upstream.git && git fetch -q origin
rm -rf /srv/upstream.git
git branch -q next && git reset -q --hard HEAD~1
echo x >> pkg/calc.py && git stash -q
git init -q inner && touch inner/file
mkdir -p /r2e_tests /root/.local/bin && cp /usr/bin/python3 /root/.local/bin/python3
printf 'from pkg.calc import add\\ndef test_sum():\\n    assert add(2, 3) == 5\\n' > /r2e_tests/test_1.py
printf '.venv/bin/python -m pytest -rA r2e_tests\\n' > run_tests.sh
printf '{{"test_sum": "PASSED"}}' > expected_test_output.json
/root/.local/bin/python3 -m venv --without-pip --system-site-packages .venv
chmod 700 /root && chown -R root:root /testbed && chmod -R go-w /testbed
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The tag of such an image."""
    images.build("swe", docker=True)
    folder, client = tmp_path_factory.mktemp("published"), engine.client()
    for name in "pytest", "pluggy", "iniconfig", "packaging", "pygments":
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or []} - {".."}:
            source = Path(str(package.locate_file(part)))
            target = folder / "site" / part
            target.parent.mkdir(exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    (folder / "Dockerfile").write_text(DOCKERFILE.format(swe=images.docker_tag("swe")))
    texts = {"broken": BROKEN.replace("\n", "\\n"), "sound": SOUND.replace("\n", "\\n")}
    (folder / "make.sh").write_text(MAKE.format(**texts))
    tag = f"agentgym-test/published:{os.getpid()}"
    told = list(client.build(path=str(folder), tag=tag, rm=True, forcerm=True, network_mode="none", decode=True))
    assert "error" not in told[-1], told[-5:]
    yield tag
    client.remove_image(tag, force=True)


def described(image, **changes):
    given = {"id": "pallets__flask-1", "patch": FIX, "test_patch": TESTS, "image": image, "version": "2.3"}
    given |= {"fail_to_pass": ("tests/test_calc.py::test_new",), "pass_to_pass": ("tests/test_calc.py::test_old",)}
    return instance(**{**given, **changes})


@contextlib.contextmanager
def built(*instances, rootfs=False):
    try:
        for made in build(instances, rootfs=rootfs):
            assert made.built is not None, made.error
        yield instances[0]
    finally:
        close_pools()
        for one in instances:
            for folder in {image_of(one, tests) for tests in (True, False)}:
                engine.client().remove_image(images.docker_tag(folder), force=True)
                shutil.rmtree(images.recipe(folder).place, ignore_errors=True)


@pytest.fixture(scope="module")
def ready(published):
    """As SWE-bench publishes them, for both back ends."""
    with built(described(published), rootfs=not os.getuid()) as made:
        yield made


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request, monkeypatch):
    return require(request.param, monkeypatch)


@pytest.fixture
def box(ready, backend):
    with contextlib.closing(open_repository(ready, backend, tests=False)) as opened:
        yield opened


def git(box, words):
    result = run(box, f"git {words}", 60)
    assert result.ok, result
    return result.stdout.split("\n")[:-1]


def test_the_agent_cannot_reach_the_future(box):
    assert git(box, "log --all --format=%s") == ["The repository before the issue was resolved"]
    assert git(box, "tag") == git(box, "remote") == git(box, "stash list") == git(box, "reflog") == []
    reachable = {line.split()[0] for line in git(box, "rev-list --objects --all")}
    assert {line.split()[0] for line in git(box, "cat-file --batch-all-objects --batch-check")} == reachable
    assert not run(box, "grep -rl 'a + b' / --include=calc.py --exclude-dir=proc 2>/dev/null", 60).stdout
    assert not run(box, "ls -d /agentgym /srv/upstream.git 2>/dev/null", 60).stdout


def test_it_is_clean_and_has_all_that_was_there(box):
    assert git(box, "status --porcelain --branch") == ["## main"]
    tracked = git(box, "ls-files")
    assert {".gitignore", "kept.log", "pkg/calc.py", "tests/test_calc.py", "inner/file"} <= {*tracked}
    assert not [path for path in tracked if path.startswith(".venv")]
    assert box.exec("cat pkg/calc.py", cwd="/testbed").stdout == BROKEN


def test_its_work_is_seen(box):
    base = base_of(box)
    assert run(
        box, "sed -i s/-/+/ pkg/calc.py && rm kept.log && mkdir new && echo x > new/file && git commit -qam x", 60
    )
    changed = [line for line in patch_of(box, base).splitlines() if line.startswith("diff")]
    assert changed == [f"diff --git a/{name} b/{name}" for name in ("kept.log", "new/file", "pkg/calc.py")]


@pytest.mark.parametrize(("patch", "resolved"), [(FIX, True), ("", False)])
def test_grading_works(ready, backend, patch, resolved):
    found = grade(ready, patch, sandbox=backend)
    assert found.verdict is not None, found
    assert found.resolved == resolved
    assert found.verdict.doubt == ""


def test_an_episode_edits_and_submits(ready, backend):
    env = agentgym.make("swe_bench", sandbox=backend, tasks=TaskSet([task_of(ready)]))
    env.reset(seed=0)
    env.step(call_text("edit", command="str_replace", path="pkg/calc.py", old_str="a - b", new_str="a + b"))
    _, reward, _, _, info = env.step(call_text("submit"))
    env.close()
    assert (reward, info["resolution"]) == (1.0, "RESOLVED_FULL")


def test_before_it_is_built_the_error_names_the_command(published, backend):
    other = described(published, id="a__b-1")
    with pytest.raises(SandboxError, match="agentgym sandbox build swe --instances FILE --only a__b-1"):
        open_repository(other, backend)


class TestSWESmith:
    """Its patch changes the published repository before the agent comes. Here it happens to be the one that mends it."""

    @pytest.fixture(scope="class")
    def smith(self, published):
        case = described(published, id="o__r.0.x/1", repo="swesmith/o__r.0", patch=BUG, bug_patch=FIX, test_patch="")
        case = dataclasses.replace(case, fail_to_pass=("tests/test_calc.py::test_old",), pass_to_pass=())
        with built(case) as made:
            yield made

    def test_the_change_is_in_the_only_commit(self, smith, monkeypatch):
        require("docker", monkeypatch)
        with contextlib.closing(open_repository(smith, "docker", tests=False)) as box:
            assert (git(box, "status --porcelain"), len(git(box, "log --all --format=%H"))) == ([], 1)
            assert box.exec("cat pkg/calc.py", cwd="/testbed").stdout == SOUND

    def test_one_whose_bug_does_not_apply_is_told(self, published):
        [made] = build([described(published, bug_patch=BUG)], docker=True)
        assert "patch does not apply" in made.error


class TestR2EGym:
    """The image has hidden tests, in its root or in the repository, and files that tell the solution."""

    @pytest.fixture(scope="class")
    def r2e(self, published):
        case = described(published, id="r2e", repo="o/r", test_patch="", test_command="bash run_tests.sh")
        case = dataclasses.replace(case, fail_to_pass=(), pass_to_pass=(), expected={"test_sum": "PASSED"})
        with built(case) as made:
            yield made

    @pytest.fixture(autouse=True)
    def on_docker(self, monkeypatch):
        require("docker", monkeypatch)

    def test_the_agent_sees_none_of_them_and_has_its_python(self, r2e):
        with contextlib.closing(open_repository(r2e, "docker", tests=False)) as box:
            names = "-name 'r2e_tests*' -o -name run_tests.sh -o -name expected_test_output.json"
            assert not run(box, f"find / -xdev \\( {names} \\) 2>/dev/null", 60).stdout
            assert not run(box, "git ls-files | grep -E 'r2e|run_tests|expected'", 60).ok
            assert run(box, "python -c 'import sys; print(sys.prefix)'", 60).stdout == "/testbed/.venv\n"
            assert git(box, "status --porcelain") == []

    @pytest.mark.parametrize(("patch", "resolved"), [(FIX, True), ("", False)])
    def test_they_judge(self, r2e, patch, resolved):
        found = grade(r2e, patch, sandbox="docker")
        assert found.verdict is not None, found
        assert found.resolved == resolved


def test_an_engine_alone_keeps_no_copy_of_the_files(published):
    case = described(published, id="o__r-2")
    with built(case):
        [made] = build([case], rootfs=False)
        assert (made.built.rootfs, made.built.fresh, made.built.bytes > 0) == (None, False, True)
        assert images.rootfs(image_of(case)) is None
