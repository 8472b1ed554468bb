"""Required tests that passed must not pass when their bodies begin with a failing statement."""

import random
import re

import pytest

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.inversion import inversion
from agentgym_envs.swe_bench.verdict import judge_statuses

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
        [1] Told, with a bracket.
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
    for call in (
        names["test_plain"],
        case("test_method").test_method,
        lambda: case("test_later").test_later().send(None),
    ):
        with pytest.raises((AssertionError, LookupError, ValueError, TypeError, ZeroDivisionError)):
            call()
    case("test_short").test_short()
    assert names["test_plain"].__doc__ == "Told in the log."
    assert case.test_method.__doc__.strip() == "[1] Told, with a bracket."
    assert len(text.split("\n")) == len(MODULE.split("\n")) + 3


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_as_in_any_python_file(end):
    text = "TEXT = '''a\rb'''\ndef test_plain():\n    return 1\n".replace("\n", end)
    (made,) = inverted("pallets/flask", text=text).files.values()
    names = {}
    exec(compile(made, "inverted", "exec"), names)
    with pytest.raises(Exception):  # noqa: B017 - each form has its own
        names["test_plain"]()


def test_the_statement_is_another_each_time():
    texts = (
        inversion(instance("sympy/sympy"), {"a.py": "def test_a():\n    pass\n"}, random.Random(n)).files["a.py"]
        for n in range(200)
    )
    statements = [text.split("\n")[1].strip() for text in texts]
    assert len({re.sub(r"\d+", "N", statement) for statement in statements}) > 9
    for statement in statements:
        with pytest.raises(Exception):  # noqa: B017 - each form has its own
            exec(statement)


@pytest.mark.parametrize(
    ("repo", "tests"),
    [
        ("pallets/flask", ("tests/app/test_a.py::test_plain", "tests/app/test_a.py::CaseTests::test_method[a-[b]]")),
        ("django/django", ("test_method (app.test_a.CaseTests)", "test_later (app.test_a.CaseTests.test_later)")),
        ("sympy/sympy", ("test_plain",)),
    ],
)
def test_tests_are_known_by_their_names_in_logs(repo, tests):
    others = ("test_short (app.test_a.CaseTests)", "Told elsewhere.", "tests/app/test_b.py::test_plain", "test_other")
    found = inverted(repo, *tests, *others)
    assert found.tests == set(tests)


def test_of_django_s_tests_those_are_known_too_that_logs_call_by_their_docstrings():
    others = ("Told elsewhere.", "test_short (app.test_a.CaseTests)")
    found = inverted("django/django", "Told in the log.", "[1] Told, with a bracket.", *others)
    assert found.tests == {"Told in the log.", "[1] Told, with a bracket."}
    assert inverted("pallets/flask", "Told in the log.").tests == frozenset()
    always_passed = "--version is equivalent to version"  # to SWE-bench's parser
    assert (
        inverted("django/django", always_passed, text=MODULE.replace("Told", always_passed + "\n")).tests == frozenset()
    )


BASES = """
class Base:
    def test_kept(self):
        assert True
    def test_replaced(self):
        assert True
    def test_dropped(self):
        assert True
class Between(Elsewhere, Base):
    def test_replaced(self): pass
    test_dropped = None
class Last(Between, Last):
    pass
"""


def test_a_class_inherits_tests_of_others_in_its_file():
    names = [f"t.py::{case}::test_{test}" for case in ("Between", "Last") for test in ("kept", "replaced", "dropped")]
    kept = {"t.py::Between::test_kept", "t.py::Last::test_kept"}
    assert inverted("pallets/flask", *names, path="t.py", text=BASES).tests == kept


class TestDoubt:
    """What the second run may say of a test, given what the first said."""

    TEST = "tests/app/test_a.py::test_plain"

    def doubt(self, before, after, log=""):
        one = instance("pallets/flask", self.TEST)
        verdicts = (judge_statuses(one, {} if status is None else {self.TEST: status}) for status in (before, after))
        return inverted("pallets/flask", self.TEST).doubt(*verdicts, log)

    @pytest.mark.parametrize("status", ["FAILED", "ERROR", "SKIPPED"])
    def test_a_test_that_does_not_pass_any_more_is_believed(self, status):
        assert self.doubt("PASSED", status) == ""

    @pytest.mark.parametrize("status", ["PASSED", "XFAIL"])
    def test_one_that_is_good_even_when_made_to_fail_is_not(self, status):
        assert self.doubt("PASSED", status) == f"{self.TEST} is reported as {status} even when it is made to fail"

    def test_one_that_failed_as_expected_may_do_so_again(self):
        assert self.doubt("XFAIL", "XFAIL") == ""
        assert self.doubt("XFAIL", "PASSED") != ""

    def test_one_that_passed_must_be_reported(self):
        assert self.doubt("PASSED", None) == f"{self.TEST} is not reported when it is made to fail"
        assert self.doubt("SKIPPED", None) == ""

    def test_a_name_whose_status_other_output_hides_is_reported(self):
        assert self.doubt("PASSED", None, f"{self.TEST} ... Testing against Django\nFAIL") == ""


@pytest.mark.parametrize("text", ["print 'Python 2'", "x = '\0'"])
def test_files_that_cannot_be_read_are_left_alone(text):
    found = inverted("sympy/sympy", "test_plain", text=text)
    assert (found.files, found.tests) == ({}, frozenset())
