"""A comparison of two runs for a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from agentgym.evaluate.compare import CellComparison, Comparison, TaskChange
from agentgym.evaluate.formats import NOTHING, cut, number, one_line, percent
from agentgym.evaluate.statistics import Difference
from agentgym.evaluate.tables import grid

CHANGES_SHOWN = 5
NAME_WIDTH = 22
TASK_WIDTH = 40


def comparison_table(comparison: Comparison, measure: str = "success") -> RenderableType:
    """One measure of every environment, what makes the runs less comparable, and the tasks that changed most."""
    shown: list[RenderableType] = [Text(f"a: {one_line(comparison.a)}"), Text(f"b: {one_line(comparison.b)}")]
    table = grid("env\n@agent", ["\ntasks", "a\nb", f"{measure}\nb - a", "\n95%", "up", "same", "down", "\np"])
    for cell in comparison.cells:
        table.add_row(_name(cell), *_numbers(cell.measures.get(measure), as_percent=measure == "success"))
        if (counted := cell.measures.get(f"{measure}_with_errors")) is not None:
            table.add_row(Text("errors as zeros"), *_numbers(counted, as_percent=measure == "success"))
    if comparison.cells:
        shown += [Text(), table]
    for cell in comparison.cells:
        shown += _below(cell, alone=len(comparison.cells) == 1)
    for which, names in (("a", comparison.only_a), ("b", comparison.only_b)):
        if names:
            shown.append(Text(f"only in {which}: {', '.join(map(one_line, names))}", style="yellow"))
    return Group(*shown)


def _name(cell: CellComparison) -> Text:
    split = "" if cell.split in ("test", "") else f"/{cell.split}"
    agents = [cell.agent_a] if cell.agent_a == cell.agent_b else [f"a {cell.agent_a}", f"b {cell.agent_b}"]
    lines = [f"{cell.env}{split}", *(f"@{agent}" for agent in agents)]
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
    return [Text(text) for text in (*texts, _signed(difference.mean, as_percent), between, *signs, p)]


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
        table.add_row(*_change(change))
    return [*notes, heading, table]


def _change(change: TaskChange) -> list[Text]:
    successes = [percent(change.success_a), percent(change.success_b)]
    rewards = [number(change.reward_a), number(change.reward_b)]
    return [Text(text) for text in (cut(one_line(change.task), TASK_WIDTH), *successes, *rewards)]
