"""The report of an evaluation: `report.html`, one file made from the run folder."""

from __future__ import annotations

import json
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.evaluate.formats import NOTHING, count, duration, half_width, money, number, percent, percent_range
from agentgym.evaluate.results import CellResult, Part, Results
from agentgym.evaluate.store import cells_of, effective, read_run
from agentgym.storage.files import write_text
from agentgym.viewer.charts import Estimate, Frame, Series, interval_chart, line_chart, stacked_bars
from agentgym.viewer.page import PAGE, card, document, episodes_html, examples, folded, table

# Episodes that are searched for examples: errors are rare.
LOOKED_THROUGH = 5_000
CELLS_OPENED = 3
PARTS_CHARTED = 40


def write_report(run: Path, results: Results) -> Path:
    """Write `report.html` into a run folder: one file that needs no other and no network.

    Raises:
        ValueError: the folder holds no evaluation, or a broken line.
    """
    record = read_run(run)
    files = {cell.name: file for cell, file in cells_of(run, record)}
    cells = [
        _cell(cell, files.get(cell.name), opened=position < CELLS_OPENED) for position, cell in enumerate(results.cells)
    ]
    parts = [
        _headline(results),
        _stopped(results),
        *_warnings(results),
        _overview(results),
        "<h2>Cells</h2>",
        *cells,
        _settings(record),
    ]
    write_text(run / "report.html", document(results.name, "agentgym evaluation", parts))
    return run / "report.html"


def _headline(results: Results) -> str:
    cells = results.cells
    errors, requests = sum(c.errors for c in cells), sum(c.requests for c in cells)
    retries = sum(sum(c.retries.values()) for c in cells)
    tokens = {kind: sum(c.tokens.get(kind, 0) for c in cells) for kind in ("prompt_tokens", "completion_tokens")}
    costs = [c.cost for c in cells if c.cost is not None]
    cards = [
        ("episodes", f"{sum(c.episodes for c in cells):,}", f"of {sum(c.planned for c in cells):,}"),
        ("errors", f"{errors:,}", _errors_told(cells) if errors else "none"),
        ("time", duration(results.seconds), f"{len(cells)} cell{'s' * (len(cells) != 1)}"),
    ]
    if len(cells) == 1 and cells[0].success is not None:
        only = cells[0]
        cards.insert(
            0, ("success", percent(only.success), f"95%: {percent_range(only.success_low, only.success_high)}")
        )
    if any(tokens.values()):
        written = count(tokens["completion_tokens"])
        cards.append(("tokens", count(sum(tokens.values())), f"{written} of them written"))
    if requests:
        cards.append(("requests", f"{requests:,}", f"{retries:,} sent again"))
    if costs:
        cards.append(("cost", money(sum(costs)), "by the table of prices"))
    return f'<section class="cards">{"".join(card(*one) for one in cards)}</section>'


def _errors_told(cells: list[CellResult]) -> str:
    """That errors are in no mean, and what they would make of the success."""
    if len(cells) > 1:
        return "in no mean"
    return f"in no mean; success {percent(cells[0].success_with_errors)} with them as zeros"


def _stopped(results: Results) -> str:
    missing = sum(c.planned - c.episodes - c.errors for c in results.cells)
    if results.stopped is None and missing <= 0:
        return ""
    why = f"Stopped: {escape(results.stopped)}. " if results.stopped else ""
    return f'<p class="bad">{why}{missing:,} episodes were not played.</p>'


def _warnings(results: Results) -> list[str]:
    return [
        f'<p class="bad">{escape(c.name)}: {c.cut:,} of {c.episodes + c.errors:,} episodes were cut: {escape(c.cut_words)}</p>'
        for c in results.cells
        if c.much_cut
    ]


def _overview(results: Results) -> str:
    headings = ["environment", "agent", "episodes", "errors", "cut", "success", "95%", "reward", "±95%"]
    headings += ["success, err=0", "reward, err=0"]
    headings += ["pass@k", "pass^k", "turns", "tokens in", "out", "retries", "cost", "time"]
    rows = [_row(cell) for cell in results.cells]
    kept = [i for i in range(len(headings)) if i < 2 or any(row[i] != NOTHING for row in rows)]
    shown = table([headings[i] for i in kept], [[row[i] for i in kept] for row in rows], names=2)
    estimates = [
        Estimate(c.name, c.success, c.success_low, c.success_high) for c in results.cells if c.success is not None
    ]
    frame = Frame("Success, with 95% intervals clustered by task", width=760, percent=True, y_range=(0, 1))
    chart = f'<figure class="alone">{interval_chart(estimates, frame, PAGE)}</figure>' if estimates else ""
    return f"<section><h2>Results</h2>{shown}{chart}</section>"


def _row(cell: CellResult) -> list[str]:
    k = max(cell.pass_at, default=1)
    both = (("@", cell.pass_at, cell.pass_at_interval), ("^", cell.pass_hat, cell.pass_hat_interval))
    passes = [
        f"{sign}{k} {percent(of[k])} ({percent_range(*at.get(k, (None, None)))})" if k > 1 else NOTHING
        for sign, of, at in both
    ]
    split = "" if cell.split == "test" else f"/{cell.split}"
    return [
        f"{cell.env}{split}",
        cell.agent or NOTHING,
        f"{cell.episodes:,}",
        f"{cell.errors:,}",
        f"{cell.cut:,}" if cell.cut else NOTHING,
        *_means(cell),
        *_with_errors(cell),
        *passes,
        number(cell.turns),
        count(cell.tokens.get("prompt_tokens")),
        count(cell.tokens.get("completion_tokens")),
        f"{sum(cell.retries.values()):,}" if cell.requests else NOTHING,
        money(cell.cost),
        duration(cell.seconds),
    ]


def _means(part: CellResult | Part) -> list[str]:
    return [
        percent(part.success),
        percent_range(part.success_low, part.success_high),
        number(part.reward),
        half_width(part.reward_low, part.reward_high) or NOTHING,
    ]


def _with_errors(cell: CellResult) -> list[str]:
    return [percent(cell.success_with_errors), number(cell.reward_with_errors)]


def _cell(cell: CellResult, file: Path | None, opened: bool) -> str:
    charts = [*_pass_chart(cell), *_histogram(cell), *_part_charts(cell)]
    shown = [] if file is None else examples(islice(effective(file), LOOKED_THROUGH), _absent(cell))
    body = [
        f'<div class="charts">{"".join(f"<figure>{svg}</figure>" for svg in charts)}</div>' if charts else "",
        *(_parts(kind, parts) for kind, parts in (("tag", cell.by_tag), ("difficulty", cell.by_difficulty)) if parts),
        _counts("How episodes ended", cell.ends),
        _counts("Agent failures by cause", cell.agent_failures),
        _counts("Episodes by finish reason of an answer", cell.finish_reasons),
        _counts("Errors by cause", cell.error_texts),
        _counts("Requests sent again, by cause", cell.retries),
        f"<h3>Some episodes</h3>{episodes_html(shown)}" if shown else "",
    ]
    facts = f"{cell.episodes:,} episodes, success {percent(cell.success)}"
    return (
        f'<details{" open" * opened}><summary><span class="task">{escape(cell.name)}</span>'
        f'<span class="facts">{escape(facts)}</span></summary><div class="turns">{"".join(body)}</div></details>'
    )


def _absent(cell: CellResult) -> list[str]:
    """The outcomes that no episode of a cell has."""
    none = {"success": not cell.success, "failure": cell.success in (None, 1.0), "error": not cell.errors}
    return [outcome for outcome, is_so in none.items() if is_so]


def _pass_chart(cell: CellResult) -> list[str]:
    if max(cell.pass_at, default=1) == 1:
        return []
    lines = [Series("pass@k", list(cell.pass_at.items())), Series("pass^k", list(cell.pass_hat.items()))]
    title = "One of k succeeds, all of k succeed"
    return [line_chart(lines, Frame(title, "k", percent=True, y_range=(0, 1)), PAGE)]


def _histogram(cell: CellResult) -> list[str]:
    rewards = cell.rewards
    if rewards is None or len(rewards.counts) == 1:
        return []
    size = (rewards.high - rewards.low) / len(rewards.counts)
    bars = [(rewards.low + (i + 0.5) * size, [float(many)]) for i, many in enumerate(rewards.counts)]
    return [stacked_bars(["episodes"], bars, Frame("Episodes by reward", "reward"), PAGE)]


def _part_charts(cell: CellResult) -> list[str]:
    charts = []
    for kind, parts in (("tag", cell.by_tag), ("difficulty", cell.by_difficulty)):
        estimates = [
            Estimate(name, part.success, part.success_low, part.success_high)
            for name, part in islice(parts.items(), PARTS_CHARTED)
            if part.success is not None
        ]
        if estimates:
            frame = Frame(f"Success by {kind}", percent=True, y_range=(0, 1))
            charts.append(interval_chart(estimates, frame, PAGE))
    return charts


def _parts(kind: str, parts: dict[str, Part]) -> str:
    headings = [kind, "tasks", "episodes", "errors", "success", "95%", "reward", "±95%"]
    rows = [[name, str(p.tasks), str(p.episodes), str(p.errors), *_means(p)] for name, p in parts.items()]
    return f"<h3>By {kind}</h3>{table(headings, rows, names=1)}"


def _counts(title: str, counts: dict[str, int]) -> str:
    rows = [[name, f"{many:,}"] for name, many in sorted(counts.items(), key=lambda item: -item[1])]
    return f"<h3>{title}</h3>{table(['', 'times'], rows, names=1)}" if rows else ""


def _settings(record: dict[str, Any]) -> str:
    groups = (
        ("Command", " ".join(map(str, record.get("command") or [])) or "from Python"),
        ("Settings and prices", _pretty({key: record.get(key) for key in ("settings", "prices")})),
        ("Cells", _pretty(record["cells"])),
        ("Versions", _pretty(record.get("versions"))),
    )
    return f"<section><h2>Settings</h2>{''.join(folded(title, text) for title, text in groups)}</section>"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
