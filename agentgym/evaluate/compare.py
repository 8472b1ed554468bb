"""Comparison of runs. Tasks are paired, so that their difficulty adds no noise."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from agentgym.core.trajectory import Trajectory, read_jsonl
from agentgym.evaluate.plan import cell_name
from agentgym.evaluate.results import EpisodeNumbers, numbers_of
from agentgym.evaluate.statistics import Difference, paired_difference
from agentgym.evaluate.store import effective, read_run
from agentgym.evaluate.tables import NOTHING, cut, grid, number, one_line, percent

# The value of an episode, None where it has none: of a failed one only where each error counts as the environment's least reward.
_MEASURES: dict[str, Callable[[EpisodeNumbers], float | None]] = {
    "success": lambda e: None if e.failed else e.success,
    "reward": lambda e: None if e.failed else e.reward,
    "turns": lambda e: None if e.failed else e.turns,
    "tokens": lambda e: None if e.failed else e.usage.get("completion_tokens"),
    "success_with_errors": lambda e: 0.0 if e.failed else e.success,
    "reward_with_errors": lambda e: e.floor if e.failed else e.reward,
}
Read = Callable[[Path], Iterable[EpisodeNumbers]]


@dataclass
class ComparedCell:
    """The episodes of one cell by task, and how it was played: `settings` has what is known of that and must be the same."""

    env: str
    split: str
    agent: str
    tasks: Mapping[str, Sequence[EpisodeNumbers]]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return cell_name(self.env, self.split, self.agent)

    @property
    def played(self) -> set[str]:
        """The tasks with an episode that did not fail."""
        return {task for task, episodes in self.tasks.items() if not all(e.failed for e in episodes)}

    def mean(self, task: str, measure: str) -> float | None:
        values = [value for e in self.tasks[task] if (value := _MEASURES[measure](e)) is not None]
        return sum(values) / len(values) if values else None


def _stored(file: Path) -> Iterable[EpisodeNumbers]:
    return map(numbers_of, effective(file))


def read_compared(path: Path, read: Read = _stored) -> list[ComparedCell]:
    """A run to compare: an evaluation's folder, a training run's (its last evaluation), or a file of trajectories.

    Args:
        read: gives the episodes of an evaluation's cell by its file.

    Raises:
        ValueError: the path is none of these, or holds a broken line.
    """
    if path.is_file() and path.suffix == ".json":
        raise ValueError(f"{path} is not a file of episodes (.jsonl): name the run's folder, {path.parent}")
    if path.is_file():
        return _cells_of(effective(path), path.stem.rpartition("@")[2])
    if (path / "run.json").is_file():
        return [_evaluated(record, read(path / record["file"])) for record in read_run(path)["cells"]]
    if evaluations := sorted((path / "trajectories").glob("eval-*.jsonl")):
        step = evaluations[-1].stem.removeprefix("eval-")
        return _cells_of(read_jsonl(evaluations[-1]), f"step {int(step)}" if step.isdigit() else f"eval-{step}")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    neither = "neither an evaluation (run.json) nor a training run's (trajectories/eval-*.jsonl)"
    raise ValueError(f"{path} holds nothing to compare: {neither}")


def _evaluated(record: dict[str, Any], episodes: Iterable[EpisodeNumbers]) -> ComparedCell:
    env = record["env"]
    settings = {
        "kwargs": env.get("kwargs", {}),
        "entry point": env["entry_point"],
        "seed": record["seed"],
        "max_turns": record["max_turns"],
        "first task": record.get("first_task") or None,
    }
    if "kwargs" in (served := record.get("served", {})):
        settings["the server's kwargs"] = served["kwargs"]
    tasks: dict[str, list[EpisodeNumbers]] = defaultdict(list)
    for e in episodes:
        tasks[e.task].append(e)
    return ComparedCell(env["id"], record["split"], record["agent"]["name"], tasks, settings)


def _cells_of(trajectories: Iterable[Trajectory], agent: str) -> list[ComparedCell]:
    """A cell for each environment of a file, which does not record split and settings."""
    by_env: dict[str, dict[str, list[EpisodeNumbers]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        by_env[trajectory.env][trajectory.task_id].append(numbers_of(trajectory))
    return [ComparedCell(env, "", agent, tasks) for env, tasks in by_env.items()]


MOST_CHANGED = 10


@dataclass(frozen=True)
class CellComparison:
    """One environment in both runs.

    Attributes:
        measures: success, reward, turns and tokens by name.
        only_a, only_b: number of tasks that only one run has.
        changed: the ten tasks that changed most.
        notes: differences that make the runs less comparable.
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
    changed: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """Two runs: the cells that both have, and the names of those that only one has."""

    a: str
    b: str
    cells: list[CellComparison]
    only_a: list[str]
    only_b: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(a: Path | str, b: Path | str) -> Comparison:
    """The paired differences of tasks' means, b minus a, of each environment that both runs have; see `read_compared`.

    Cells with the same agent are compared; if each run has one cell left of an environment, these two are.
    """
    return compare_all([a, b])[0]


def compare_all(paths: Sequence[Path | str], read: Read = _stored) -> list[Comparison]:
    """Each run against the first, which is read once. Arguments as in `read_compared`; raises as `compare_runs`."""
    (first, a), *others = [(str(path), read_compared(Path(path), read)) for path in paths]
    comparisons = []
    for path, b in others:
        pairs = _pairs(a, b)
        only_a = [cell.name for cell in a if all(cell is not mine for mine, _ in pairs)]
        only_b = [cell.name for cell in b if all(cell is not theirs for _, theirs in pairs)]
        comparisons.append(Comparison(first, path, list(starmap(_compared, pairs)), only_a, only_b))
    return comparisons


def _pairs(a: Sequence[ComparedCell], b: Sequence[ComparedCell]) -> list[tuple[ComparedCell, ComparedCell]]:
    """Cells that belong together, in the order of a: by the same agent, then those that are left over alone."""
    found: dict[int, int] = {}
    for same_agent in (True, False):
        for i, mine in enumerate(a):
            left = [j for j, c in enumerate(b) if j not in found.values() and _alike(mine, c)]
            theirs = [j for j in left if b[j].agent == mine.agent or not same_agent]
            rivals = [k for k, c in enumerate(a) if k not in found and _alike(c, mine)]
            if i not in found and len(theirs) == 1 and (same_agent or len(rivals) == 1):
                found[i] = theirs[0]
    return [(a[i], b[found[i]]) for i in sorted(found)]


def _alike(a: ComparedCell, b: ComparedCell) -> bool:
    return a.env == b.env and (a.split == b.split or "" in (a.split, b.split))


def _compared(a: ComparedCell, b: ComparedCell) -> CellComparison:
    failed_a, failed_b = ([e.failed for episodes in cell.tasks.values() for e in episodes] for cell in (a, b))
    played = a.played & b.played
    both = [task for task in a.tasks if task in played]
    measures = _measured(a, b, both, ("success", "reward", "turns", "tokens"))
    if measures and any((*failed_a, *failed_b)):
        shared = [task for task in a.tasks if task in b.tasks]
        measures |= _measured(a, b, shared, ("success_with_errors", "reward_with_errors"))
    return CellComparison(
        env=a.env,
        split=a.split or b.split,
        agent_a=a.agent,
        agent_b=b.agent,
        measures=measures,
        episodes_a=failed_a.count(False),
        episodes_b=failed_b.count(False),
        errors_a=failed_a.count(True),
        errors_b=failed_b.count(True),
        only_a=len(a.played - b.played),
        only_b=len(b.played - a.played),
        changed=_most_changed(a, b, both),
        notes=_notes(a, b, both),
    )


def _measured(a: ComparedCell, b: ComparedCell, both: Sequence[str], names: Sequence[str]) -> dict[str, Difference]:
    found = {}
    for name in names:
        means = [(a.mean(task, name), b.mean(task, name)) for task in both]
        pairs = [(x, y) for x, y in means if x is not None and y is not None]
        if pairs:
            difference = found[name] = paired_difference(pairs)
            if name.startswith("success") and difference.low is not None and difference.high is not None:
                # No two shares differ by more than 1, however few the tasks.
                found[name] = replace(difference, low=max(difference.low, -1.0), high=min(difference.high, 1.0))
    return found


def _most_changed(a: ComparedCell, b: ComparedCell, both: Sequence[str]) -> list[dict[str, Any]]:
    """The tasks whose means differ most: `task`, `success_a`, `success_b`, `reward_a`, `reward_b`."""
    changes = []
    for task in both:
        means = {
            f"{name}_{ab}": c.mean(task, name) or 0.0
            for name in ("success", "reward")
            for ab, c in (("a", a), ("b", b))
        }
        changes.append({"task": task, **means})

    def size(change: dict[str, Any]) -> tuple[float, float]:
        return abs(change["success_b"] - change["success_a"]), abs(change["reward_b"] - change["reward_a"])

    changes.sort(key=lambda change: (*(-difference for difference in size(change)), change["task"]))
    return [change for change in changes[:MOST_CHANGED] if any(size(change))]


def _notes(a: ComparedCell, b: ComparedCell, both: Sequence[str]) -> list[str]:
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
        alone = len(mine.played - other.tasks.keys())
        lost = len((mine.played & other.tasks.keys()) - other.played)
        if alone:
            notes.append(f"{_count_tasks(alone)} only in {which}")
        if lost:
            have = "has" if lost == 1 else "have"
            notes.append(f"{_count_tasks(lost)} of {which} {have} only failed episodes in {rival}")
    samples = [_samples(cell) for cell in (a, b)]
    if samples[0] != samples[1]:
        notes.append(f"episodes of each task: {samples[0]} and {samples[1]}")
    return notes


def _count_tasks(many: int) -> str:
    return "1 task" if many == 1 else f"{many:,} tasks"


def _samples(cell: ComparedCell) -> str:
    counts = sorted({len(episodes) for episodes in cell.tasks.values()})
    return "none" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _short(value: Any) -> str:
    return cut(one_line(str(value)), 60)


CHANGES_SHOWN = 5
NAME_WIDTH = 22
TASK_WIDTH = 40


def comparison_table(comparison: Comparison, measure: str = "success") -> RenderableType:
    """One measure of every environment, the notes, and the tasks that changed most."""
    shown: list[RenderableType] = [Text(f"a: {one_line(comparison.a)}"), Text(f"b: {one_line(comparison.b)}")]
    table = grid("env\n@agent", ["\ntasks", "a\nb", f"{measure}\nb - a", "\n95%", "up", "same", "down", "\np"])
    for cell in comparison.cells:
        table.add_row(_name(cell), *_numbers(cell.measures.get(measure), as_percent=measure == "success"))
        if (counted := cell.measures.get(f"{measure}_with_errors")) is not None:
            table.add_row(Text("errors as failures"), *_numbers(counted, as_percent=measure == "success"))
    if comparison.cells:
        shown += [Text(), table]
    for cell in comparison.cells:
        shown += _below(cell, alone=len(comparison.cells) == 1)
    for which, names in (("a", comparison.only_a), ("b", comparison.only_b)):
        if names:
            shown.append(Text(f"only in {which}: {', '.join(map(one_line, names))}", style="yellow"))
    return Group(*shown)


def _name(cell: CellComparison) -> Text:
    agents = [cell.agent_a] if cell.agent_a == cell.agent_b else [f"a {cell.agent_a}", f"b {cell.agent_b}"]
    lines = [cell_name(cell.env, cell.split, ""), *(f"@{agent}" for agent in agents)]
    return Text("\n".join(cut(one_line(line), NAME_WIDTH) for line in lines))


def _numbers(difference: Difference | None, as_percent: bool) -> list[Text]:
    if difference is None:
        return [Text(NOTHING)] * 8
    value = percent if as_percent else number
    p = "<0.001" if difference.p < 1e-3 else f"{difference.p:.3f}"
    between = NOTHING
    if difference.low is not None and difference.high is not None:
        between = f"{_signed(difference.low, as_percent)}\n{_signed(difference.high, as_percent)}"
    signs = [str(count) for count in (difference.wins, difference.ties, difference.losses)]
    texts = [str(difference.tasks), f"{value(difference.a)}\n{value(difference.b)}"]
    return list(map(Text, (*texts, _signed(difference.mean, as_percent), between, *signs, p)))


def _signed(value: float, as_percent: bool) -> str:
    sign = "-" if value < 0 else "+"
    return f"{sign}{percent(abs(value)) if as_percent else number(abs(value))}"


def _below(cell: CellComparison, alone: bool) -> list[RenderableType]:
    agents = dict.fromkeys((cell.agent_a, cell.agent_b))
    name = "" if alone else f"{one_line(cell.env)}@{one_line(', '.join(agents))}: "
    notes: list[RenderableType] = [Text(f"{name}{note}", style="yellow") for note in cell.notes]
    if not cell.changed:
        return notes
    heading = Text(f"\n{name}the tasks that changed most", style="bold")
    table = grid("task", ["success a", "b", "reward a", "b"])
    for change in cell.changed[:CHANGES_SHOWN]:
        shares, rewards = ([change[f"{name}_{which}"] for which in "ab"] for name in ("success", "reward"))
        texts = [cut(one_line(change["task"]), TASK_WIDTH), *map(percent, shares), *map(number, rewards)]
        table.add_row(*map(Text, texts))
    return [*notes, heading, table]
