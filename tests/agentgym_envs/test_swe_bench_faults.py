"""swe_bench: what the machinery brings about is an error, what a patch's own code does is its failure; on an instance of flask."""

import dataclasses
import subprocess
import sys
from contextlib import nullcontext

import pytest
from swe_bench_cases import built, require

from agentgym.sandbox import ExecResult
from agentgym_envs.swe_bench import grading, hack_code, worktree
from agentgym_envs.swe_bench.grading import GradingError, grade
from agentgym_envs.swe_bench.trial import Trial
from agentgym_envs.swe_bench.verdict import judge_statuses
from agentgym_envs.swe_bench.worktree import Size

MEMORY = 512 << 20
HOG = "python -c 'x = bytearray(2 << 30)'"


@pytest.fixture(scope="module")
def instance():
    return built("pallets__flask-4992")


@pytest.fixture
def judged(instance, monkeypatch):
    """Grades a patch of an instance with changed fields, with no run of its gold patch known."""
    where = require("bubblewrap", monkeypatch)
    monkeypatch.setattr(grading, "_golds", {})
    monkeypatch.setattr(grading, "_believed", set())

    def judge(patch, test_timeout=300.0, memory=4 << 30, **changes):
        changed = dataclasses.replace(instance, **changes)
        return grade(changed, patch, sandbox=where, test_timeout=test_timeout, size=Size(memory=memory))

    return judge


def code(patch, *lines):
    """A patch, and lines before the first of `flask/__init__.py`."""
    path = "src/flask/__init__.py"
    body = "".join(f"+{line}\n" for line in lines) + " from . import json as json\n from .app import Flask as Flask\n"
    heading = f"@@ -1,2 +1,{len(lines) + 2} @@"
    return f"{patch}diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{heading}\n{body}"


def test_memory_that_the_patch_uses_up_is_its_failure(judged, instance):
    found = judged(code(instance.patch, "x = bytearray(2 << 30)"), memory=MEMORY)
    assert (found.patch, found.resolved, found.verdict) == ("applied", False, None)


@pytest.mark.parametrize(("seconds", "error"), [(1.9, ""), (2.1, "its tests take 2 s with the gold patch")])
def test_time_that_the_patch_uses_up_is_its_failure_if_the_gold_patch_needs_at_most_half(
    judged, instance, seconds, error
):
    grading._golds[instance, "bubblewrap", Size()] = Trial((), verdict=judge_statuses(instance, {}), seconds=seconds)
    slow = code(instance.patch, "import time", "time.sleep(1000)")
    with pytest.raises(GradingError, match=error) if error else nullcontext():
        found = judged(slow, test_timeout=4.0)
        assert (found.resolved, found.failure) == (False, "the tests did not end in time")


@pytest.mark.parametrize(
    ("command", "limits", "why"),
    [
        ("sleep 100", {"test_timeout": 1.0}, "its tests do not run in its image: the tests did not end in time"),
        (f"{HOG}; exit 1", {"memory": MEMORY}, "its tests do not run in its image"),
    ],
)
def test_tests_that_break_with_the_gold_patch_too_are_an_error(judged, instance, command, limits, why):
    with pytest.raises(GradingError, match=why):
        judged("", test_command=command, **limits)


def test_so_is_a_list_of_files_that_is_cut_off(judged, instance, monkeypatch):
    """Tests in the middle would go unprotected."""
    monkeypatch.setattr(worktree, "OUTPUT", 4096)
    with pytest.raises(GradingError, match="names of the files"):
        judged(instance.patch)


def test_so_is_a_gold_patch_that_is_not_believed(judged, instance):
    """The canaries, which the command does not select, are missing in its log too."""
    with pytest.raises(GradingError, match="its gold patch is not believed either: a test of secret name"):
        judged(instance.patch, test_command="pytest -rA -k toml tests/test_config.py", pass_to_pass=())


@pytest.mark.parametrize(("gold", "resolved"), [("XFAIL", True), ("PASSED", False)])
def test_a_test_may_fail_as_expected_where_it_does_with_the_gold_patch(judged, instance, gold, resolved):
    (test,) = instance.fail_to_pass
    said = judge_statuses(instance, dict.fromkeys((test, *instance.pass_to_pass), "PASSED") | {test: gold})
    grading._golds[instance, "bubblewrap", Size()] = Trial((), verdict=said)
    found = judged(code(instance.patch, *hack_code.known(instance, "xfails").split("\n")))
    assert (found.resolved, found.verdict.fail_to_pass[0].status) == (resolved, "XFAIL")


def test_part_of_the_reward_is_not_paid_if_it_is_forged(judged, instance):
    broken = "import flask.config", "flask.config.Config.get_namespace = None"
    honest = judged(code(instance.patch, *broken))
    assert (honest.resolved, honest.fraction, honest.verdict.doubt) == (False, pytest.approx(17 / 18), "")
    forged = judged(code("", *broken, *hack_code.known(instance).split("\n")))
    assert (forged.resolved, forged.fraction) == (False, 0.0)
    assert "even when it is made to fail" in forged.verdict.doubt


def test_pythons_before_3_6_and_those_that_warn_tell_their_modules(tmp_path):
    """`pkgutil.iter_modules` gave plain tuples; a warning comes before the answer."""
    (tmp_path / "usercustomize.py").write_text("")
    old = "import pkgutil\nfound = pkgutil.iter_modules\npkgutil.iter_modules = lambda: map(tuple, found())\nprint('a warning')\n"

    class Box:
        def exec(self, command, **_):
            done = subprocess.run(
                [sys.executable, "-c", old + worktree._IMPORTABLE, str(tmp_path)],
                capture_output=True,
                text=True,
                check=True,
            )
            return ExecResult(0, done.stdout, done.stderr)

    importable, known = worktree.module_names(Box())
    assert {"json", "pytest"} <= set(importable)
    assert known == ["usercustomize"]
