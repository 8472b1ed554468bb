"""Answers of the page's API as JSON values, as described in `agentgym.viewer`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.evaluate.compare import ComparedRun, compare_read, read_compared
from agentgym.evaluate.results import EpisodeNumbers
from agentgym.viewer.index import EpisodeFile
from agentgym.viewer.query import Query
from agentgym.viewer.rows import EpisodeRow, episode_numbers
from agentgym.viewer.run import Run, Runs
from agentgym.viewer.summary import details, is_live, summary
from agentgym.viewer.token_texts import token_texts

# How long an answer waits for what is being read; then it is of what was read so far.
PATIENCE = 0.4
SEARCH_PATIENCE = 0.3
COMPARE_PATIENCE = 20.0


class BadRequest(Exception):
    """An address asks for what makes no sense; the message says why."""


def list_runs(runs: Runs) -> dict[str, Any]:
    found = runs.look()
    runs.advance_all(PATIENCE)
    return {"runs": sorted(map(summary, found), key=lambda row: row["created"], reverse=True)}


def one_run(runs: Runs, id: str) -> dict[str, Any]:
    run = runs.get(id)
    run.refresh()
    if run.kind == "evaluation":
        run.advance(PATIENCE)
    return details(run)


def metrics(runs: Runs, id: str, given: Mapping[str, str]) -> dict[str, Any]:
    text = given.get("after") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"after is a whole number, not {text!r}")
    records = runs.get(id).metrics.updated()
    return {"records": records[int(text) :], "next": max(int(text), len(records))}


def episodes(runs: Runs, id: str, given: Mapping[str, str]) -> dict[str, Any]:
    try:
        query = Query.of(given)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    run = _advanced(runs, id)
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
    run = _advanced(runs, id)
    return whole_episode(run, *run.episode(key))


def whole_episode(run: Run, file: EpisodeFile, row: EpisodeRow) -> dict[str, Any]:
    """One episode with its row and the texts of its tokens."""
    record = file.record(row)
    return {"episode": record, "row": run.row_json(file, row), "tokens": token_texts(run, record)}


def growth(runs: Runs, id: str) -> dict[str, Any]:
    """The event of a run's growth: how much there is, and whether more may come."""
    run = _advanced(runs, id)
    count = sum(file.episodes for file in run.files.values())
    return {"run": run.id, "episodes": count, "metrics": len(run.metrics.updated()), "live": is_live(run)}


def compare(runs: Runs, given: Mapping[str, str]) -> dict[str, Any]:
    """The output of `agentgym compare --json` for two runs, from their rows where these are evaluations."""
    first, second = (runs.get(given.get(name, "")) for name in ("a", "b"))
    for run in (first, second):
        run.advance(COMPARE_PATIENCE)
        if strays := run.strays():
            raise BadRequest(f"{run.id} cannot be compared: {strays[0]} is not a regular file inside the run")
        if run.kind == "evaluation" and run.indexing < 1:
            raise BadRequest(f"{run.id} is still being read ({run.indexing:.0%}): compare it again in a moment")
    try:
        return compare_read(_compared(first), _compared(second)).to_json()
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:  # broken files
        raise BadRequest(f"cannot be compared: {error}") from error


def _compared(run: Run) -> ComparedRun:
    def read(path: Path) -> list[EpisodeNumbers]:
        file = run.files.get(path.stem)
        if file is None:
            return []
        if file.broken:
            raise ValueError(str(file.problem))
        return [episode_numbers(row) for row in list(file.rows) if not row.superseded]

    return read_compared(run.path, read)


def _advanced(runs: Runs, id: str) -> Run:
    run = runs.get(id)
    run.advance(PATIENCE)
    return run
