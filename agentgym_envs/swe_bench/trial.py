"""One run of an instance's tests on a patch, in a fresh sandbox, with what would let the patch judge itself taken from it."""

import contextlib
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from agentgym.core.agent_failure import cause_of
from agentgym.sandbox import ExecResult, Sandbox, SandboxError
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.canaries import Canaries, canaries
from agentgym_envs.swe_bench.commands import build_command_of
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.inversion import Inversion, inversion
from agentgym_envs.swe_bench.patches import FileChange, touched_files, without_files
from agentgym_envs.swe_bench.protected import dropped, is_protected
from agentgym_envs.swe_bench.upstream import LogUnreadableError, needs_swebench
from agentgym_envs.swe_bench.verdict import Verdict, contradiction, judge_statuses, statuses_of
from agentgym_envs.swe_bench.worktree import FOLDER, Size

# Images of versions up to 2.2 hold an installed copy, which SWE-bench installs anew after the patch.
_FROM_SOURCE = {"django/django": f"export PYTHONPATH={FOLDER}\n"}
Key = tuple[Instance, str | None, Size]
_SAID = 4000  # characters of a failed build


class GradingError(RuntimeError):
    """The machinery failed: there is no verdict on the patch."""


@dataclass(frozen=True)
class Bench:
    """The place of an instance's tests, and the seconds for them and to wait for a sandbox."""

    instance: Instance
    sandbox: str | None
    size: Size
    test_timeout: float
    wait: float

    @property
    def key(self) -> Key:
        """All that a run depends on, besides the patch and the time."""
        return self.instance, self.sandbox, self.size


@dataclass(frozen=True)
class Trial:
    """A run of the tests.

    Attributes:
        problem: why the patch does not apply, so that no test ran.
        verdict: what the log says, whether it is believed or not; None if it names no test.
        failure: why there is no verdict.
        doubt: why the log is not believed: it has what honest tests would not print, or they did what those would not.
        inversion: the tests that can be made to fail, and in an inverted run are; without their files.
    """

    dropped: tuple[str, ...]
    problem: str = ""
    verdict: Verdict | None = None
    failure: str = ""
    doubt: str = ""
    inversion: Inversion = field(default_factory=Inversion)
    log: str = ""
    seconds: float = 0.0
    timed_out: bool = False


def run_tests(
    bench: Bench, changes: tuple[FileChange, ...], *, inverted: bool = False, with_tests: bool = True
) -> Trial:
    """Run the tests. Raises GradingError and SandboxError for what no code of the patch can have caused.

    Args:
        inverted: with the tests made to fail, where they can be.
        with_tests: with the test patch.
    """
    instance = bench.instance
    with contextlib.closing(worktree.open_repository(instance, bench.sandbox, bench.size, bench.wait)) as box:
        try:
            prepared = _Prepared(instance, changes, box, inverted, with_tests)
        except SandboxError as error:  # no code of the patch has run: an error that does not blame the agent
            raise GradingError(f"instance {instance.id}: {error}") from None
        if prepared.problem:
            return Trial(prepared.dropped, prepared.problem)
        try:
            result, built = _run(box, prepared, bench.test_timeout)
            changed = [] if result.timed_out else prepared.changed()
        except (SandboxError, OSError, ValueError) as error:
            cause = cause_of(error)
            if cause is None or not changes:
                raise
            return Trial(prepared.dropped, failure=f"the tests broke their sandbox: {cause}")
    trial = _read(instance, prepared.canaries, result, changed)
    trial = replace(trial, log=built + trial.log)
    # Some docstrings are those of several tests, of which a failing one may be skipped in another class.
    if trial.verdict and not trial.doubt and not inverted:
        good = {test.name for test in trial.verdict.tests if test.good}
        trial = replace(trial, doubt=_contradicted(instance, result.stdout, good))
    return replace(trial, dropped=prepared.dropped, inversion=replace(prepared.inversion, files={}))


def _run(box: Sandbox, prepared: "_Prepared", seconds: float) -> tuple[ExecResult, str]:
    """The run of the tests, or of the build if it took all the time; and the end of a failed build's output."""
    if not prepared.build:
        return worktree.run(box, prepared.command, seconds), ""
    built = worktree.run(box, prepared.build, seconds)
    if built.timed_out or built.seconds >= seconds:
        return replace(built, timed_out=True), ""
    prepared.lock(worktree.files_of(box))
    result = worktree.run(box, prepared.command, seconds - built.seconds)
    said = "" if built.ok else f"the build failed: {built.stdout[-_SAID:]}\n"
    return replace(result, seconds=built.seconds + result.seconds), said


def _contradicted(instance: Instance, output: str, good: Collection[str]) -> str:
    try:
        name = contradiction(instance, output, good)
    except LogUnreadableError as error:
        return str(error)
    return f"the log calls {name} both good and bad" if name else ""


def _read(instance: Instance, watch: Canaries, result: ExecResult, changed: list[str]) -> Trial:
    trial = Trial((), log=result.stdout or "(nothing was printed)", seconds=result.seconds, timed_out=result.timed_out)
    if result.timed_out:
        return replace(trial, failure="the tests did not end in time")
    try:
        statuses = statuses_of(instance, result.stdout)
    except LogUnreadableError as error:
        return replace(trial, failure=str(error))
    if not statuses:
        return replace(trial, failure="the memory was used up" if result.oom_killed else "no test runs")
    verdict = judge_statuses(instance, watch.without(statuses), exit_code=None if watch.expected else result.exit_code)
    doubt = watch.doubt(statuses, result.exit_code) or verdict.doubt
    if changed:
        doubt = f"the tests changed {changed[0]}"
    return replace(trial, verdict=replace(verdict, doubt=""), doubt=doubt)


class _Prepared:
    """A sandbox made ready for the tests: their files and canaries brought in, the patch applied, all that judges locked.

    The test patch comes first, so that no patch can be in its way. Where something is to be built first, `lock` comes later.
    """

    def __init__(
        self, instance: Instance, changes: tuple[FileChange, ...], box: Sandbox, inverted: bool, with_tests: bool
    ):
        self._box = box
        self.build = build_command_of(instance)
        python = not needs_swebench(instance)
        names = worktree.module_names(box) if python else ((), ())
        tracked = None if python else worktree.tracked_files(box)
        if instance.test_patch and with_tests and (problem := worktree.apply(box, instance.test_patch)):
            raise GradingError(f"instance {instance.id}: its test patch does not apply to its image: {problem}")
        self.dropped = dropped(instance, changes, *names)
        kept = without_files(changes, self.dropped)
        self.problem = worktree.apply(box, kept) if kept else ""
        if self.problem:
            return
        present = worktree.files_of(box)
        tests = [path for path in touched_files(instance.test_patch) if path in present]
        modules = [path for path in tests if path.endswith(".py")]
        sources = {path: box.read(f"{FOLDER}/{path}").decode("utf-8", "replace") for path in modules}
        self.canaries = canaries(instance, "\n".join(sources.values()), random.SystemRandom(), present)
        self.command = _FROM_SOURCE.get(instance.repo.lower(), "") + self.canaries.command
        self.inversion = inversion(instance, sources, random.SystemRandom())
        files = {**self.canaries.files, **(self.inversion.files if inverted else {})}
        for path, text in files.items():
            box.write(f"{FOLDER}/{path}", text)
        self._watched = {path: box.read(f"{FOLDER}/{path}") for path in (*tests, *files)}
        # Non-Python files may be built in the tests' folders: only files that git tracks are locked there.
        judging = present if tracked is None else sorted({*tracked} & {*present})
        self._judging = {*filter(_judges, judging), *self._watched}
        if not self.build:
            self.lock(present)

    def lock(self, present: Iterable[str]) -> None:
        """Take from the programs what judges and is still there."""
        self._box.protect([f"{FOLDER}/{path}" for path in _outermost(self._judging & {*present})])

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
