"""Tasks: a `Task` is one problem of an environment, a `TaskSet` an ordered set of tasks."""

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, overload

from agentgym.core.messages import Message


@dataclass(frozen=True)
class Task:
    """One problem, as plain JSON values. Immutable: an environment reads it and never writes to it.

    Attributes:
        id: unique within its task set.
        messages: opening messages of a textual problem; empty if the environment draws its own opening.
        answer: for the reward: a gold answer, tests, a target state.
        metadata: anything else: split, difficulty, tags, source.
    """

    id: str
    messages: tuple[Message, ...] = ()
    answer: Any = None
    seed: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The task as a JSON object, without empty fields."""
        record = {
            "id": self.id,
            "messages": list(self.messages) or None,
            "answer": self.answer,
            "seed": self.seed,
            "metadata": dict(self.metadata) or None,
        }
        return {name: value for name, value in record.items() if value is not None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Task":
        """Raises ValueError for a missing `id` or an unknown field."""
        unknown = set(record) - {"id", "messages", "answer", "seed", "metadata"}
        if unknown or "id" not in record:
            wrong = f"unknown field {min(unknown)!r}" if unknown else "no field 'id'"
            raise ValueError(f"a task has id, messages, answer, seed, metadata: {wrong} in {dict(record)!r:.200}")
        filled = {"messages": tuple(record.get("messages") or ()), "metadata": record.get("metadata") or {}}
        return cls(**{**record, "id": str(record["id"]), **filled})


Parse = Callable[[dict[str, Any], int], Task]  # of a record and its position


class TaskSet(Sequence[Task]):
    """An ordered set of tasks. Generated sets (a function from a position, with `size`) make each task on access."""

    def __init__(
        self,
        tasks: Iterable[Task] | Callable[[int], Task],
        *,
        name: str = "tasks",
        source: str = "",
        size: int | None = None,
        order: Sequence[int] | None = None,
    ):
        if callable(tasks):
            if size is None:
                raise ValueError(f"task set {name!r}: a generated set needs size=")
            self._make: Callable[[int], Task] = tasks
            total = size
        else:
            items, of_id = list(tasks), dict[str, Task]()
            for item in items:
                if not isinstance(item, Task):
                    raise TypeError(f"task set {name!r}: not a Task, but a {type(item).__name__}: {item!r:.100}")
                if of_id.setdefault(item.id, item) != item:
                    raise ValueError(f"task set {name!r}: two different tasks have the id {item.id!r}")
            self._make = items.__getitem__
            total = len(items)
        self._order: Sequence[int] = range(total) if order is None else order
        self.name = name
        self.source = source

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskSet": ...
    def __getitem__(self, index: int | slice) -> "Task | TaskSet":
        if isinstance(index, slice):
            return self._reordered(self._order[index])
        return self._make(self._order[index])

    def __iter__(self) -> Iterator[Task]:
        return (self._make(i) for i in self._order)

    def __repr__(self) -> str:
        return f"TaskSet({self.name!r}, {len(self)} tasks{', ' + self.source if self.source else ''})"

    def _reordered(self, order: Sequence[int]) -> "TaskSet":
        return TaskSet(self._make, name=self.name, source=self.source, size=len(order), order=order)

    def shuffled(self, seed: int) -> "TaskSet":
        order = list(self._order)
        random.Random(seed).shuffle(order)
        return self._reordered(order)

    def take(self, n: int) -> "TaskSet":
        return self._reordered(self._order[:n])

    @classmethod
    def generate(cls, make: Callable[[int], Task], seeds: Sequence[int], *, name: str) -> "TaskSet":
        return cls(make, name=name, source="generated", size=len(seeds), order=seeds)

    @classmethod
    def from_jsonl(cls, path: str | Path, *, parse: Parse | None = None, name: str | None = None) -> "TaskSet":
        """Tasks from a JSON Lines file, which may be gzipped (`.gz`): a task object a line, or any object with `parse(record, line_index)`.

        Raises ValueError with file and line if one is not a task.
        """
        path = Path(path)
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            rows = ((f"{path}:{number + 1}", number, line) for number, line in enumerate(lines) if line.strip())
            return cls._parsed(path, rows, parse, name)

    @classmethod
    def from_parquet(cls, path: str | Path, *, parse: Parse | None = None, name: str | None = None) -> "TaskSet":
        """Tasks from the rows of a Parquet file; like `from_jsonl`. Needs `pyarrow`."""
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError("reading Parquet needs pyarrow: pip install pyarrow") from error
        path = Path(path)
        records = parquet.read_table(path).to_pylist()
        rows = ((f"{path}: row {number}", number, row) for number, row in enumerate(records))
        return cls._parsed(path, rows, parse, name)

    @classmethod
    def _parsed(cls, path: Path, rows: Iterable[tuple[str, int, Any]], parse: Parse | None, name: str | None) -> Self:
        tasks = []
        for place, number, row in rows:
            try:
                record = json.loads(row) if isinstance(row, str) else row
                if parse is None and record is row:  # a column that is null here
                    record = {name: value for name, value in row.items() if value is not None}
                tasks.append(parse(record, number) if parse else Task.from_json(record))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{place}: not a task: {error!r}") from error
        return cls(tasks, name=name or path.stem, source=str(path))

    @classmethod
    def load(cls, env_id: str, split: str = "train", **settings: Any) -> "TaskSet":
        """The task set of a registered environment: `TaskSet.load("wordle", split="test", words="data")`.

        Settings are the environment's own, as `agentgym.make` takes them. Raises UnknownEnvError, TypeError or ValueError.
        """
        from agentgym.core.registration import spec

        return spec(env_id).tasks(split, **settings)
