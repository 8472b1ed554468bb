"""Answers of the page's API as JSON values, as described in `agentgym.viewer`."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from agentgym.evaluate.compare import ComparedRun, compare_read, read_compared
from agentgym.evaluate.results import EpisodeNumbers
from agentgym.viewer.index import EpisodeFile
from agentgym.viewer.query import Query
from agentgym.viewer.rows import EpisodeRow, episode_numbers
from agentgym.viewer.run import Run, Runs, is_inside, text_in
from agentgym.viewer.summary import details, is_live, summary

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
    for turn in episode["turns"]:
        tokens = turn.get("tokens") if isinstance(turn, dict) else None
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
