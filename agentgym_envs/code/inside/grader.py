"""The grader: runs tests against a submission in another process, and writes a JSON report to stdout.

Its argument is the address space of the submission's process in bytes; `agentgym_envs.code.grading` writes its request
to stdin. Each `assert` is counted. Any failure counts against the submission: without a report that says so, it has not
passed.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import resource
import sys

from agentgym_envs.code.inside.link import Link, LoadError, Lost, Nursery
from agentgym_envs.code.inside.values import NOT_STARTED

TYPE_CHECKING = False  # typing takes longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any

_SHOWN = 500  # characters of a value or an error in the report
_FAILURES = 3  # described in the report
_MARK = "__judge__"
_DUMPABLE = 4  # PR_SET_DUMPABLE
_WRAPPED = f"""
try:
    pass
except BaseException as __error__:
    {_MARK}.broke(__error__)
else:
    {_MARK}.hold()
"""


def main() -> None:
    """Read the request, grade, write the report. Exits with `NOT_STARTED` if the sandbox cannot be used for grading."""
    memory = int(sys.argv[1])
    try:
        if os.getppid() != 1:  # only a PID namespace ends all processes that a submission forks
            raise OSError("the grader runs in a sandbox only, started by its process 1")
        # A submission has the same user: without this it could read the tests in this process's memory and files.
        if ctypes.CDLL(None, use_errno=True).prctl(_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
        nursery = Nursery(memory)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_STARTED)
    report_to = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # a test that prints would spoil the report
    with open(0, "rb", closefd=False) as source:
        request = json.loads(source.read())
    resource.setrlimit(resource.RLIMIT_AS, (2 * memory, 2 * memory))
    report = grade(nursery, request)
    with open(report_to, "w", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(report, ensure_ascii=False))


def grade(nursery: Nursery, request: dict[str, Any]) -> dict[str, Any]:
    if "random" in request["setup"] or any("random" in test for test in request["tests"]):
        import random  # slow to import

        random.seed(0)
    judge = AssertionCounter()
    tests = [judge.prepare(test) for test in request["tests"]]
    expected = judge.expected
    setup = judge.prepare(request["setup"])
    # The setup's assertions count if the tests have none of their own.
    judge.expected = expected or judge.expected
    program = request["prompt"], request["code"], request["names"]
    link = Link(nursery, program, float(request["timeout"]), float(request["budget"]))
    error = ""
    try:
        _run_tests(link, judge, setup, tests, request["names"])
    except LoadError as problem:
        error = str(problem)
    except Lost as lost:
        # If it loaded before, it ran out of time or processes since: the failures say so.
        error = f"The code did not load: {lost}." if link.generation <= 1 else ""
    except Exception as problem:  # the submission may have broken its own process
        error = f"The code cannot be used: {type(problem).__name__}: {problem}"
    finally:
        link.stop()
    ended = not nursery.alive()
    if ended:  # killing the nursery forfeits everything
        judge.passed = 0
        error = error or "The code ended a process that tests it."
    if not error and judge.failed == 0 and judge.passed > 0 and judge.finished == len(tests):
        verdict, total = "passed", judge.passed
    else:
        verdict = "ended" if ended else "timeout" if link.slow else "error" if error else "wrong"
        total = max(judge.expected, judge.passed + judge.failed, 1)
    return {
        "verdict": verdict,
        "passed": judge.passed,
        "total": total,
        "error": _clean(error),
        "failures": judge.failures,
        "output": _clean(link.output.decode("utf-8", "replace")),
    }


def _run_tests(link: Link, judge: AssertionCounter, setup: Any, tests: list[Any], names: list[str]) -> None:
    """Run each test against the submission; a submission that ended is loaded again for the next test."""
    namespace: dict[str, Any] = {}
    ready = 0  # the process that the namespace belongs to
    for source, test in tests:
        if not link.alive:
            defined = link.start()
        if ready != link.generation:
            ready = link.generation
            namespace.clear()
            judge.begin("")
            namespace |= {"__name__": "tests", _MARK: judge}
            _take(link, namespace, names, defined)
            if not judge.run(setup[1], namespace):
                if link.alive:
                    return
                continue
            _take(link, namespace, names, defined)
        judge.begin(source)
        judge.run(test, namespace)
        judge.finished += 1


def _take(link: Link, namespace: dict[str, Any], names: list[str], defined: list[str]) -> None:
    """Put the submission's functions and values into the tests' namespace, over those of the setup."""
    for name in names:
        namespace.pop(name, None)
        if name in defined:
            namespace[name] = link.ask("get", name)


class AssertionCounter(ast.NodeTransformer):
    """Counts assertions, each in `_WRAPPED`. It is in the tests' namespace, which the submission never sees."""

    def __init__(self) -> None:
        self.passed = self.failed = self.expected = self.finished = 0
        self.failures: list[dict[str, str]] = []
        self._test = ""
        self._got = ""
        self._counted = 0

    def prepare(self, source: str) -> tuple[str, Any]:
        tree = self.visit(ast.parse(source))
        return source, compile(ast.fix_missing_locations(tree), "<test>", "exec")

    def visit_Assert(self, node: ast.Assert) -> Any:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return node
        self.expected += 1
        compared = node.test
        if isinstance(compared, ast.Compare) and len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
            same = ast.parse(f"{_MARK}.same", mode="eval").body
            node.test = ast.Call(same, [compared.left, compared.comparators[0]], [])
        wrapped: Any = ast.parse(_WRAPPED).body[0]
        wrapped.body = [node]
        return wrapped

    def begin(self, source: str) -> None:
        self._test, self._got, self._counted = source, "", 0

    def run(self, code: Any, namespace: dict[str, Any]) -> bool:
        """Run test code. False if an exception was raised outside of any assertion."""
        try:
            exec(code, namespace)
        except _StopGrading:
            return False
        except BaseException as error:
            self._fail(error)
            return False
        if self._test and self._counted == 0:
            self.passed += 1  # a test without an assertion: it ran
        return True

    def hold(self) -> None:
        self.passed += 1
        self._counted += 1
        self._got = ""

    def broke(self, error: BaseException) -> None:
        self._counted += 1
        self._fail(error)
        if isinstance(error, Lost):
            raise _StopGrading

    def same(self, left: Any, right: Any) -> Any:
        """`left == right`; keeps the left side for the report."""
        self._got = "" if type(left) is bool and type(right) is bool and left == right else _short(left)
        return left == right

    def _fail(self, error: BaseException) -> None:
        self.failed += 1
        if len(self.failures) < _FAILURES:
            shown = getattr(error, "shown", None)
            what = f"got {self._got}" if isinstance(error, AssertionError) and self._got else ""
            if not what and not (type(error) is AssertionError and shown is None):
                what = shown or (f"{error}" if isinstance(error, Lost) else f"{type(error).__name__}: {error}")
            self.failures.append({"test": _clean(self._test[:_SHOWN]), "what": _clean(what[: 2 * _SHOWN])})
        self._got = ""


class _StopGrading(BaseException):
    """Ends a test whose submission has ended."""


def _clean(text: str) -> str:
    """Text without control characters, each of which JSON would write as six characters of the limited report."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _short(value: Any) -> str:
    """A value as text of at most `_SHOWN` characters; large values are not written out."""
    try:
        if isinstance(value, str | bytes | list | tuple | set | frozenset | dict) and len(value) > 4 * _SHOWN:
            return f"a {type(value).__name__} of length {len(value)}"
        text = repr(value)
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
