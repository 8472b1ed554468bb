"""Grades a patch: the instance's tests judge it in a fresh sandbox, with what would let it judge itself taken from it."""

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from agentgym.core.agent_failure import cause_of
from agentgym.sandbox import ExecResult, Sandbox, SandboxError
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.canaries import Canaries, canaries
from agentgym_envs.swe_bench.commands import command_of
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.inversion import inversion
from agentgym_envs.swe_bench.patches import FileChange, PatchError, check_patch, touched_files, without_files
from agentgym_envs.swe_bench.protected import dropped, is_protected
from agentgym_envs.swe_bench.releases import without_absent
from agentgym_envs.swe_bench.verdict import Outcome, Verdict, contradiction, judge_statuses, statuses_of
from agentgym_envs.swe_bench.worktree import DEFAULT_SIZE, FOLDER, Size

_sound: set[Instance] = set()  # those whose tests have run here


class GradingError(RuntimeError):
    """The machinery failed, and so nothing is said of the patch."""


@dataclass(frozen=True)
class Grade:
    """What grading found.

    Attributes:
        patch: what became of the patch: "applied"; "empty"; or "refused: " or "does not apply: " and why.
        verdict: what the tests say; None if they did not run, or said nothing.
        failure: why there is no verdict although the patch applied: its code broke the tests. "" if there is one.
        dropped: files of the patch whose changes were left out, because they belong to the tests.
        believed: whether the log has nothing that honest tests would not print; see `Verdict.doubt`.
        log: what the tests printed.
        seconds: that grading took.
    """

    patch: str
    verdict: Verdict | None = None
    failure: str = ""
    dropped: tuple[str, ...] = ()
    believed: bool = True
    log: str = ""
    seconds: float = 0.0

    @property
    def resolved(self) -> bool:
        return self.verdict is not None and self.verdict.resolved

    @property
    def fraction(self) -> float:
        """The share of FAIL_TO_PASS tests that pass, times that of PASS_TO_PASS tests that still do; 0.0 .. 1.0."""
        if self.verdict is None or self.verdict.doubt or not self.believed:
            return 0.0
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
    """Grade a patch in a fresh sandbox of the instance's image.

    Args:
        patch: as `git diff` writes it. Any text may be given: it is checked first.
        sandbox: the back end.
        test_timeout: seconds for the tests; the patch fails if they take longer.
        wait: seconds to wait for a sandbox.

    Raises:
        GradingError: the tests do not run in this image with the gold patch either.
        SandboxError: there is no sandbox.
        ValueError: the instance has no image, or its test command is not known.
    """
    began = time.monotonic()
    instance = without_absent(instance)
    try:
        changes = check_patch(patch)
    except PatchError as error:
        return Grade(f"refused: {error}")

    def graded(changes: tuple[FileChange, ...]) -> Grade:
        with contextlib.closing(worktree.open_repository(instance, sandbox, size, wait)) as box:
            return _graded(instance, changes, box, test_timeout)

    found = graded(changes)
    if found.verdict is not None:
        _sound.add(instance)
    elif found.patch in ("applied", "empty") and not found.failure:
        if instance not in _sound:
            _prove(instance, patch, graded, found.log)
        found = replace(found, failure="with this patch no test runs")
    if found.resolved and found.verdict is not None:
        with contextlib.closing(worktree.open_repository(instance, sandbox, size, wait)) as box:
            doubt = _forged(instance, changes, box, test_timeout)
        found = replace(found, verdict=replace(found.verdict, doubt=doubt), believed=not doubt)
    return replace(found, seconds=time.monotonic() - began)


def _prove(instance: Instance, patch: str, graded: Callable[[tuple[FileChange, ...]], Grade], log: str) -> None:
    """Raise GradingError if no test runs in the image with the gold patch either (or, if there is none, without any)."""
    if patch == instance.patch or graded(check_patch(instance.patch)).verdict is None:
        raise GradingError(f"instance {instance.id}: its tests do not run in its image; the log ends: {log[-1000:]!r}")
    _sound.add(instance)


def _graded(instance: Instance, changes: tuple[FileChange, ...], box: Sandbox, timeout: float) -> Grade:
    """A grade; a log that shows no test gives neither verdict nor `failure`."""
    try:
        prepared = _Prepared(instance, changes, box)
    except SandboxError as error:  # no code of the patch has run: an error that does not blame the agent
        raise GradingError(f"instance {instance.id}: {error}") from None
    if prepared.problem:
        return Grade(f"does not apply: {prepared.problem}", dropped=prepared.dropped)
    grade = Grade("applied" if changes else "empty", dropped=prepared.dropped)
    try:
        result = worktree.run(box, prepared.canaries.command, timeout)
        changed = [] if result.timed_out else prepared.changed()
    except (SandboxError, OSError, ValueError) as error:
        cause = cause_of(error)
        if cause is None or not changes:
            raise
        return replace(grade, failure=f"the tests broke their sandbox: {cause}")
    grade = replace(grade, log=result.stdout or "(nothing was printed)")
    if result.timed_out:
        return replace(grade, failure=f"the tests did not end within {timeout:g} seconds")
    return _judged(instance, prepared.canaries, result, changed, grade)


def _forged(instance: Instance, changes: tuple[FileChange, ...], box: Sandbox, timeout: float) -> str:
    """Why good tests are not believed, "" if they are: they pass even when they are made to fail."""
    prepared = _Prepared(instance, changes, box, inverted=True)
    if not prepared.inversion.tests:
        return ""
    return prepared.inversion.doubt(statuses_of(instance, worktree.run(box, command_of(instance), timeout).stdout))


def _judged(instance: Instance, watch: Canaries, result: ExecResult, changed: list[str], grade: Grade) -> Grade:
    statuses = statuses_of(instance, result.stdout)
    if not statuses:
        return replace(grade, failure="the memory was used up" if result.oom_killed else "")
    verdict = judge_statuses(instance, watch.without(statuses), exit_code=None if watch.expected else result.exit_code)
    doubt = watch.doubt(statuses, result.exit_code) or verdict.doubt
    if changed:
        doubt = f"the tests changed {changed[0]}"
    elif not doubt and (name := contradiction(instance, result.stdout)):
        doubt = f"the log calls {name} both good and bad"
    good = all(test.good for test in verdict.tests)
    return replace(grade, verdict=replace(verdict, doubt=doubt if good else ""), believed=not doubt)


class _Prepared:
    """A sandbox made ready for the tests: their files and canaries brought in, the patch applied, all that judges locked.

    The test patch comes first, so that no patch can be in its way.
    """

    def __init__(self, instance: Instance, changes: tuple[FileChange, ...], box: Sandbox, inverted: bool = False):
        self._box = box
        names = worktree.module_names(box)
        if instance.test_patch and (problem := worktree.apply(box, instance.test_patch)):
            raise GradingError(f"instance {instance.id}: its test patch does not apply to its image: {problem}")
        self.dropped = dropped(instance, changes, *names)
        kept = without_files("".join(change.text for change in changes), self.dropped)
        self.problem = worktree.apply(box, kept) if kept else ""
        if self.problem:
            return
        present = worktree.files_of(box)
        tests = [path for path in touched_files(instance.test_patch) if path in present]
        modules = [path for path in tests if path.endswith(".py")]
        sources = {path: box.read(f"{FOLDER}/{path}").decode("utf-8", "replace") for path in modules}
        self.canaries = canaries(instance, "\n".join(sources.values()), random.SystemRandom(), present)
        self.inversion = inversion(instance, sources, random.SystemRandom())
        files = self.inversion.files if inverted else self.canaries.files
        for path, text in files.items():
            box.write(f"{FOLDER}/{path}", text)
        self._watched = {path: box.read(f"{FOLDER}/{path}") for path in (*tests, *files)}
        box.protect([f"{FOLDER}/{path}" for path in _outermost({*filter(_judges, present), *self._watched})])

    def changed(self) -> list[str]:
        """The tests' files that are not as they were."""
        return [path for path, content in self._watched.items() if self._content(path) != content]

    def _content(self, path: str) -> bytes | None:
        try:
            return self._box.read(f"{FOLDER}/{path}")
        except (OSError, ValueError):
            return None


def _judges(path: str) -> bool:
    return is_protected(path.removesuffix("/"))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths without those in a folder of them."""
    kept: list[str] = []
    for path in sorted(path.removesuffix("/") for path in paths):
        if not kept or not path.startswith(f"{kept[-1]}/"):
            kept.append(path)
    return kept


def _share(tests: tuple[Outcome, ...]) -> float:
    return sum(test.good for test in tests) / len(tests) if tests else 1.0
