"""Questions about rows: which, in which order, from where on. The names are those of the page's addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentgym.viewer.index import EpisodeFile
from agentgym.viewer.rows import Row

MOST_ROWS = 1000
OUTCOMES = ("success", "failure", "error")
SORTS: dict[str, Callable[[Row], Any]] = {
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.tokens,
    "seconds": lambda row: row.seconds,
    "task": lambda row: (row.task, row.sample),
}
Found = tuple[EpisodeFile, Row]


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
        """The query that an address asks. Empty values are left out.

        Raises:
            ValueError: a name or a value that is none; names it, and what there is.
        """
        known = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in known:
                raise ValueError(f"no parameter {name!r}; there are {', '.join(known)}")
            if text != "":
                values[name] = _value(name, known[name], text)
        for name, words in (("outcome", OUTCOMES), ("sort", ("stored", *SORTS)), ("order", ("asc", "desc"))):
            if name in values and values[name] not in words:
                raise ValueError(f"{name} is one of {', '.join(words)}, not {values[name]!r}")
        query = cls(**values)
        if query.offset < 0 or not 1 <= query.limit <= MOST_ROWS:
            raise ValueError(f"offset is at least 0 and limit from 1 to {MOST_ROWS}")
        return query

    def matches(self, row: Row) -> bool:
        """Whether a row is wanted; `cell` and `text` are not its business."""
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


def _value(name: str, kind: str, text: str) -> Any:
    try:
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except ValueError:
        raise ValueError(f"{name} is a number, not {text!r}") from None
    return text not in ("0", "false") if kind == "bool" else text


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
