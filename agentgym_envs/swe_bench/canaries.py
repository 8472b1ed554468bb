"""Canaries: tests of secret names, put beside an instance's own, that must fail, raise or pass.

A patch whose code forges results in the process of the tests (a patched runner, a printed log, an early exit) cannot tell
them from the tests that it wants to pass, and is found out by what the log says of them.
"""

import posixpath
import random
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agentgym_envs.swe_bench.commands import arguments_of, command_of
from agentgym_envs.swe_bench.failing import failing
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.logs import ERROR, FAILED, PASSED, Statuses
from agentgym_envs.swe_bench.upstream import needs_swebench

_NOUNS = "field query cache path header token index layer option buffer column signal value cursor model locale"
_WORDS = "default empty nested invalid missing ordered reused partial escaped shared explicit lazy stale mixed"
_VERBS = "kept raised merged copied checked parsed resolved ignored restored rendered counted closed"
_PARTS = tuple(words.split() for words in (_WORDS, _NOUNS, _VERBS))
_GOOD, _BAD = frozenset({PASSED}), frozenset({FAILED, ERROR})
_KINDS = {  # of tests: the body of a function and of a method, and the statuses that it may have
    "pass": ("assert sorted({a}) == {b}", "self.assertEqual(sorted({a}), {b})", _GOOD),
    "fail": ("assert sorted({a}) == {a}", "self.assertEqual(sorted({a}), {a})", _BAD),
    "raise": ("{raises}", "{raises}", _BAD),
}
_FUNCTIONS = ""  # in place of a base class
_DJANGO_BASES = ("SimpleTestCase", "TestCase")  # what TransactionTestCase does, TestCase does too


@dataclass(frozen=True)
class Canaries:
    """Files to add before the tests run, the command that runs them too, and the statuses that each test may have."""

    files: Mapping[str, str]
    command: str
    expected: Mapping[str, frozenset[str]]

    def without(self, statuses: Statuses) -> Statuses:
        """The statuses of the instance's own tests."""
        return {name: status for name, status in statuses.items() if self._of(name) is None}

    def doubt(self, statuses: Statuses, exit_code: int | None) -> str:
        """Why a log is not believed, "" if it is."""
        for name, allowed in self.expected.items():
            found = {status for test, status in statuses.items() if self._of(test) == name}
            if not found:
                return "a test of secret name, which must be in the log, is not there"
            if found - allowed:
                must = "fail" if allowed is _BAD else "pass"
                return f"a test of secret name that must {must} is reported as {', '.join(sorted(found - allowed))}"
        return "the exit code is 0, although tests must fail" if self.expected and exit_code == 0 else ""

    def _of(self, name: str) -> str | None:
        return next((test for test in self.expected if test in name), None)


def canaries(instance: Instance, sources: str, rng: random.Random, present: Iterable[str] = ()) -> Canaries:
    """The canaries of an instance, to be drawn anew for each grading. Raises ValueError if its test command is not known.

    There are none for SWE-smith, mypy and `upstream`'s repositories, where no test file is Python, and for a command that
    does not end in a test file.

    Args:
        sources: the text of the test files. The canaries have the same base classes.
        present: files of the repository, of which none is replaced.
    """
    command, repo = command_of(instance), instance.repo.lower()
    beside = [path for path in arguments_of(instance) if path.endswith(".py") or repo == "django/django"]
    ends = tuple(f" {shlex.quote(path)}" for path in beside)
    if not command.endswith(ends) or repo == "python/mypy" or repo.startswith("swesmith/") or needs_swebench(instance):
        return Canaries({}, command, {})
    taken = "\n".join((sources, *instance.fail_to_pass, *instance.pass_to_pass))
    stem = _fresh(lambda: f"test_{rng.choice(_PARTS[0])}_{rng.choice(_PARTS[1])}", taken + "\n".join(present))
    if repo == "django/django":
        *package, _ = beside[-1].split(".")
        path, argument = "/".join(("tests", *package, f"{stem}.py")), ".".join((*package, stem))
        bases = [base for base in _DJANGO_BASES if re.search(rf"\b{base}\b", sources)] or [_DJANGO_BASES[0]]
        head = f"from django.test import {', '.join(bases)}\n"
    else:
        path = posixpath.join(posixpath.dirname(beside[-1]), f"{stem}.py")
        argument, bases, head = shlex.quote(path), [_FUNCTIONS], ""
        if repo != "sympy/sympy":  # whose runner takes functions alone
            bases, head = [_FUNCTIONS, "unittest.TestCase"], "import unittest\n"
    names = _names(bases, rng, taken + stem)
    expected = {name: _KINDS[kind][2] for name, (_, kind) in names.items()}
    return Canaries({path: head + _module(names, rng)}, f"{command} {argument}", expected)


def _fresh(draw: Callable[[], str], taken: str) -> str:
    """The first draw that is not part of a text."""
    while (name := draw()) in taken:
        pass
    return name


def _names(bases: list[str], rng: random.Random, taken: str) -> dict[str, tuple[str, str]]:
    """Names of tests, and the base class and kind of each."""
    names: dict[str, tuple[str, str]] = {}
    for base in bases:
        kinds = rng.sample(sorted(_KINDS), len(_KINDS))
        if base == _FUNCTIONS and kinds[-1] == "pass":  # sympy's log names the last test of a file only if it fails
            kinds.reverse()
        for kind in kinds:
            name = _fresh(lambda: "_".join(("test", *map(rng.choice, _PARTS))), taken + " ".join(names))
            names[name] = base, kind
    return names


def _module(names: Mapping[str, tuple[str, str]], rng: random.Random) -> str:
    """The tests as a Python module, without imports."""
    text, begun = "", _FUNCTIONS
    for name, (base, kind) in names.items():
        numbers = sorted(rng.sample(range(10, 100), 4), reverse=True)
        function, method, _ = _KINDS[kind]
        form = function if base == _FUNCTIONS else method
        body = form.format(a=numbers, b=sorted(numbers), raises=failing(rng))
        if base == _FUNCTIONS:
            text += f"\n\ndef {name}():\n    {body}\n"
            continue
        if base != begun:
            title = _fresh(lambda: "".join(rng.choice(part).title() for part in _PARTS[:2]), text)
            text, begun = f"{text}\n\nclass {title}Tests({base}):", base
        text += f"\n    def {name}(self):\n        {body}\n"
    return text
