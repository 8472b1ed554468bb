"""Required tests that passed must not pass when their bodies begin with a failing statement."""

import random

import pytest

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.inversion import inversion

MODULE = '''
import functools, unittest


def helper():
    return test_of_no_kind


@functools.cache
def test_plain():
    """Told in the log."""
    assert True


class CaseTests(unittest.TestCase):
    def test_method(self):
        """
        Told in the log.
        """
        def test_inner():
            pass
        test_inner()

    async def test_later(self):
        @helper
        def inner():
            pass

    def test_short(self): pass
'''


def instance(repo, *tests):
    return Instance("one", repo, "c", "text", fail_to_pass=tests)


def inverted(repo, *tests, path="tests/app/test_a.py", text=MODULE):
    return inversion(instance(repo, *tests), {path: text}, random.Random(0))


def test_every_test_that_is_written_out_begins_with_what_fails():
    (text,) = inverted("pallets/flask").files.values()
    names = {}
    exec(compile(text, "inverted", "exec"), names)
    case = names["CaseTests"]
    with pytest.raises(AssertionError):
        names["test_plain"]()
    with pytest.raises(AssertionError):
        case("test_method").test_method()
    with pytest.raises(AssertionError):
        case("test_later").test_later().send(None)
    case("test_short").test_short()
    assert names["test_plain"].__doc__ == "Told in the log."
    assert case.test_method.__doc__.strip() == "Told in the log."
    assert text.count("assert sorted(") == 3


@pytest.mark.parametrize(
    ("repo", "tests"),
    [
        ("pallets/flask", ("tests/app/test_a.py::test_plain", "tests/app/test_a.py::CaseTests::test_method[a-[b]]")),
        ("django/django", ("test_method (app.test_a.CaseTests)", "test_later (app.test_a.CaseTests.test_later)")),
        ("sympy/sympy", ("test_plain",)),
    ],
)
def test_tests_are_known_by_their_names_in_logs(repo, tests):
    others = ("test_short (app.test_a.CaseTests)", "Told in the log.", "tests/app/test_b.py::test_plain", "test_other")
    found = inverted(repo, *tests, *others)
    assert found.tests == set(tests)
    assert found.doubt(dict.fromkeys((*tests, *others), "FAILED")) == ""
    assert found.doubt(dict.fromkeys(tests[1:], "ERROR") | dict.fromkeys(others, "PASSED")) == ""
    assert found.doubt({tests[0]: "PASSED"}) == f"{tests[0]} is reported as passed even when it is made to fail"


@pytest.mark.parametrize("text", ["print 'Python 2'", "x = '\0'"])
def test_files_that_cannot_be_read_are_left_alone(text):
    found = inverted("sympy/sympy", "test_plain", text=text)
    assert (found.files, found.tests) == ({}, frozenset())
