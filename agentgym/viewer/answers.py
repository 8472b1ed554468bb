"""Answers of the page's API as JSON values, as described in `agentgym.viewer`."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from agentgym.evaluate.compare import compare_all
from agentgym.evaluate.results import EpisodeNumbers
from agentgym.storage.jsonl import finite
from agentgym.storage.locks import lock_held
from agentgym.viewer.index import EpisodeFile, is_inside
from agentgym.viewer.query import Query
from agentgym.viewer.rows import EpisodeRow, episode_numbers, means_of, result_of, summaries_of
from agentgym.viewer.run import STEP, Run, Runs, agent_name, newest, object_in, text_in

# How long an answer waits for what is being read; then it is of what was read so far.
PATIENCE = 0.4
SEARCH_PATIENCE = 0.3
COMPARE_PATIENCE = 20.0
# A training step, or an evaluation between steps, may take minutes in which nothing is written.
WRITTEN_SECONDS = 120.0
_ENV_ID = re.compile(r"^env:\s*\n(?:[ \t]+.*\n)*?[ \t]+id:[ \t]*(.+?)[ \t]*$", re.MULTILINE)


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
    file = runs.get(id).metrics
    file.updated()
    rewritten, records = file.generation, file.records  # in this order: a page then reads again what it had too early
    return {"records": records[int(text) :], "next": len(records), "rewritten": rewritten}


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
    metrics = {"metrics": len(run.metrics.updated()), "rewritten": run.metrics.generation}
    return {"run": run.id, "episodes": count, **metrics, "live": is_live(run)}


def compare(runs: Runs, given: Mapping[str, str]) -> dict[str, Any]:
    """The output of `agentgym compare --json` for two runs, from their rows where these are evaluations."""
    first, second = (runs.get(given.get(name, "")) for name in ("a", "b"))
    for run in (first, second):
        run.advance(COMPARE_PATIENCE)
        if strays := run.strays():
            raise BadRequest(f"{run.id} cannot be compared: {strays[0]} is not a regular file inside the run")
        if run.kind == "evaluation" and run.indexing < 1:
            raise BadRequest(f"{run.id} is still being read ({run.indexing:.0%}): compare it again in a moment")

    def read(path: Path) -> list[EpisodeNumbers]:
        file = (first if path.is_relative_to(first.path) else second).files.get(path.stem)
        if file is not None and file.broken:
            raise ValueError(str(file.problem))
        return [episode_numbers(row) for row in list(file.rows) if not row.superseded] if file else []

    try:
        return compare_all([first.path, second.path], read)[0].to_json()
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:  # broken files
        raise BadRequest(f"cannot be compared: {error}") from error


def _advanced(runs: Runs, id: str) -> Run:
    run = runs.get(id)
    run.advance(PATIENCE)
    return run


def summary(run: Run, live: bool | None = None) -> dict[str, Any]:
    """A run in the list. `live`: None looks whether a process writes it."""
    training = run.kind == "training"
    problems = run.problems
    return {
        "id": run.id,
        "name": run.path.name,
        "path": str(run.path),
        "kind": run.kind,
        "indexing": 1.0 if training else run.indexing,  # numbers of training are of its metrics, which are read whole
        **(_of_training(run, run.metrics.updated()) if training else _of_evaluation(run)),
        "updated": _updated(run),
        "live": is_live(run) if live is None else live,
        "problem": problems[0] if problems else None,
    }


def is_live(run: Run) -> bool:
    """True while a process writes it: an evaluation's lock is held; a training run has recent writes and no result."""
    if run.kind == "evaluation":
        return lock_held(run.path / "lock")
    return not (run.path / "result.json").exists() and time.time() - _updated(run) < WRITTEN_SECONDS


def details(run: Run, live: bool | None = None) -> dict[str, Any]:
    if run.kind == "evaluation":
        settings = {name: run.manifest.get(name) for name in ("command", "settings", "prices", "cells")}
        config = json.dumps(settings, indent=2, ensure_ascii=False) if run.manifest else None
        particulars = {
            "cells": [_cell(run, name, stem) for name, stem in _cells(run)],
            "steps": [],
            "results": object_in(run.path, "results.json"),
            "config": config,
        }
        versions = run.manifest.get("versions")
    else:
        steps = [(stem, found) for stem in run.files if (found := STEP.fullmatch(stem))]
        particulars = {
            "cells": [],
            "steps": [{"cell": stem, "step": int(found[2]), "kind": found[1]} for stem, found in steps],
            "results": object_in(run.path, "result.json"),
            "config": text_in(run.path, "config.yaml") or None,
        }
        versions = object_in(run.path, "versions.json")
    versions = versions if isinstance(versions, dict) else None
    return {**summary(run, live), **particulars, "versions": versions, "problems": run.problems}


def with_results(shown: dict[str, Any]) -> dict[str, Any]:
    """The details of an evaluation with the numbers of `results.json` in place of those of the episodes that were read."""
    results = {cell["name"]: cell for cell in shown["results"]["cells"]}
    cells = [
        {
            **cell,
            **{name: result[name] for name in ("planned", "errors", "reward", "success", "turns")},
            "episodes": result["episodes"] + result["errors"],
            "low": result["success_low"],
            "high": result["success_high"],
            "result": finite(result),
        }
        for cell in shown["cells"]
        if (result := results.get(cell["name"]))
    ]
    sums = {name: sum(cell[name] for cell in cells) for name in ("episodes", "errors")}
    return {**shown, **sums, "cells": cells, "indexing": 1.0, "headline": _headline(cells)}


def _of_evaluation(run: Run) -> dict[str, Any]:
    created, files = run.manifest.get("created"), run.files
    return {
        "created": created if isinstance(created, int | float) else _updated(run),
        "episodes": sum(file.episodes for file in files.values()),
        "errors": sum(file.failed for file in files.values()),
        "headline": None if run.indexing < 1.0 else _headline([_means(run, *file) for file in files.items()]),
        "envs": _unique(str(e.get("id", "")) for c in run.cells if isinstance(e := c.get("env"), dict)),
        "agents": _unique(map(agent_name, run.cells)),
    }


def _of_training(run: Run, records: list[dict[str, Any]]) -> dict[str, Any]:
    played = [r for r in records if r.get("kind") in ("eval", "train")]
    headline = None
    if last := next((r for r in reversed(played) if r.get("kind") == "eval"), None):
        numbers = {"value": last.get("success"), "low": last.get("low"), "high": last.get("high")}
        headline = {"label": f"success at step {last.get('step')}", **finite(numbers)}
    env = _ENV_ID.search(text_in(run.path, "config.yaml"))
    return {
        "created": newest([run.path / "config.yaml"]),
        "episodes": sum(_count(r, "episodes") + _count(r, "failed") for r in played),
        "errors": sum(_count(r, "failed") for r in played),
        "headline": headline,
        "envs": [env[1].strip("'\"")] if env else [],
        "agents": ["policy"],
    }


def _count(record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    return int(value) if isinstance(value, int) else 0


def _updated(run: Run) -> float:
    own = ("run.json", "results.json", "config.yaml", "metrics.jsonl")
    return newest([*(run.path / name for name in own), *(file.path for file in run.files.values())])


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name))


def _headline(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The success of one cell with its interval, or the mean over several cells."""
    cells = [cell for cell in cells if cell["success"] is not None]
    if not cells:
        return None
    if len(cells) == 1:
        return {"label": "success", "value": cells[0]["success"], "low": cells[0]["low"], "high": cells[0]["high"]}
    mean = sum(cell["success"] for cell in cells) / len(cells)
    return {"label": f"success, mean of {len(cells)} cells", "value": mean, "low": None, "high": None}


def _means(run: Run, stem: str, file: EpisodeFile | None) -> dict[str, float | None]:
    """The means of a file's episodes, updated when it has grown; empty during the first read."""
    if file is None or file.share < 1.0:
        return means_of([])
    state, known = (file.generation, len(file.rows)), run.made.get(("means", stem))
    if known is None or known[0] != state:
        known = run.made["means", stem] = (state, means_of(list(file.rows)))
    return known[1]


def _cells(run: Run) -> list[tuple[str, str]]:
    """Names of the cells and of their files: those of `run.json`, then files that it does not name."""
    planned = [(str(cell.get("name", "")), Path(str(cell.get("file", ""))).stem) for cell in run.cells]
    stems = {stem for _, stem in planned}
    return planned + [(file.name, stem) for stem, file in run.files.items() if stem not in stems]


def _cell(run: Run, name: str, stem: str) -> dict[str, Any]:
    cell, file = run.cell(name), run.files.get(stem)
    env = cell.get("env")
    tasks, k = cell.get("tasks", cell.get("n")), cell.get("k")
    known = {
        "name": name,
        "env": str(env.get("id", "")) if isinstance(env, dict) else "",
        "agent": agent_name(cell),
        "split": str(cell.get("split", "")),
        "planned": tasks * k if isinstance(tasks, int) and isinstance(k, int) else None,
        "episodes": file.episodes if file else 0,
        "errors": file.failed if file else 0,
    }
    samples = k if isinstance(k, int) and k > 0 else 1
    return {**known, **_means(run, stem, file), "result": _result(run, stem, file, known, samples)}


def _result(run: Run, stem: str, file: EpisodeFile | None, cell: dict[str, Any], samples: int) -> dict[str, Any] | None:
    """The entry of `results.json` for a cell as of now; None while its file is being read, or without episodes.

    Of a live run with thousands of episodes it may be of up to 2% fewer than there are: to make it takes up to a second.
    """
    if file is None or not file.rows or file.share < 1.0:
        return None
    state, known = (file.generation, len(file.rows)), run.made.get(("result", stem))
    generation, rows = known[0] if known else (-1, 0)
    near = generation == file.generation and len(file.rows) - rows <= rows // 50
    if known is None or (known[0] != state and not (near and is_live(run))):
        names = {name: cell[name] for name in ("env", "agent", "split", "planned")}
        result = {**result_of(list(file.rows), samples=samples, **names).to_json(), "name": cell["name"]}
        known = run.made["result", stem] = (state, finite(result))
    return known[1]


_tokenizer_lock = threading.Lock()


def token_texts(run: Run, episode: Mapping[str, Any]) -> dict[str, str] | None:
    """The text of each token id of an episode; None without ids, a saved tokenizer, or the package `tokenizers`."""
    ids = sorted(set(_ids(episode)))
    decode = token_decoder(run.path) if ids and run.kind == "training" else None
    if decode is None:
        return None
    return {str(id): text for id in ids if (text := decode(id)) is not None}


def token_decoder(run: Path) -> Callable[[int], str | None] | None:
    """The function from a token id to its text; None without a saved tokenizer or the package `tokenizers`.

    An id that is only a part of a character is written by its bytes: `<E2 82>`. An id outside the vocabulary gives None.

    Args:
        run: the folder of a training run, resolved: the tokenizer is that of its latest checkpoint, or of its first model.
    """
    latest = text_in(run, "checkpoints/latest").strip()
    folders = [run / "checkpoints" / latest] if latest and "\0" not in latest else []
    for path in (folder / "tokenizer.json" for folder in (*folders, run / "model")):
        if is_inside(path, run) and path.is_file():
            with _tokenizer_lock:
                tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
            return None if tokenizer is None else partial(_text, tokenizer)
    return None


def _ids(episode: Mapping[str, Any]) -> Iterator[int]:
    for call in [*episode["turns"], *summaries_of(episode)]:
        tokens = call.get("tokens") if isinstance(call, dict) else None
        if isinstance(tokens, dict):
            for name in ("new_prompt_ids", "completion_ids"):
                yield from (id for id in tokens.get(name) or () if isinstance(id, int))


@lru_cache(maxsize=4)
def _tokenizer(path: Path, written: int) -> Any:
    """The tokenizer in a file; `written` makes a new file a new one. None if it cannot be made."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception:  # it is not installed, or refuses the file: it raises nothing narrower
        return None


def _text(tokenizer: Any, id: int) -> str | None:
    piece = tokenizer.id_to_token(id) if 0 <= id < 2**32 else None
    if piece is None:
        return None
    text = tokenizer.decode([id], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    letters = _byte_letters()
    if piece and all(letter in letters for letter in piece):
        return "<" + " ".join(f"{letters[letter]:02X}" for letter in piece) + ">"
    return text


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes: itself where it can be printed, else one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
