"""Queries of the list of episodes: filters, order and text search. Field names are those of the page's addresses."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any

from agentgym.viewer.index import BackgroundThread, EpisodeFile, open_regular, parsed
from agentgym.viewer.rows import EpisodeRow, texts_of

MOST_ROWS = 1000
OUTCOMES = ("success", "failure", "error")
SORTS: dict[str, Callable[[EpisodeRow], Any]] = {
    **{name: attrgetter(name) for name in ("reward", "turns", "tokens", "seconds")},
    "task": attrgetter("task", "sample"),
}
Found = tuple[EpisodeFile, EpisodeRow]
# By the types of the query's fields.
_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bool": lambda text: text not in ("0", "false"),
    **dict.fromkeys(("int", "int | None"), int),
    "float | None": float,
}


@dataclass(frozen=True)
class Query:
    """A filter of the list of episodes. None, and "" for texts, match all."""

    cell: str = ""
    outcome: str = ""
    end: str = ""
    cause: str = ""
    tag: str = ""
    finish: str = ""
    text: str = ""
    task: str = ""
    task_has: str = ""
    sample: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns_min: float | None = None
    turns_max: float | None = None
    tokens_min: float | None = None
    tokens_max: float | None = None
    superseded: bool = False
    sort: str = "stored"
    order: str = "asc"
    offset: int = 0
    limit: int = 200

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """The query that an address asks. Raises ValueError, which lists the valid names or values, for others."""
        known = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in known:
                raise ValueError(f"no parameter {name!r}; there are {', '.join(known)}")
            try:
                values |= {name: _READ[known[name]](text)} if text != "" else {}
            except ValueError:
                raise ValueError(f"{name} is a number, not {text!r}") from None
        for name, words in (("outcome", OUTCOMES), ("sort", ("stored", *SORTS)), ("order", ("asc", "desc"))):
            if name in values and values[name] not in words:
                raise ValueError(f"{name} is one of {', '.join(words)}, not {values[name]!r}")
        query = cls(**values)
        if query.offset < 0 or not 1 <= query.limit <= MOST_ROWS:
            raise ValueError(f"offset is at least 0 and limit from 1 to {MOST_ROWS}")
        return query

    def matches(self, row: EpisodeRow) -> bool:
        return (
            (self.superseded or not row.superseded)
            and self.outcome in ("", row.outcome)
            and self.end in ("", row.end)
            and self.cause in ("", row.cause)
            and (not self.tag or self.tag in row.tags)
            and (not self.finish or self.finish in row.finishes)
            and self.task in ("", row.task)
            and self.task_has.lower() in row.task.lower()
            and self.sample in (None, row.sample)
            and _within(row.reward, self.reward_min, self.reward_max)
            and _within(row.turns, self.turns_min, self.turns_max)
            and _within(row.tokens, self.tokens_min, self.tokens_max)
        )


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def find(files: Iterable[EpisodeFile], query: Query) -> list[Found]:
    """All rows that match but for the text, in the query's order. Rows without the number sorted by come last."""
    found = [
        (file, row) for file in files if query.cell in ("", file.name) for row in list(file.rows) if query.matches(row)
    ]
    down = query.order == "desc"
    if query.sort == "stored":
        return found[::-1] if down else found
    key = SORTS[query.sort]
    known = [item for item in found if key(item[1]) is not None]
    known.sort(key=lambda item: key(item[1]), reverse=down)
    return known + [item for item in found if key(item[1]) is None]


_BATCH = 200
_Key = tuple[str, int]


class TextSearch:
    """A case-insensitive search: starts of lines by file. It continues when the files grow."""

    def __init__(self, text: str):
        self._text = text
        self._found: dict[_Key, set[int]] = defaultdict(set)
        self._looked: dict[_Key, int] = defaultdict(int)
        self._stopped = threading.Event()
        self._thread = BackgroundThread("search")

    def has(self, file: EpisodeFile, start: int) -> bool:
        return start in self._found.get(_key(file), ())

    def share(self, files: Sequence[EpisodeFile]) -> float:
        total = sum(len(file.rows) for file in files)
        looked = sum(min(self._looked.get(_key(file), 0), len(file.rows)) for file in files)
        return looked / total if total else 1.0

    def go_on(self, files: Sequence[EpisodeFile], seconds: float) -> None:
        """Search what is left, in a thread; returns when that is done, or after this long."""
        if self.share(files) < 1.0 and not self._stopped.is_set():
            self._thread.run(partial(self._run, list(files)), seconds)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, files: list[EpisodeFile]) -> None:
        is_in = _finder(self._text)
        for file in files:
            key, rows = _key(file), file.rows
            try:
                with open_regular(file.path) as stored:
                    while not self._stopped.is_set() and (batch := rows[self._looked[key] :][:_BATCH]):
                        for row in batch:
                            stored.seek(row.start)
                            if is_in(stored.read(row.size)):
                                self._found[key].add(row.start)
                        self._looked[key] += len(batch)
            except OSError:
                self._looked[key] = len(rows)  # the file is gone; its index says so


def _key(file: EpisodeFile) -> _Key:
    return str(file.path), file.generation


def _finder(sought: str) -> Callable[[bytes], bool]:
    """A test for lines that contain a text. Its JSON form rules most lines out without parsing and lower-casing, which are slow."""
    text = sought.lower()
    raw = json.dumps(text, ensure_ascii=False)[1:-1]
    plain = max(re.findall(r"[\x20-\x7e]*", raw), key=len).encode()
    caseless = text.upper() == text
    raw_bytes = raw.encode("utf-8", "surrogatepass")

    def is_in(line: bytes) -> bool:
        if plain not in line.lower():
            return False
        if not text.isascii() and b"\\u" not in line:  # with an escape in it, the line must be parsed
            there = raw_bytes in line if caseless else raw in line.decode("utf-8", "replace").lower()
            if not there:
                return False
        try:
            return any(text in each.lower() for each in texts_of(parsed(line)))
        except (ValueError, KeyError, TypeError):
            return False

    return is_in
