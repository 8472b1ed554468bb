"""swe_bench: what each log parser reads, and that SWE-bench's own parsers read the same."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swe_bench_cases import THEIRS, swebench, swesmith_parser

from agentgym_envs.swe_bench import logs
from agentgym_envs.swe_bench.logs import STATUSES, log_parser

DJANGO = """\
Testing against Django installed in '/testbed/django' with up to 1 processes
Creating test database for alias 'default' ('file:memorydb_default?mode=memory&cache=shared')...
  Applying sites.0002_alter_domain_unique...test_no_migrations (migrations.test_x.T) ... ok
System check identified no issues (1 silenced).
test_add (admin.tests.AddTests) ... ok
test_loud (admin.tests.AddTests) ... warning: this goes on
ok
test_skip (admin.tests.AddTests) ... skipped 'needs MySQL'
test_bad (admin.tests.AddTests) ... FAIL
test_worse (admin.tests.AddTests) ... ERROR
The docstring is the name (2 parts) ... ok
test_server (view_tests.tests.T) ... Internal Server Error: /admin/
ok
test_checks (check.tests.T) ... System check identified no issues (0 silenced)
ok
test_start (runner.tests.T) ... Testing against Django installed in '/testbed/django'
(1 silenced).
ok
--version is equivalent to version
======================================================================
ERROR: test_import (unittest.loader._FailedTest)
----------------------------------------------------------------------
FAIL: test_bad (admin.tests.AddTests)
----------------------------------------------------------------------
Ran 6 tests in 0.1s

FAILED (failures=1, errors=1, skipped=1)
"""

PYTEST = """\
============================= test session starts ==============================
tests/test_a.py .Fs
=========================== short test summary info ============================
PASSED tests/test_a.py::test_good
PASSED tests/test_a.py::test_param[a b]
PASSED tests/test_a.py::test_path[/tmp/some/where.py]
SKIPPED [2] tests/test_a.py:3: no network
XFAIL tests/test_a.py::test_known - a reason
FAILED tests/test_a.py::test_bad - AssertionError: assert 1 - 2
ERROR tests/test_b.py - ImportError: x
========================= 3 passed, 1 failed in 0.12s ==========================
"""

COLORED = """\
tests/test_a.py::test_old_form PASSED
\x1b[32mPASSED\x1b[0m tests/test_a.py::test_good
\x1b[31mFAILED\x1b[0m tests/test_a.py::test_param[a b] - ValueError: no
SKIPPED [2] tests/test_a.py:3: no network
"""

SYMPY = """\
sympy/core/tests/test_a.py[4]
test_good ok
test_bad F
test_worse E
test_open f
                                                                            [FAIL]
________________________________________________________________________________
_______________ sympy/core/tests/test_a.py:test_bad _______________
Traceback (most recent call last):
  File "/testbed/sympy/core/tests/test_a.py", line 3, in test_bad
"""

SEABORN = """\
tests/test_a.py::test_old PASSED [ 10%]
PASSED tests/test_a.py::test_good
FAILED tests/test_a.py::test_bad - AssertionError
ERROR tests/test_a.py::test_worse
"""


def test_a_django_log_names_tests_as_unittest_prints_them():
    assert log_parser("django/django")(DJANGO) == {
        "test_no_migrations (migrations.test_x.T)": "PASSED",
        "test_add (admin.tests.AddTests)": "PASSED",
        "test_loud (admin.tests.AddTests)": "PASSED",
        "test_skip (admin.tests.AddTests)": "SKIPPED",
        "test_bad (admin.tests.AddTests)": "FAILED",
        "test_worse (admin.tests.AddTests)": "ERROR",
        "The docstring is the name (2 parts)": "PASSED",
        "test_server (view_tests.tests.T)": "PASSED",
        "test_checks (check.tests.T)": "PASSED",
        "test_start (runner.tests.T)": "PASSED",
        "--version is equivalent to version": "PASSED",
        "test_import": "ERROR",
        "test_bad": "FAILED",
    }


def test_a_pytest_summary_gives_a_status_for_each_name_up_to_its_first_space():
    assert log_parser("pallets/flask")(PYTEST) == {
        "tests/test_a.py::test_good": "PASSED",
        "tests/test_a.py::test_param[a": "PASSED",
        "tests/test_a.py::test_path[/tmp/some/where.py]": "PASSED",
        "tests/test_a.py::test_known": "XFAIL",
        "tests/test_a.py::test_bad": "FAILED",
        "tests/test_b.py": "ERROR",
    }


def test_requests_parameters_that_are_paths_lose_their_folder():
    found = log_parser("psf/requests")(PYTEST)
    assert found["tests/test_a.py::test_path[/where.py]"] == "PASSED"
    urls = "PASSED t.py::t[//host/x]\nPASSED t.py::t[/a/*]\nPASSED t.py::t[http://a/b]"
    assert set(log_parser("psf/requests")(urls)) == {"t.py::t[//host/x]", "t.py::t[/a/*]", "t.py::t[http://a/b]"}


def test_colours_and_old_lines_are_read_and_names_keep_their_spaces():
    assert log_parser("astropy/astropy")(COLORED) == {
        "tests/test_a.py::test_old_form": "PASSED",
        "tests/test_a.py::test_good": "PASSED",
        "tests/test_a.py::test_param[a b]": "FAILED",
    }


def test_matplotlib_mouse_buttons_are_numbers():
    line = "PASSED t.py::test_span[MouseButton.LEFT-MouseButton.RIGHT]"
    assert log_parser("matplotlib/matplotlib")(line) == {"t.py::test_span[1-3]": "PASSED"}


def test_a_sympy_log_has_statuses_and_headings_of_failures():
    assert log_parser("sympy/sympy")(SYMPY) == {
        "sympy/core/tests/test_a.py:test_bad": "FAILED",
        "test_good": "PASSED",
        "test_bad": "FAILED",
        "test_worse": "ERROR",
    }


def test_a_seaborn_log_has_passed_and_failed_tests_only():
    assert log_parser("mwaskom/seaborn")(SEABORN) == {
        "tests/test_a.py::test_old": "PASSED",
        "tests/test_a.py::test_good": "PASSED",
        "tests/test_a.py::test_bad": "FAILED",
    }


def test_swe_smith_logs_are_pytest_s_verbose_lines():
    log = "tests/a.py::test_x PASSED [ 50%]\ntests/a.py::test_y[1]   FAILED [100%]\nPASSED tests/a.py::test_z\n"
    parse = log_parser("swesmith/oauthlib__oauthlib.1fd52536")
    assert parse(log) == {"tests/a.py::test_x": "PASSED", "tests/a.py::test_y[1]": "FAILED"}


def test_r2e_gym_names_have_no_file():
    log = (
        "PASSED before::the::summary\n=== short test summary info ===\n"
        "\x1b[32mPASSED\x1b[0m r2e_tests/t.py::A::\x1b[1mtest_x\x1b[0m\n"
        "FAILED r2e_tests/t.py::test_y - assert 1::2\nERROR r2e_tests/t.py::test_z - x\n== 1 passed ==\n"
    )
    assert logs.r2e_summary(log) == {"A.test_x": "PASSED", "test_y": "FAILED", "test_z": "ERROR"}


def test_swe_gym_repositories_have_parsers():
    assert log_parser("Project-MONAI/MONAI")(PYTEST) == log_parser("pallets/flask")(PYTEST)
    log = "tests/a.py::test_x PASSED\ntests/a.py::test_y FAILED [ 10%]\n"
    assert log_parser("pydantic/pydantic")(log) == {"tests/a.py::test_x": "PASSED", "tests/a.py::test_y": "FAILED"}


def test_a_word_that_is_no_status_is_an_error():
    assert log_parser("pallets/flask")("ERROR: usage: pytest\nPASSEDX a.py::t\n") == {
        "usage:": "ERROR",
        "a.py::t": "ERROR",
    }


@pytest.mark.parametrize("repo", ["a/b", "swesmith/paramiko__paramiko.23f92003"])
def test_a_repository_without_parser_is_named(repo):
    with pytest.raises(ValueError, match=f"no log parser for the repository '{repo}'"):
        log_parser(repo)


@pytest.mark.parametrize("repo", THEIRS)
def test_a_hostile_log_is_read_in_a_few_seconds(repo):
    begun = " ... Testing against Django installed in x\n"
    lines = (begun, "ERROR: \n", "FAILED [", "____ a.py: ", "a ... Internal Server Error: /\n", "t[" * 100 + "\n")
    start = time.monotonic()
    for line in lines:
        log_parser(repo)(line * 20_000 if "\n" in line else (line * 500 + "\n") * 20)
    log_parser(repo)(f"PASSED {'t[' * 4000}\n")
    assert time.monotonic() - start < 20


def same(repo: str, log: str, module) -> None:
    try:
        theirs = getattr(module, THEIRS[repo])(log, None)
    except IndexError:  # on a bare "FAIL:"
        log_parser(repo)(log)
        return
    # Their status may be any word that begins with one.
    assert log_parser(repo)(log) == {name: word if word in STATUSES else "ERROR" for name, word in theirs.items()}


@pytest.mark.parametrize(
    "log", [DJANGO, PYTEST, COLORED, SYMPY, SEABORN], ids=["django", "pytest", "colored", "sympy", "seaborn"]
)
@pytest.mark.parametrize("repo", THEIRS)
def test_swe_bench_reads_the_same_of_every_kind_of_log(repo, log):
    same(repo, log, swebench("harness.log_parsers.python", 5))


PIECES = [
    *(
        *STATUSES,
        "ERROR:",
        "FAIL:",
        "ERRORS",
        "skipped",
        "ok",
        "OK",
        "E",
        "F",
        "...",
        " ... ",
        " ... ok",
        " ...  OK",
        "[3]",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n",
        "\n",
        "\t",
        "\r",
        " - ",
        "_",
        "____ ",
        "\x1b[32m",
        "[0m",
        "[100%]",
        "é",
        "test_a",
        "test_b (a.B)",
    ),
    *(
        "a/b.py::test[x]",
        "a.py::t[/p/q]",
        "[//a]",
        "x.py:",
        "y.py:test_y ____",
        " ... FAIL",
        " ... ERROR",
        "MouseButton.LEFT",
    ),
    *(
        " ... Testing against Django installed in",
        " silenced).",
        "\nok\n",
        " ... Internal Server Error: /x/",
        "Applying x",
    ),
    *(" ... System check identified no issues (0 silenced)", "--version is equivalent to version"),
    "Applying sites.0002_alter_domain_unique...test_no_migrations",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pieces=st.lists(st.sampled_from([*PIECES, *(f"a.py::t {status}" for status in STATUSES)]), max_size=30))
def test_swe_smith_reads_the_same_of_any_log(pieces):
    log = "".join(pieces)
    assert log_parser("swesmith/oauthlib__oauthlib.1fd52536")(log) == swesmith_parser()(None, log)


@pytest.mark.parametrize("repo", THEIRS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30))
def test_swe_bench_reads_the_same_of_any_log(repo, pieces):
    same(repo, "".join(pieces), swebench("harness.log_parsers.python", 5))
