"""Grades a patch by what the instance's tests do, once as they are and, if that would pay, once made to fail or left out.

Where they do something that only the machinery or only the patch can have brought about, a run of the gold patch under the same
limits tells which.
"""

import time
from dataclasses import dataclass, replace

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.logs import PASSED
from agentgym_envs.swe_bench.patches import FileChange, PatchError, check_files, check_patch
from agentgym_envs.swe_bench.releases import without_absent
from agentgym_envs.swe_bench.trial import Bench, GradingError, Key, Trial, run_tests
from agentgym_envs.swe_bench.upstream import needs_swebench
from agentgym_envs.swe_bench.verdict import Outcome, Verdict
from agentgym_envs.swe_bench.worktree import DEFAULT_SIZE, Size

__all__ = ["Grade", "GradingError", "grade"]
_golds: dict[Key, Trial] = {}  # runs of gold patches in this process
_written: dict[Key, frozenset[str]] = {}  # tests that pass with these, without the test patch
_believed: set[Key] = set()  # those that nothing is to be said against


@dataclass(frozen=True)
class Grade:
    """The result of grading.

    Attributes:
        patch: what became of the patch: "applied"; "empty"; or "refused: " or "does not apply: " and why.
        verdict: what the tests say; None if they did not run, or said nothing.
        failure: why there is no verdict although the patch applied: its code broke the tests. "" if there is one.
        dropped: files of the patch that were left out: those of the tests, and links that leave the repository.
        log: what the tests printed.
        seconds: that grading took.
    """

    patch: str
    verdict: Verdict | None = None
    failure: str = ""
    dropped: tuple[str, ...] = ()
    log: str = ""
    seconds: float = 0.0

    @property
    def resolved(self) -> bool:
        return self.verdict is not None and self.verdict.resolved

    @property
    def fraction(self) -> float:
        """The share of FAIL_TO_PASS tests that pass, times that of PASS_TO_PASS tests that still do; 0.0 .. 1.0.

        R2E-Gym's records do not say which tests passed before: 1.0 or 0.0.
        """
        if self.verdict is None or self.verdict.doubt:
            return 0.0
        if not self.verdict.fail_to_pass:
            return float(self.resolved)
        return _share(self.verdict.fail_to_pass) * _share(self.verdict.pass_to_pass)


def grade(
    instance: Instance,
    patch: str,
    *,
    sandbox: str | None = None,
    size: Size = DEFAULT_SIZE,
    test_timeout: float = 1800.0,
    wait: float = 110.0,
) -> Grade:
    """Grade a patch in fresh sandboxes of the instance's image.

    Args:
        patch: as `git diff` writes it. Any text may be given: it is checked first.
        sandbox: the back end.
        test_timeout: seconds for one run of the tests, and the build before it, of which there may be four.
        wait: seconds to wait for a sandbox.

    Raises:
        GradingError: the tests do not run in this image with the gold patch either, or take over half of the time.
        SandboxError: there is no sandbox.
        ValueError: the instance has no image, or its test command or its log's parser is not known.
    """
    began = time.monotonic()
    bench = Bench(without_absent(instance), sandbox, size, test_timeout, wait)
    try:
        changes, links = check_files(patch)
    except PatchError as error:
        return Grade(f"refused: {error}")
    trial = run_tests(bench, changes)
    became = f"does not apply: {trial.problem}" if trial.problem else "applied" if changes else "empty"
    left = (*trial.dropped, *(link.path for link in links))
    found = Grade(became, trial.verdict, trial.failure, left, trial.log)
    if trial.failure:
        _check_machinery(bench, trial)
    elif trial.verdict is not None and found.fraction > 0 and (doubt := _doubt(bench, changes, trial)):
        _check_gold(bench)
        found = replace(found, verdict=replace(trial.verdict, doubt=doubt))
    return replace(found, seconds=time.monotonic() - began)


def _doubt(bench: Bench, changes: tuple[FileChange, ...], trial: Trial) -> str:
    """Why a run that would pay is not believed, "" if it is."""
    return trial.doubt or _excused(bench, trial) or _forged(bench, changes, trial)


def _check_machinery(bench: Bench, trial: Trial) -> None:
    """Raise GradingError if a run that says nothing may not be the patch's fault."""
    gold = _gold(bench)
    if trial.timed_out and gold.seconds > bench.test_timeout / 2:
        took = f"{gold.seconds:.0f} s with the gold patch, and are to end in {bench.test_timeout:g} s"
        raise GradingError(f"instance {bench.instance.id}: its tests take {took}: give them more")


def _check_gold(bench: Bench) -> None:
    """Raise GradingError if the gold patch is doubted too."""
    if bench.key not in _believed:
        if doubt := _doubt(bench, check_patch(bench.instance.patch), _gold(bench)):
            raise GradingError(f"instance {bench.instance.id}: its gold patch is not believed either: {doubt}")
        _believed.add(bench.key)


def _gold(bench: Bench) -> Trial:
    """The run of the gold patch or, if none is known, of no patch. GradingError if no test runs in it."""
    if bench.key not in _golds:
        trial = run_tests(bench, check_patch(bench.instance.patch))
        if trial.verdict is None:
            why = f"{trial.problem or trial.failure}; the log ends: {trial.log[-1000:]!r}"
            raise GradingError(f"instance {bench.instance.id}: its tests do not run in its image: {why}")
        _golds[bench.key] = replace(trial, log="")
    return _golds[bench.key]


def _excused(bench: Bench, trial: Trial) -> str:
    """The doubt about tests that are good without having passed; "" if they are so with the gold patch too."""
    verdict = trial.verdict
    if verdict is None or bench.instance.expected is not None:
        return ""
    excused = {test.name: test.status for test in verdict.tests if test.good and test.status != PASSED}
    gold = _gold(bench).verdict if excused else None
    honest = {} if gold is None else {test.name: test.status for test in gold.tests}
    forged = [name for name, status in excused.items() if honest.get(name) != status]
    return f"{forged[0]} is reported as {excused[forged[0]]}, but not with the gold patch" if forged else ""


def _forged(bench: Bench, changes: tuple[FileChange, ...], first: Trial) -> str:
    """The doubt about a run whose tests are good even when they are made to fail, or whose code knows that and gives up."""
    if needs_swebench(bench.instance):
        return _invented(bench, changes)
    if first.verdict is None or not first.inversion.tests:
        return ""
    second = run_tests(bench, changes, inverted=True)
    if second.verdict is None:
        _check_machinery(bench, second)
        return f"when its tests are made to fail, {second.problem or second.failure}"
    return second.doubt or second.inversion.doubt(first.verdict, second.verdict, second.log)


def _invented(bench: Bench, changes: tuple[FileChange, ...]) -> str:
    """The doubt about a patch with which a test passes even where it is not written: in the repository's own test files."""
    gold = check_patch(bench.instance.patch)
    if not bench.instance.test_patch or changes == gold:
        return ""
    told = _passed(run_tests(bench, changes, with_tests=False))
    if told and bench.key not in _written:
        _written[bench.key] = _passed(run_tests(bench, gold, with_tests=False))
    invented = sorted(told - _written[bench.key]) if told else []
    return f"{invented[0]} is reported as {PASSED} even without the test patch" if invented else ""


def _passed(trial: Trial) -> frozenset[str]:
    tests = () if trial.verdict is None else trial.verdict.tests
    return frozenset(test.name for test in tests if test.status == PASSED)


def _share(tests: tuple[Outcome, ...]) -> float:
    return sum(test.good for test in tests) / len(tests) if tests else 1.0
