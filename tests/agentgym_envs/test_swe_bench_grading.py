"""swe_bench: what grading makes of patches, on a real instance of Django in real sandboxes."""

import dataclasses

import pytest
from swe_bench_cases import MODIFIED, built, require

from agentgym.sandbox import SandboxError
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.grading import Grade, GradingError, grade
from agentgym_envs.swe_bench.patches import PatchError
from agentgym_envs.swe_bench.verdict import Outcome, Verdict
from agentgym_envs.swe_bench.worktree import base_of, open_repository, patch_of

ID = "django__django-10924"
INIT = "django/__init__.py"


def added(path, *lines):
    body = "".join(f"+{line}\n" for line in lines)
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{body}"


def to_init(*lines):
    """A patch that puts lines before the first of `django/__init__.py`."""
    body = "".join(f"+{line}\n" for line in lines)
    heading = f"@@ -1,2 +1,{len(lines) + 2} @@"
    first = " from django.utils.version import get_version\n \n"
    return f"diff --git a/{INIT} b/{INIT}\n--- a/{INIT}\n+++ b/{INIT}\n{heading}\n{body}{first}"


@pytest.fixture(scope="module")
def instance():
    return built(ID)


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request, instance, monkeypatch):
    return require(request.param, monkeypatch)


@pytest.fixture
def judged(instance, monkeypatch):
    where = require("bubblewrap", monkeypatch)
    return lambda patch, **changes: grade(dataclasses.replace(instance, **changes), patch, sandbox=where)


def test_the_gold_patch_resolves_and_no_patch_does_not(instance, backend):
    gold, none = grade(instance, instance.patch, sandbox=backend), grade(instance, "", sandbox=backend)
    assert (gold.patch, gold.resolved, gold.fraction, gold.dropped) == ("applied", True, 1.0, ())
    assert (none.patch, none.resolved, none.fraction, none.verdict.doubt) == ("empty", False, 0.0, "")
    assert [test.good for test in none.verdict.tests].count(False) == len(instance.fail_to_pass)


def test_a_patch_that_edits_tests_alone_has_nothing_left(judged, instance):
    found = judged(instance.test_patch)
    assert (found.patch, found.resolved) == ("applied", False)
    assert set(found.dropped) == {"tests/model_fields/test_filepathfield.py"}


def test_what_judges_is_dropped_beside_a_right_patch(judged, instance):
    found = judged(
        instance.patch + added("tests/conftest.py", "raise SystemExit") + added("json.py", "raise SystemExit")
    )
    assert (found.resolved, found.dropped) == (True, ("tests/conftest.py", "json.py"))


def test_the_fraction_of_a_record_that_does_not_say_which_tests_passed_before_is_1_or_0():
    """As R2E-Gym's: a patch that changes nothing would have the share of all tests that pass anyway."""
    tests = (Outcome("old", "PASSED", True), Outcome("issue", "FAILED", False))
    assert Grade("applied", Verdict((), tests)).fraction == 0.0
    assert Grade("applied", Verdict((), tests[:1])).fraction == 1.0
    assert Grade("applied", Verdict(tests[1:], tests[:1])).fraction == 0.0


def test_a_virtual_environment_beside_a_right_patch_is_dropped(judged, instance):
    link = added("venv/bin/python", "/usr/bin/python").replace("100644", "120000")
    found = judged(instance.patch + link)
    assert (found.resolved, found.dropped) == (True, ("venv/bin/python",))


def test_a_patch_that_breaks_everything_is_not_resolved(judged, instance):
    found = judged(instance.patch + to_init("raise RuntimeError"))
    assert (found.resolved, found.verdict, found.failure) == (False, None, "no test runs")


PRINTED = (
    "import os, sys",
    "if 'runtests' in sys.argv[0]:",
    "    print('test_callable_path (model_fields.test_filepathfield.FilePathFieldTests) ... ok')",
    "    print('test_path (model_fields.test_filepathfield.FilePathFieldTests) ... ok', flush=True)",
    "    os._exit(0)",
)
ALWAYS_OK = (
    "import unittest",
    "unittest.TextTestResult.addError = lambda self, test, err: self.addSuccess(test)",
    "unittest.TextTestResult.addFailure = lambda self, test, err: self.addSuccess(test)",
)


@pytest.mark.parametrize("code", [PRINTED, ALWAYS_OK])
def test_results_that_the_patch_forges_are_not_believed(judged, instance, code):
    found = judged(to_init(*code))
    assert not found.resolved
    assert found.verdict.doubt
    assert found.fraction == 0.0


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("no patch at all", "refused: line 1"),
        (added("../x.py", "x"), "refused: "),
        (added(".git/hooks/pre-commit", "x"), "refused: "),
        (MODIFIED, "does not apply: "),
    ],
)
def test_a_patch_that_may_not_or_does_not_apply_says_why(judged, patch, said):
    found = judged(patch)
    assert found.patch.startswith(said)
    assert (found.resolved, found.verdict) == (False, None)


def test_an_instance_whose_tests_do_not_run_is_an_error(judged, instance):
    with pytest.raises(GradingError, match="its tests do not run in its image"):
        judged(instance.patch, test_command="true")


def test_a_sandbox_that_cannot_start_is_an_error(instance):
    with pytest.raises(SandboxError):
        grade(instance, instance.patch, sandbox="http://127.0.0.1:9")


class TestPatch:
    @pytest.fixture
    def box(self, instance, backend):
        opened = open_repository(instance, backend)
        yield opened
        opened.close()

    def test_a_command_of_git_that_takes_too_long_is_no_verdict(self, box, monkeypatch):
        with pytest.raises(PatchError, match="it took too long"):
            patch_of(box, base_of(box), share=0.00001)
        monkeypatch.setattr(worktree, "_GIT_SECONDS", 0.001)
        with pytest.raises(SandboxError, match="applying a patch took over"):
            worktree.apply(box, MODIFIED)

    def test_it_has_changed_new_and_deleted_files(self, box):
        base = base_of(box)
        box.exec(
            "echo x >> setup.py; echo y > new.txt; rm README.rst; printf '\\0' > b.bin; ln -s new.txt l", cwd="/testbed"
        )
        patch = patch_of(box, base)
        assert [line for line in patch.splitlines() if line.startswith("diff")] == [
            f"diff --git a/{name} b/{name}" for name in ("README.rst", "b.bin", "l", "new.txt", "setup.py")
        ]
        assert patch_of(box, base) == patch

    def test_commits_a_locked_index_and_hostile_settings_hide_nothing(self, box):
        base = base_of(box)
        box.exec(
            "echo x >> setup.py; git -c user.name=a -c user.email=a@b commit -qam hidden; git update-index"
            " --assume-unchanged setup.py; touch .git/index.lock; git config diff.noprefix true; git config color.ui always;"
            " git config diff.external /bin/true; git config core.fsmonitor /bin/false; mkdir -p in/.git",
            cwd="/testbed",
        )
        assert patch_of(box, base).startswith("diff --git a/setup.py b/setup.py\n")
