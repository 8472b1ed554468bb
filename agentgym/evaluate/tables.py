"""Results as tables for a terminal of 80 columns, plain text elsewhere; and the formats of numbers and names in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from agentgym.evaluate.plan import cell_name
from agentgym.evaluate.results import CUT, CellResult, Part, Results

NOTHING = "-"  # where there is no number
NARROWEST_NAME = 14
WIDEST_NAME = 60
# Columns that a narrow terminal drops, in this order.
SPARED = ("95%", "turns", "time", "tok in", "cost", "pass", "reward")

Cells = Sequence[CellResult]
_Lines = tuple[str, str]
_Column = tuple[str, str, Callable[[CellResult], _Lines]]


def results_table(results: Results, parts: bool = False) -> RenderableType:
    """The results of a run for a terminal; with `parts`, also the tables by tag and by difficulty."""
    cells = results.cells
    shown: list[RenderableType] = [table_of(cells), *map(part_tables, cells if parts else ())]
    smaller = [
        f"{_name_lines(cell)[0]}: {cell.planned // cell.samples:,} of {cell.asked:,} tasks asked: the split has no more"
        for cell in cells
        if cell.asked is not None and cell.planned // cell.samples < cell.asked
    ]
    shown += [Text(text, style="yellow") for text in dict.fromkeys(smaller)]
    for cell in cells:
        if cell.players:
            means = ", ".join(f"{player} {number(reward)}" for player, reward in cell.players.items())
            shown.append(Text(f"{one_line(cell.name)}: mean reward of {one_line(means)}"))
    missing = sum(cell.planned - cell.episodes - cell.errors for cell in cells)
    if results.stopped or missing > 0:
        why = f"stopped: {one_line(results.stopped)}; " if results.stopped else ""
        planned = sum(cell.planned for cell in cells)
        shown.append(Text(f"{why}{missing:,} of {planned:,} episodes were not played", style="yellow"))
    failures = [cell.agent_failures for cell in cells]
    shown += _by_cause("agent failures (played, at the environment's least reward)", cells, failures)
    return Group(
        *shown, *_ended_early(cells), *_by_cause("errors by cause", cells, [cell.error_texts for cell in cells])
    )


def table_of(cells: Cells) -> RenderableType:
    """The cells as a table, two lines each: the mean and under it its interval, pass@k and under it pass^k."""
    return _CellTable(cells)


class _CellTable:
    """Leaves out empty columns, and cuts names to fit."""

    def __init__(self, cells: Cells):
        self._cells = cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [_name_lines(cell) for cell in self._cells]
        longest = max((len(part) for name in names for part in name), default=0)
        columns = [c for c in _columns(self._cells) if any(c[2](cell) != (NOTHING, "") for cell in self._cells)]
        for spared in (*SPARED, None):
            texts = [[*c[:2], *(text for cell in self._cells for text in c[2](cell))] for c in columns]
            room = options.max_width - sum(max(map(len, column)) + 1 for column in texts)
            if room >= min(longest, NARROWEST_NAME) or spared is None:
                break
            columns = [column for column in columns if not column[0].startswith(spared)]
        width = max(min(room, WIDEST_NAME, longest), len("agent"))
        table = grid("env\n@agent" if any(agent for _, agent in names) else "env", [f"{c[0]}\n{c[1]}" for c in columns])
        for name, cell in zip(names, self._cells, strict=True):
            table.add_row(_two([cut(part, width) for part in name]), *(_two(make(cell)) for _, _, make in columns))
        yield table


def _columns(cells: Cells) -> list[_Column]:
    ks = {max(cell.pass_at, default=1) for cell in cells}
    k = str(max(ks)) if len(ks) == 1 else "k"
    return [
        ("n", "", lambda cell: (str(cell.episodes), "")),
        ("err", "", lambda cell: (str(cell.errors) if cell.errors else NOTHING, "")),
        ("cut", "", lambda cell: (str(cell.cut) if cell.cut else NOTHING, "")),
        ("success", "95%", _success),
        ("reward", "±95%", _reward),
        ("err=0", "reward", _with_errors),
        (f"pass@{k}", f"pass^{k}", lambda cell: _pass(cell, told=len(ks) == 1)),
        ("95%", "", _pass_interval),
        ("turns", "", lambda cell: (NOTHING if cell.turns is None else f"{cell.turns:.1f}", "")),
        ("tok in", "out", _tokens),
        ("cost", "", lambda cell: (money(cell.cost), "")),
        ("time", "", lambda cell: (duration(cell.seconds) if cell.seconds else NOTHING, "")),
    ]


def _name_lines(cell: CellResult) -> _Lines:
    return one_line(cell_name(cell.env, cell.split, "")), one_line(f"@{cell.agent}") if cell.agent else ""


def _success(part: Part) -> _Lines:
    return percent(part.success), "" if part.success is None else percent_range(part.success_low, part.success_high)


def _reward(part: Part) -> _Lines:
    return number(part.reward), half_width(part.reward_low, part.reward_high)


def _with_errors(cell: CellResult) -> _Lines:
    """The success, and below it the reward, with errors counted as zeros; empty without errors."""
    if not (cell.errors and cell.episodes):
        return NOTHING, ""
    return percent(cell.success_with_errors), number(cell.reward_with_errors)


def _pass(cell: CellResult, told: bool) -> _Lines:
    """pass@k and pass^k of the largest k, named in the heading or here; k = 1 is the success."""
    k = max(cell.pass_at, default=1)
    at, hat = ("", "") if told else (f"@{k} ", f"^{k} ")
    return (NOTHING, "") if k == 1 else (f"{at}{percent(cell.pass_at[k])}", f"{hat}{percent(cell.pass_hat[k])}")


def _pass_interval(cell: CellResult) -> _Lines:
    k = max(cell.pass_at, default=1)
    if k == 1 or k not in cell.pass_at_interval:
        return NOTHING, ""
    return percent_range(*cell.pass_at_interval[k]), percent_range(*cell.pass_hat_interval[k])


def _tokens(cell: CellResult) -> _Lines:
    read, written = (cell.tokens.get(kind) for kind in ("prompt_tokens", "completion_tokens"))
    return (NOTHING, "") if read is None and written is None else (count(read), count(written))


def part_tables(cell: CellResult) -> RenderableType:
    """The numbers of a cell by tag and by difficulty; nothing where it has neither."""
    tables: list[RenderableType] = []
    for kind, parts in (("tag", cell.by_tag), ("difficulty", cell.by_difficulty)):
        table = grid(kind, ["tasks", "n", "err", "success", "95%", "reward", ""])
        for name, part in parts.items():
            numbers = [str(part.tasks), str(part.episodes), str(part.errors) if part.errors else NOTHING]
            line = [cut(one_line(name), WIDEST_NAME // 2), *numbers, *_success(part), *_reward(part)]
            table.add_row(*(Text(text) for text in line))
        tables += [Text(), table] if parts else []
    return Group(*tables[:1], Text(one_line(cell.name), style="bold"), *tables[1:]) if tables else Group()


def grid(first: str, rest: Sequence[str]) -> Table:
    """A table without frames: names to the left, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column(Text(first), no_wrap=True, overflow="ellipsis")
    for heading in rest:
        table.add_column(Text(heading.rstrip()), justify="right", no_wrap=True)
    return table


def _two(lines: Sequence[str]) -> Text:
    return Text("\n".join(lines).rstrip("\n"))


def _ended_early(cells: Cells) -> Iterator[RenderableType]:
    """Cut answers by cause, a warning where these are many; episodes that the run's limit of turns ended."""
    for cell in cells:
        name = f"{one_line(cell.name)}: " if len(cells) > 1 else ""
        if cell.cut:
            warning = "warning: " if cell.much_cut else ""
            causes = ", ".join(f"{cell.finish_reasons[why]:,} x {why}" for why in CUT if why in cell.finish_reasons)
            text = f"{warning}{name}{cell.cut:,} of {cell.episodes + cell.errors:,} episodes were cut: {causes}"
            yield Text(text, style="yellow" if cell.much_cut else "")
        if ended := cell.ends.get("max_turns", 0):
            text = f"{name}{ended:,} of {cell.episodes:,} episodes ended at --max-turns, before their environment ended them"
            yield Text(f"""{text} (its own limit: --kwargs '{{"max_turns": N}}')""", style="yellow")


def _by_cause(title: str, cells: Cells, counts: Sequence[Mapping[str, int]]) -> list[RenderableType]:
    several = len(cells) > 1
    lines = [
        f"{f'{one_line(cell.name)}: ' if several else ''}{times:,} x {one_line(text)}"
        for cell, causes in zip(cells, counts, strict=True)
        for text, times in sorted(causes.items(), key=lambda item: -item[1])
    ]
    return [Text(f"\n{title}", style="bold"), *(Text(line, overflow="fold") for line in lines)] if lines else []


def percent(share: float | None) -> str:
    """0.875 as 87.5%."""
    return NOTHING if share is None else f"{share:.1%}"


def percent_range(low: float | None, high: float | None) -> str:
    """0.821 and 0.913 as 82.1-91.3."""
    return NOTHING if low is None or high is None else f"{100 * low:.1f}-{100 * high:.1f}"


def number(value: float | None) -> str:
    """Three significant digits, or the whole part of large numbers: 0.875, 12.5, 1,234, 2.1e+09."""
    if value is None:
        return NOTHING
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def half_width(low: float | None, high: float | None) -> str:
    """Half the width of a symmetric interval, as ±0.02; empty if the width is zero or unknown."""
    return "" if low is None or high is None or low == high else f"±{(high - low) / 2:.2g}"


def count(value: float | None) -> str:
    """At most five characters: 999, 1.2k, 34k, 1.2M."""
    if value is None:
        return NOTHING
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.1f}{letter}" if scaled < 9.95 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}"


def money(dollars: float | None) -> str:
    """US dollars: $0.0031, $0.42, $12.50, $1,234."""
    if dollars is None:
        return NOTHING
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.2g}"


def duration(seconds: float | None) -> str:
    """4.2 s, 75 s, 12 min, 3.4 h, 2.1 d."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, name in ((86_400, "d"), (3_600, "h")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def cut(text: str, width: int) -> str:
    """Shorten a name to `width` by cutting its middle, since names differ at their ends."""
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def one_line(text: str) -> str:
    """Untrusted text as one terminal line: control characters are written as escapes."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in words)
