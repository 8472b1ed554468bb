"""The answers of the page's API as JSON values; `agentgym.viewer` describes them. Each may take a moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.evaluate.compare import compare_read
from agentgym.evaluate.compared_runs import ComparedRun, TaskMeans, read_compared
from agentgym.viewer.numbers import task_means
from agentgym.viewer.query import Query
from agentgym.viewer.run import Run
from agentgym.viewer.runs import Runs
from agentgym.viewer.summary import details, is_live, summary
from agentgym.viewer.token_texts import token_texts

# How long an answer waits for what is being read; then it is of what was read so far.
PATIENCE = 0.4
SEARCH_PATIENCE = 0.3
COMPARE_PATIENCE = 20.0


def list_runs(runs: Runs) -> dict[str, Any]:
    """All runs, the newest first. Those that were never read are read behind the scenes."""
    found = runs.look()
    runs.advance_all(PATIENCE)
    rows = [summary(run) for run in found]
    return {"runs": sorted(rows, key=lambda row: row["created"], reverse=True)}


def one_run(runs: Runs, id: str) -> dict[str, Any]:
    """A run with its details."""
    run = runs.get(id)
    run.refresh()
    if run.kind == "evaluation":
        run.advance(PATIENCE)
    return details(run)


def metrics(runs: Runs, id: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Records of `metrics.jsonl` from a number on."""
    after = _whole(given, "after")
    records = runs.get(id).metrics.update()
    return {"records": records[after:], "next": max(after, len(records))}


def episodes(runs: Runs, id: str, given: Mapping[str, str]) -> dict[str, Any]:
    """A part of the rows that a query finds."""
    try:
        query = Query.of(given)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    run = runs.get(id)
    run.advance(PATIENCE)
    indexing = run.indexing  # before the rows are looked at: 1 promises that they are all there
    found, searched = run.listed(query, SEARCH_PATIENCE)
    end = query.offset + query.limit
    return {
        "total": sum(file.episodes for file in run.files.values()),
        "matching": len(found),
        "rows": [run.row_json(file, row) for file, row in found[query.offset : end]],
        "next": end if end < len(found) else None,
        "indexing": indexing,
        "searching": searched,
    }


def episode(runs: Runs, id: str, key: str) -> dict[str, Any]:
    """One episode with its row and the texts of its tokens."""
    run = runs.get(id)
    run.advance(PATIENCE)
    file, row = run.episode(key)
    record = file.record(row)
    return {"episode": record, "row": run.row_json(file, row), "tokens": token_texts(run, record)}


def growth(runs: Runs, id: str) -> dict[str, Any]:
    """The event of a run's growth: how much there is, and whether more may come."""
    run = runs.get(id)
    run.advance(PATIENCE)
    count = sum(file.episodes for file in run.files.values())
    return {"run": run.id, "episodes": count, "metrics": len(run.metrics.update()), "live": is_live(run)}


def compare(runs: Runs, given: Mapping[str, str]) -> dict[str, Any]:
    """The output of `agentgym compare --json` for two runs, from their rows where these are evaluations."""
    first, second = (runs.get(given.get(name, "")) for name in ("a", "b"))
    for run in (first, second):
        run.advance(COMPARE_PATIENCE)
        if strays := run.strays():
            raise BadRequest(f"{run.id} is not compared: {strays[0]} is no file of its own")
        if run.kind == "evaluation" and run.indexing < 1:
            raise BadRequest(f"{run.id} is still being read ({run.indexing:.0%}): compare it again in a moment")
    try:
        return compare_read(_compared(first), _compared(second)).to_json()
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:  # whatever broken files hold
        raise BadRequest(f"cannot be compared: {error}") from error


def _compared(run: Run) -> ComparedRun:
    def tasks_of(path: Path) -> dict[str, TaskMeans]:
        file = run.files.get(path.stem)
        if file is None:
            return {}
        if file.broken:
            raise ValueError(str(file.problem))
        return task_means(list(file.rows))

    return read_compared(run.path, tasks_of)


class BadRequest(Exception):
    """An address asks for what makes no sense; the message says why."""


def _whole(given: Mapping[str, str], name: str) -> int:
    text = given.get(name) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{name} is a whole number, not {text!r}")
    return int(text)
