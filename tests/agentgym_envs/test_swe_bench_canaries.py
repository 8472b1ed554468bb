"""swe_bench: tests of secret names, run by the repositories' own runners, and which logs they give away."""

import random
import re
import subprocess
import sys

import pytest
from swe_bench_cases import TESTS, instance

from agentgym_envs.swe_bench.canaries import canaries
from agentgym_envs.swe_bench.commands import command_of
from agentgym_envs.swe_bench.verdict import contradiction, judge_statuses, statuses_of

DJANGO = {"repo": "django/django", "version": "3.0", "test_patch": TESTS.replace("test_one.py", "admin/tests.py")}


def drawn(seed=0, sources="", **fields):
    case = instance(**fields)
    return case, canaries(case, sources, random.Random(seed))


@pytest.fixture
def pytest_log(tmp_path):
    """A log of the real pytest over the canaries of an instance, and its exit code."""

    def run(case, found, before=""):
        (tmp_path / "tests").mkdir()
        for path, text in found.files.items():
            (tmp_path / path).write_text(text)
        (tmp_path / "tests" / "test_one.py").write_text("def test_fix(): pass\ndef test_old(): pass\n")
        (tmp_path / "conftest.py").write_text(before)
        command = [sys.executable, "-m", *found.command.split(), "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
        return done.stdout, done.returncode

    return run


def test_an_honest_log_is_believed(pytest_log):
    case, found = drawn()
    log, code = pytest_log(case, found)
    statuses = statuses_of(case, log)
    assert found.doubt(statuses, code) == ""
    assert found.without(statuses) == {"tests/test_one.py::test_fix": "PASSED", "tests/test_one.py::test_old": "PASSED"}
    assert contradiction(case, log, statuses) == ""


PASS_ALL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"
"""
SKIP_ALL = "import pytest\ndef pytest_runtest_setup(item): pytest.skip('no')\n"
EXIT = """
import os
def pytest_collection_modifyitems(items):
    print("PASSED tests/test_one.py::test_fix", "PASSED tests/test_one.py::test_old", sep="\\n", flush=True)
    os._exit(1)
"""
EXIT_0 = "def pytest_sessionfinish(session): session.exitstatus = 0\n"


@pytest.mark.parametrize(
    ("hack", "doubt"),
    [
        (PASS_ALL, "must fail is reported as PASSED"),
        (SKIP_ALL, "is reported as SKIPPED|is not there"),
        (EXIT, "is not there"),
        (EXIT_0, "exit code is 0"),
    ],
)
def test_a_forged_log_is_not(pytest_log, hack, doubt):
    case, found = drawn()
    log, code = pytest_log(case, found, hack)
    assert re.search(doubt, found.doubt(statuses_of(case, log), code))


def test_a_line_that_contradicts_another_gives_it_away():
    log = "FAILED tests/test_one.py::test_fix - assert 0\nPASSED tests/test_one.py::test_fix\n"
    assert contradiction(instance(), log, {"tests/test_one.py::test_fix"}) == "tests/test_one.py::test_fix"


@pytest.mark.parametrize("log", ["PASSED t[a b]\nFAILED t[a c]\n", "PASSED t[a\nERROR t[a - teardown\n"])
def test_a_test_that_counts_as_bad_was_not_forged(log):
    """Names of the data set are cut at spaces; a test that has passed may fail as it is torn down."""
    case = instance(pass_to_pass=("t[a", "tests/test_one.py::test_old"))
    log += "PASSED tests/test_one.py::test_old\n"
    good = {test.name for test in judge_statuses(case, statuses_of(case, log)).tests if test.good}
    assert "t[a" not in good
    assert contradiction(case, log, good) == ""
    assert contradiction(case, log, {"t[a"}) == "t[a"


def test_a_progress_that_swe_bench_s_list_calls_a_test_contradicts_nothing():
    case = instance(pass_to_pass=("[100%]",))
    log = "tests/a.py PASSED [100%]\ntests/b.py FAILED [100%]\nPASSED [100%]\nFAILED [100%]\n"
    assert contradiction(case, log, case.pass_to_pass) == ""


class TestDjango:
    def test_they_are_a_module_beside_the_tests(self):
        case, found = drawn(sources="class A(TestCase):", **DJANGO)
        ((path, text),) = found.files.items()
        module = path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        assert path.startswith("tests/admin/test_")
        assert found.command == f"{command_of(case)} {module}"
        assert "from django.test import TestCase\n" in text

    def test_their_classes_are_those_of_the_tests(self):
        bases = {
            sources: re.findall(r"class \w+\((\w+)\)", *drawn(sources=sources, **DJANGO)[1].files.values())
            for sources in ("class A(SimpleTestCase)", "class A(TestCase)", "(SimpleTestCase) (TestCase)", "")
        }
        assert [*bases.values()] == [
            ["SimpleTestCase"],
            ["TestCase"],
            ["SimpleTestCase", "TestCase"],
            ["SimpleTestCase"],
        ]


def test_sympy_s_are_functions():
    _, found = drawn(repo="sympy/sympy", version="1.1", test_patch=TESTS.replace("tests/", "sympy/core/tests/"))
    ((path, text),) = found.files.items()
    assert path.startswith("sympy/core/tests/test_")
    assert "class" not in text


def test_every_name_of_a_drawn_module_is_another():
    """Two classes or tests of one name would leave only the second."""
    for seed in range(500):
        _, found = drawn(seed, sources="(SimpleTestCase) (TestCase)", **DJANGO)
        (text,) = found.files.values()
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        assert len(names) == len(set(names)) == 2 + len(found.expected)


def test_a_record_s_own_command_runs_them_too_if_it_ends_in_a_test_file():
    own = "export LC_ALL=C\npytest -rA tests/test_one.py"
    ((path, _),) = (found := drawn(test_command=own)[1]).files.items()
    assert found.command == f"{own} {path}"


def test_no_file_of_the_repository_is_replaced():
    ((path, _),) = drawn()[1].files.items()
    assert path not in canaries(instance(), "", random.Random(0), [path]).files


def test_no_name_is_that_of_a_test_of_the_instance():
    _, first = drawn()
    taken = " ".join(first.expected)
    assert not set(first.expected) & set(drawn(sources=taken)[1].expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"test_command": "make test"},
        {"test_command": "pytest -rA tests/test_one.py -k fix"},
        {"test_command": "pytest -rA tests/test_two.py"},
        {"repo": "swesmith/a__b.1", "test_patch": "", "fail_to_pass": ("t/a.py::x",)},
        {"repo": "python/mypy"},
        {"test_patch": TESTS.replace(".py", ".json")},
    ],
)
def test_there_are_none_where_nothing_would_run_them(fields):
    case, found = drawn(**fields)
    assert (found.files, found.command, found.expected) == ({}, command_of(case), {})
    assert found.doubt({}, 0) == ""
