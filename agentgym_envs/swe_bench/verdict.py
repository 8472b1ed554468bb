"""Judges a test log: is the issue resolved, and which tests say so, by the rules of SWE-bench's package, version 5.

An instance is resolved when all its FAIL_TO_PASS and PASS_TO_PASS tests are good. PASSED and XFAIL are good, SKIPPED is
for a PASS_TO_PASS test only, and a test that is not in the log is not.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from agentgym_envs.swe_bench import upstream
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.logs import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    XFAIL,
    Parser,
    Statuses,
    log_parser,
    r2e_summary,
)

_LONG_LINE = re.compile(r"^[^\n]{10000,}", re.MULTILINE)  # no test has such a name, and patterns would take long on it
_PROGRESS = re.compile(r"\[(\d+%\]-*)?")  # pytest's, which SWE-bench's lists call a test (pytest-5227)


@dataclass(frozen=True)
class Outcome:
    """One required test: its name, its status in the log or None, and if that is good."""

    name: str
    status: str | None
    good: bool


@dataclass(frozen=True)
class Verdict:
    """The tests' verdict on a patch.

    `doubt` is "", or why a log is not believed although its tests look good; then `resolved` is False.
    """

    fail_to_pass: tuple[Outcome, ...]
    pass_to_pass: tuple[Outcome, ...]
    doubt: str = ""

    @property
    def resolved(self) -> bool:
        return not self.doubt and all(test.good for test in self.tests)

    @property
    def resolution(self) -> str:
        """SWE-bench's name: PARTIAL if some FAIL_TO_PASS tests pass and all others still do."""
        fixed = sum(test.good for test in self.fail_to_pass)
        kept = all(test.good for test in self.pass_to_pass) and not self.doubt
        return "RESOLVED_FULL" if self.resolved else "RESOLVED_PARTIAL" if fixed and kept else "RESOLVED_NO"

    @property
    def tests(self) -> tuple[Outcome, ...]:
        return self.fail_to_pass + self.pass_to_pass


def statuses_of(instance: Instance, output: str) -> Statuses:
    """The status of each test that an instance's test command printed. Raises ValueError as `reader_of` does.

    Raises upstream.LogUnreadableError, a ValueError too, if the parser is SWE-bench's and cannot read it.
    """
    return reader_of(instance)(_LONG_LINE.sub("", output))


def reader_of(instance: Instance) -> Parser:
    """The parser of an instance's logs. Raises ValueError if neither agentgym nor SWE-bench's package has one."""
    if upstream.needs_swebench(instance):
        return upstream.reader_of(instance)
    return log_parser(instance.repo) if instance.expected is None else r2e_summary


def contradiction(instance: Instance, output: str, good: Collection[str]) -> str:
    """The first of the tests that count as `good` that one line calls good and another bad; "" if there is none.

    So for R2E-Gym's logs. Raises LogUnreadableError if SWE-bench's parser takes too long.
    """
    if instance.expected is not None:
        return ""
    if upstream.needs_swebench(instance):
        name: str = upstream.isolated(_contradiction, instance, output, good)
        return name
    return _contradiction(instance, output, good)


def _contradiction(instance: Instance, output: str, good: Collection[str]) -> str:
    required = [name for name in (*instance.fail_to_pass, *instance.pass_to_pass) if name in good]
    parse = upstream.line_parser_of(instance) if upstream.needs_swebench(instance) else log_parser(instance.repo)
    said: dict[str, set[bool]] = {name: set() for name in required if not _PROGRESS.fullmatch(name)}
    for line in _LONG_LINE.sub("", output).split("\n"):
        for name, status in parse(line).items():
            if name in said:
                said[name].add(status in (PASSED, XFAIL, SKIPPED))
    return next((name for name, found in said.items() if len(found) > 1), "")


def judge_statuses(instance: Instance, statuses: Statuses, *, exit_code: int | None = None) -> Verdict:
    """The verdict on statuses by test name, as a log parser returns them.

    Args:
        exit_code: of the test command. A failed command whose log has no failure is not believed.
    """
    if instance.expected is not None:
        return _judge_expected(instance.expected, statuses)
    doubt = ""
    if exit_code not in (None, 0) and statuses and not {FAILED, ERROR} & set(statuses.values()):
        doubt = f"the test command ended with exit code {exit_code}, but the log has no failed test"
    return Verdict(
        _results(instance.fail_to_pass, statuses, lambda status: status in (PASSED, XFAIL)),
        _results(instance.pass_to_pass, statuses, lambda status: status in (PASSED, XFAIL, SKIPPED)),
        doubt,
    )


def _judge_expected(expected: Mapping[str, str], statuses: Statuses) -> Verdict:
    """R2E-Gym's rule: every test has its expected status, which may be FAILED, and no other test ran."""
    more = sorted(set(statuses) - set(expected))
    doubt = f"{len(more)} tests ran that are not expected, such as {more[0]!r}" if more else ""
    tests = (Outcome(name, statuses.get(name), statuses.get(name) == want) for name, want in expected.items())
    return Verdict((), tuple(tests), doubt)


def _results(names: Iterable[str], statuses: Statuses, is_good: Callable[[str | None], bool]) -> tuple[Outcome, ...]:
    found = ((name, _status_of(name, statuses)) for name in names)
    return tuple(Outcome(name, status, is_good(status)) for name, status in found)


def _status_of(name: str, statuses: Statuses) -> str | None:
    """The status of a test; data sets cut some parametrized names off, which are found by their beginning."""
    if name in statuses or name.count("[") <= name.count("]"):
        return statuses.get(name)
    found = [status for test, status in statuses.items() if test.startswith(name)]
    return found[0] if len({status in (PASSED, XFAIL) for status in found}) == 1 else None
