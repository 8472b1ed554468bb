"""The second run of tests that look good: with a failing statement at the beginning of each, they must not pass.

Code of a patch that forges the results of certain tests by their names is not caught by other tests, the canaries. In this
run it meets the same names in the same files, with canaries as in the first run, and forges again.
"""

import ast
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentgym_envs.swe_bench.failing import failing
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.logs import DJANGO_VERSION, PASSED, XFAIL
from agentgym_envs.swe_bench.verdict import Verdict

_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Inversion:
    """The test files as they are in the second run, and the required tests that cannot pass in it."""

    files: Mapping[str, str] = field(default_factory=dict)
    tests: frozenset[str] = frozenset()

    def doubt(self, first: Verdict, second: Verdict, log: str) -> str:
        """Why the first run is not believed, given what the second said, and its whole log; "" if it is."""
        before = {test.name: test.status for test in first.tests}
        after = {test.name: test.status for test in second.tests}
        for test in sorted(self.tests):
            if after[test] == PASSED or (after[test] == XFAIL and before[test] != XFAIL):
                return f"{test} is reported as {after[test]} even when it is made to fail"
            if before[test] == PASSED and after[test] is None and test not in log:
                return f"{test} is not reported when it is made to fail"
        return ""


def inversion(instance: Instance, files: Mapping[str, str], rng: random.Random) -> Inversion:
    """Files that are no Python of today stay as they are, and so do tests that are not written out in a file.

    Args:
        files: the test files' text by path.
    """
    changed, names = {}, set()
    for path, text in files.items():
        found = _inverted(text, rng)
        if found is not None:
            changed[path], functions = found
            names |= {name for function in functions.items() for name in _names(instance, path, *function)}
    required = {*instance.fail_to_pass, *instance.pass_to_pass} - {DJANGO_VERSION}
    return Inversion(changed, frozenset(test for test in required if test in names or _plain(test) in names))


def _plain(test: str) -> str:
    """A required test's name without its parameters, and without the method that Python 3.11 repeats after the class."""
    if match := _UNITTEST.fullmatch(test):
        return f"{match[1]} ({match[2].removesuffix(f'.{match[1]}')})"
    return test.partition("[")[0]


def _names(instance: Instance, path: str, function: str, title: str) -> tuple[str, ...]:
    """The names in logs of a function, "test_x" or "Class.test_x", of a test file; unittest's include the docstring's first line."""
    folder, _, name = function.rpartition(".")
    if instance.repo == "django/django":
        module = path.removesuffix(".py").removeprefix("tests/").replace("/", ".")
        return f"{name} ({module}.{folder})", title
    if instance.repo == "sympy/sympy":
        return () if folder else (name,)
    return (f"{path}::{function.replace('.', '::')}",)


def _inverted(text: str, rng: random.Random) -> tuple[str, dict[str, str]] | None:
    """A module whose tests fail, and these tests' names, with the first lines of their docstrings; None if it cannot be read."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    lines, found = re.split(r"\r\n?|\n", text), {}  # as Python's parser counts them
    for name, function in sorted(_tests(tree.body), key=lambda each: -each[1].lineno):
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        indent = (lines[first.lineno - 1].encode()[: first.col_offset]).decode()
        if first.lineno == function.lineno or indent.strip():
            continue  # in the line of `def`
        decorators = getattr(first, "decorator_list", [])
        before = (
            (first.end_lineno or first.lineno)
            if documented
            else min([first.lineno, *(d.lineno for d in decorators)]) - 1
        )
        lines.insert(before, f"{indent}{failing(rng)}")
        found[name] = (ast.get_docstring(function) or "").partition("\n")[0].strip()
    return "\n".join(lines), found | _inherited(tree, found)


def _inherited(tree: ast.Module, found: Mapping[str, str]) -> dict[str, str]:
    """Tests that classes of a module inherit from others of it."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bound = {name: {*map(_bound, node.body)} for name, node in classes.items()}

    def definer(name: str, test: str, seen: tuple[str, ...] = ()) -> str:
        if name not in classes or name in seen or test in bound[name]:
            return name
        bases = (base.id for base in classes[name].bases if isinstance(base, ast.Name))
        below = (definer(base, test, (*seen, name)) for base in bases)
        return next((base for base in below if test in bound.get(base, ())), "")

    tests = {name.rpartition(".")[2] for name in found}
    made = {f"{name}.{test}": f"{definer(name, test)}.{test}" for name in classes for test in tests}
    return {name: found[source] for name, source in made.items() if source in found}


def _bound(node: ast.stmt) -> str:
    """The name that a statement of a class binds; "" for most."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node
    return str(getattr(target, "name", getattr(target, "id", "")))


def _tests(body: list[ast.stmt], outer: str = "") -> Iterator[tuple[str, _Function]]:
    """Functions of tests and their names, those of classes too."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{outer}{node.name}.")
        elif isinstance(node, _Function) and node.name.startswith("test"):
            yield f"{outer}{node.name}", node
