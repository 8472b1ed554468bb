"""Is one run better than another? Paired by task, so that the tasks' own difficulty is no noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentgym.evaluate.compared_runs import MEASURES, WITH_ERRORS, ComparedCell, ComparedRun, read_compared
from agentgym.evaluate.formats import cut, one_line
from agentgym.evaluate.statistics import Difference, paired_difference

MOST_CHANGED = 10


@dataclass(frozen=True)
class TaskChange:
    """A task on which the two runs differ: its mean success and reward in each."""

    task: str
    success_a: float
    success_b: float
    reward_a: float
    reward_b: float


@dataclass(frozen=True)
class CellComparison:
    """One environment in both runs.

    Attributes:
        env, split: what was played; the split is "" where nobody wrote it down.
        agent_a, agent_b: what played; they may differ.
        measures: the paired difference, b minus a, of "success", "reward", "turns" and "tokens" (written by the agent),
            of those that both have; empty where no task was played in both. Where there are errors, also "success_with_errors"
            and "reward_with_errors", for which an error counts as the environment's least reward.
        episodes_a, episodes_b: played to an end, over all tasks of the run.
        errors_a, errors_b: episodes that failed; they are in no mean.
        only_a, only_b: tasks that were played to an end in one run only.
        changed: the tasks that changed most, at most ten, the largest changes first, by success and then by reward.
        notes: what makes the two less comparable than they should be.
    """

    env: str
    split: str
    agent_a: str
    agent_b: str
    measures: dict[str, Difference]
    episodes_a: int
    episodes_b: int
    errors_a: int
    errors_b: int
    only_a: int
    only_b: int
    changed: list[TaskChange]
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        a, b: their paths.
        cells: what both have.
        only_a, only_b: names of the cells that have no counterpart in the other run.
    """

    a: str
    b: str
    cells: list[CellComparison]
    only_a: list[str]
    only_b: list[str]

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return asdict(self)


def compare_runs(a: Path | str, b: Path | str) -> Comparison:
    """Compare two runs: of each environment that both have, the paired differences of tasks' means, b minus a.

    A run is the folder of an evaluation, that of a training run (its last evaluation), or a file of trajectories. Cells with
    the same agent belong together; where one cell of an environment is left in each run, these two do.

    Raises:
        ValueError: a path is no such run, or holds a broken line.
    """
    return compare_read(read_compared(Path(a)), read_compared(Path(b)))


def compare_all(paths: Sequence[Path | str]) -> list[Comparison]:
    """Each run against the first, which is read once. Raises as `compare_runs`."""
    first, *others = [read_compared(Path(path)) for path in paths]
    return [compare_read(first, other) for other in others]


def compare_read(a: ComparedRun, b: ComparedRun) -> Comparison:
    """Compare two runs that were read; see `compare_runs`."""
    pairs = _pairs(a.cells, b.cells)
    only_a = [cell.name for cell in a.cells if all(cell is not mine for mine, _ in pairs)]
    only_b = [cell.name for cell in b.cells if all(cell is not theirs for _, theirs in pairs)]
    return Comparison(a.path, b.path, [_compared(mine, theirs) for mine, theirs in pairs], only_a, only_b)


def _pairs(a: Sequence[ComparedCell], b: Sequence[ComparedCell]) -> list[tuple[ComparedCell, ComparedCell]]:
    """Cells that belong together, in the order of a: by the same agent, then those that are left over alone."""
    found: dict[int, ComparedCell] = {}
    taken: set[int] = set()
    for same_agent in (True, False):
        for mine in a:
            if id(mine) in found:
                continue
            theirs = [
                c for c in b if id(c) not in taken and _alike(mine, c) and (c.agent == mine.agent or not same_agent)
            ]
            rivals = [c for c in a if id(c) not in found and _alike(c, mine)]
            if len(theirs) == 1 and (same_agent or len(rivals) == 1):
                found[id(mine)] = theirs[0]
                taken.add(id(theirs[0]))
    return [(mine, found[id(mine)]) for mine in a if id(mine) in found]


def _alike(a: ComparedCell, b: ComparedCell) -> bool:
    return a.env == b.env and (a.split == b.split or "" in (a.split, b.split))


def _compared(a: ComparedCell, b: ComparedCell) -> CellComparison:
    played_a, played_b = ({task for task, means in cell.tasks.items() if means.episodes} for cell in (a, b))
    both = [task for task in a.tasks if task in played_a and task in played_b]
    measures = _measured(a, b, both, MEASURES)
    if measures and any(means.errors for cell in (a, b) for means in cell.tasks.values()):
        measures |= _measured(a, b, [task for task in a.tasks if task in b.tasks], WITH_ERRORS)
    return CellComparison(
        env=a.env,
        split=a.split or b.split,
        agent_a=a.agent,
        agent_b=b.agent,
        measures=measures,
        episodes_a=sum(means.episodes for means in a.tasks.values()),
        episodes_b=sum(means.episodes for means in b.tasks.values()),
        errors_a=sum(means.errors for means in a.tasks.values()),
        errors_b=sum(means.errors for means in b.tasks.values()),
        only_a=len(played_a - played_b),
        only_b=len(played_b - played_a),
        changed=_most_changed(a, b, both),
        notes=_notes(a, b, both),
    )


def _measured(a: ComparedCell, b: ComparedCell, both: Sequence[str], names: Sequence[str]) -> dict[str, Difference]:
    """The paired differences of some measures, of those that both have."""
    found = {}
    for name in names:
        means = [(a.tasks[task].mean(name), b.tasks[task].mean(name)) for task in both]
        pairs = [(x, y) for x, y in means if x is not None and y is not None]
        if pairs:
            found[name] = paired_difference(pairs)
    return found


def _most_changed(a: ComparedCell, b: ComparedCell, both: Sequence[str]) -> list[TaskChange]:
    changes = []
    for task in both:
        values = [cell.tasks[task].mean(measure) or 0.0 for measure in ("success", "reward") for cell in (a, b)]
        if values[0] != values[1] or values[2] != values[3]:
            changes.append(TaskChange(task, *values))
    changes.sort(key=lambda c: (-abs(c.success_b - c.success_a), -abs(c.reward_b - c.reward_a), c.task))
    return changes[:MOST_CHANGED]


def _notes(a: ComparedCell, b: ComparedCell, both: Sequence[str]) -> list[str]:
    """Warnings about the differences: other settings, other tasks, few episodes."""
    notes = [
        f"{name} differs: {_short(a.settings[name])} and {_short(b.settings[name])}"
        for name in a.settings
        if name != "first task" and name in b.settings and a.settings[name] != b.settings[name]
    ]
    marks = [cell.settings.get("first task") for cell in (a, b)]
    if None not in marks and marks[0] != marks[1]:
        notes.append("the first task has another content: the data has changed, or the settings make other tasks")
    if not both:
        notes.append("no task was played to an end in both runs")
    for which, mine, rival, other in (("a", a, "b", b), ("b", b, "a", a)):
        played = [task for task, means in mine.tasks.items() if means.episodes]
        alone = sum(task not in other.tasks for task in played)
        lost = sum(task in other.tasks and not other.tasks[task].episodes for task in played)
        if alone:
            notes.append(f"{_tasks(alone)} only in {which}")
        if lost:
            notes.append(f"{_tasks(lost)} of {which} {'has' if lost == 1 else 'have'} only failed episodes in {rival}")
    samples = [_samples(cell) for cell in (a, b)]
    if samples[0] != samples[1]:
        notes.append(f"episodes of each task: {samples[0]} and {samples[1]}")
    return notes


def _tasks(many: int) -> str:
    return "1 task" if many == 1 else f"{many:,} tasks"


def _samples(cell: ComparedCell) -> str:
    counts = sorted({means.episodes + means.errors for means in cell.tasks.values()})
    return "none" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _short(value: Any) -> str:
    return cut(one_line(str(value)), 60)
