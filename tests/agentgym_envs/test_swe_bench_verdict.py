"""swe_bench: when an issue is resolved, and that SWE-bench's package says the same."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from swe_bench_cases import LITE, THEIRS, instance, swebench

from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.logs import END, START, STATUSES
from agentgym_envs.swe_bench.verdict import judge_statuses, statuses_of

FIX, OLD = "tests/test_one.py::test_fix", "tests/test_one.py::test_old"


def judged(case, *lines, exit_code=None):
    return judge_statuses(case, statuses_of(case, "\n".join(lines)), exit_code=exit_code)


def test_all_required_tests_pass():
    verdict = judged(instance(), f"PASSED {FIX}", f"PASSED {OLD}")
    assert verdict.resolved
    assert verdict.resolution == "RESOLVED_FULL"
    assert [(test.name, test.status, test.good) for test in verdict.tests] == [
        (FIX, "PASSED", True),
        (OLD, "PASSED", True),
    ]


@pytest.mark.parametrize(
    ("status", "fixed", "kept"),
    [
        ("PASSED", True, True),
        ("XFAIL", True, True),
        ("SKIPPED", False, True),
        ("FAILED", False, False),
        ("ERROR", False, False),
        (None, False, False),
    ],
)
def test_what_each_status_means_for_a_test_to_fix_and_one_to_keep(status, fixed, kept):
    said = {} if status is None else {FIX: status, OLD: status}
    verdict = judge_statuses(instance(), said)
    assert [test.good for test in verdict.tests] == [fixed, kept]


def test_part_of_the_fix_is_partial():
    two = instance(fail_to_pass=("a", "b"))
    assert judge_statuses(two, {"a": "PASSED", "b": "FAILED", OLD: "PASSED"}).resolution == "RESOLVED_PARTIAL"
    assert judge_statuses(two, {"a": "PASSED", "b": "FAILED", OLD: "FAILED"}).resolution == "RESOLVED_NO"


def test_a_failed_command_without_a_failed_test_is_not_believed():
    good = f"PASSED {FIX}", f"PASSED {OLD}"
    verdict = judged(instance(), *good, exit_code=1)
    assert not verdict.resolved
    assert verdict.resolution == "RESOLVED_NO"
    assert "exit code 1" in verdict.doubt
    assert judged(instance(), *good, exit_code=0).resolved
    assert judged(instance(), *good, "FAILED other", exit_code=1).resolved


def test_lines_that_are_no_test_s_are_left_out_in_no_time():
    start = time.process_time()
    long, almost = f"PASSED {FIX}{' ' * 10_000}", "x" * 9999
    assert statuses_of(instance(), "\n".join([long, f"PASSED {OLD}", *[almost] * 800])) == {OLD: "PASSED"}
    assert time.process_time() - start < 5


def test_names_that_a_data_set_cut_off_are_found_by_their_beginning():
    cut = instance(fail_to_pass=("a.py::t[x(y",), pass_to_pass=())
    assert judge_statuses(cut, {"a.py::t[x(y, z)]": "PASSED"}).resolved
    assert judge_statuses(cut, {"a.py::t[x(y, z)]": "PASSED", "a.py::t[x(y)]": "XFAIL"}).resolved
    assert not judge_statuses(cut, {"a.py::t[x(y, z)]": "PASSED", "a.py::t[x(y)]": "FAILED"}).resolved
    whole = instance(fail_to_pass=("a.py::t",), pass_to_pass=())
    assert not judge_statuses(whole, {"a.py::t[x]": "PASSED"}).resolved


def test_r2e_gym_wants_each_status_exactly_and_no_other_test():
    r2e = instance(repo="aiohttp", fail_to_pass=(), pass_to_pass=(), expected={"A.x": "PASSED", "y": "FAILED"})
    summary = "== short test summary info ==\nPASSED t.py::A::x\n{} t.py::y - no\n"
    assert judged(r2e, summary.format("FAILED")).resolved
    assert [test.good for test in judged(r2e, summary.format("PASSED")).tests] == [True, False]
    assert not judged(r2e, summary.format("FAILED") + "PASSED t.py::z").resolved


def theirs(module, statuses, fail_to_pass, pass_to_pass):
    gold = {"FAIL_TO_PASS": list(fail_to_pass), "PASS_TO_PASS": list(pass_to_pass)}
    report = module.get_eval_tests_report(statuses, gold)
    return report, module.get_resolution_status(report)


def assert_same(module, case, statuses):
    report, resolution = theirs(module, statuses, case.fail_to_pass, case.pass_to_pass)
    verdict = judge_statuses(case, statuses)
    assert verdict.resolution == resolution
    for kind, tests in (("FAIL_TO_PASS", verdict.fail_to_pass), ("PASS_TO_PASS", verdict.pass_to_pass)):
        assert [test.name for test in tests if test.good] == report[kind]["success"]
        assert [test.name for test in tests if not test.good] == report[kind]["failure"]


def test_swe_bench_gives_the_same_report_of_any_statuses():
    module = swebench("harness.grading", 5)
    rng = random.Random(0)
    names = ["a", "b", "c[1]", "c[2]", "c[12]", "d[x(y", "d[x(y)]", "d[x(y, z)]", "e[", "e[]"]
    for bias in [0.5, 0.95] * 300:
        split = rng.randint(1, len(names))
        rng.shuffle(names)
        case = instance(fail_to_pass=tuple(names[:split]), pass_to_pass=tuple(names[split:]))
        statuses = {n: "PASSED" if rng.random() < bias else rng.choice(STATUSES) for n in names if rng.random() < bias}
        assert_same(module, case, statuses)


def real_log(repo: str, statuses: dict[str, str]) -> str:
    """A log of a repository's test runner with these statuses."""
    django = {
        "PASSED": "ok",
        "SKIPPED": "skipped 'no'",
        "FAILED": "FAIL",
        "ERROR": "ERROR",
        "XFAIL": "expected failure",
    }
    sympy = {"PASSED": "ok", "SKIPPED": "s", "FAILED": "F", "ERROR": "E", "XFAIL": "f"}
    if repo == "django/django":
        return "\n".join([*(f"{name} ... {django[status]}" for name, status in statuses.items()), "Ran 9 tests in 1s"])
    if repo == "sympy/sympy":
        return "\n".join(f"{name} {sympy[status]}" for name, status in statuses.items())
    reason = {"FAILED": " - AssertionError: assert 1 - 2", "XFAIL": " - known"}
    lines = (f"{status} {name}{reason.get(status, '')}" for name, status in statuses.items())
    return "\n".join(["=== short test summary info ===", *lines, "SKIPPED [1] a.py:1: no", "== 1 failed in 0.1s =="])


@pytest.mark.skipif(not LITE.is_file(), reason="needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
@pytest.mark.data
def test_swe_bench_gives_real_instances_the_same_verdict_on_whole_logs(tmp_path):
    module = swebench("harness.grading", 5)
    parsers = swebench("harness.log_parsers.python", 5)
    rng = random.Random(0)
    resolved = 0
    for case in read_instances(LITE):
        name = THEIRS[case.repo]
        assert hasattr(parsers, name)
        spec = SimpleNamespace(log_parser=name, eval_type="pass_and_fail", instance_id=case.id)
        spec.FAIL_TO_PASS, spec.PASS_TO_PASS = list(case.fail_to_pass), list(case.pass_to_pass)
        for bad in (0, 1, 3):
            statuses = dict.fromkeys((*case.fail_to_pass, *case.pass_to_pass), "PASSED")
            for test in rng.sample(sorted(statuses), min(bad, len(statuses))):
                statuses[test] = rng.choice(STATUSES[1:])
            log = real_log(case.repo, statuses)
            (tmp_path / "log").write_text(f"+ : '{START}'\n{log}\n+ : '{END}'\n")
            given = {"instance_id": case.id, "model_patch": case.patch}
            report = module.get_eval_report(spec, given, str(tmp_path / "log"), include_tests_status=True)[case.id]
            verdict = judged(case, log)
            assert verdict.resolved == report["resolved"]
            # SWE-bench tells nothing of tests if the log names none.
            told = report.get("tests_status", {"FAIL_TO_PASS": {"success": []}, "PASS_TO_PASS": {"success": []}})
            for kind, tests in (("FAIL_TO_PASS", verdict.fail_to_pass), ("PASS_TO_PASS", verdict.pass_to_pass)):
                assert [test.name for test in tests if test.good] == told[kind]["success"]
            resolved += verdict.resolved
            if bad == 0:
                assert verdict.resolved, case.id
    assert 150 <= resolved < 450
