"""The folder of an evaluation: its plan and every finished episode. A second start resumes it.

    run.json             the plan: cells and settings
    episodes/NAME.jsonl  the episodes of one cell, one JSON object a line, in the order in which they ended
    gateway/AGENT/       the record of an agent that plays by itself
    lock                 held (`flock`) by the process that writes
    results.json, report.html, preds.json (of episodes that end in a patch; see `predictions`)

A process may be killed at any moment: at most the line that it was writing is cut, and the next start removes it. The file
of a cell only grows. The effective line of an episode (a task and a sample) is its last one that did not fail, else its last.
"""

import contextlib
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from agentgym import __version__
from agentgym.core import registration
from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.agents import ASKING
from agentgym.evaluate.budget import Spent
from agentgym.evaluate.plan import Cell
from agentgym.storage.files import write_json
from agentgym.storage.jsonl import line_of_any, mend
from agentgym.storage.locks import hold

FORMAT = 1
Key = tuple[str, int]  # of an episode in its cell: the task's id and the sample
T = TypeVar("T")
_BROKEN = (ValueError, KeyError, TypeError, AttributeError)  # what a line raises that is no episode
_MAY_DIFFER = ASKING | {"base_url"}


class StoreError(OSError):
    """An episode could not be stored: a full disk. The message says which file, and what is safe."""


@dataclass
class Stored:
    """The content of a cell's file: episodes with a line that did not fail, those with only others, what all lines spent."""

    done: set[Key] = field(default_factory=set)
    failed: set[Key] = field(default_factory=set)
    spent: Spent = field(default_factory=Spent)


class Store:
    """A run folder that this process writes, as `open_store` makes it. A context manager."""

    def __init__(self, path: Path, lock: int, record: dict[str, Any]):
        self.path = path
        self.record = record
        self._lock = lock
        self._files: dict[str, tuple[int, int]] = {}  # by the cell's name: descriptor, and bytes that are whole lines

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        os.close(self._lock)

    def file_of(self, cell: Cell) -> Path:
        return self.path / next(c["file"] for c in self.record["cells"] if c["name"] == cell.name)

    def append(self, cell: Cell, trajectory: Trajectory) -> None:
        """Store an episode that has ended. After a StoreError the file is as it was before."""
        if cell.name not in self._files:
            path = self.file_of(cell)
            mend(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._files[cell.name] = (descriptor, os.fstat(descriptor).st_size)
        descriptor, size = self._files[cell.name]
        line = line_of_any(trajectory.to_json()).encode()
        try:
            written = os.write(descriptor, line)
            while written < len(line):  # a disk that fills takes a part, and refuses the rest
                written += os.write(descriptor, line[written:])
        except OSError as error:
            os.ftruncate(descriptor, size)
            safe = "earlier episodes are safe: free disk space and run the same command again"
            raise StoreError(f"{self.file_of(cell)}: cannot store an episode: {error.strerror}; {safe}") from error
        self._files[cell.name] = (descriptor, size + len(line))


def open_store(
    path: Path,
    plan: Sequence[dict[str, Any]],
    *,
    settings: Mapping[str, Any],
    prices: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
) -> Store:
    """Make a run folder, or take up the one that is there: its cells, and those of `plan` that it does not have yet.

    Args:
        plan: of each cell `Cell.to_json`, how many `tasks` it has, and what is known of it here: `first_task`, a digest of its
            first task, which differs for other data, and `served`, what the servers of its environment tell; see
            `agentgym.service.client.lookup.told_of`.
        settings: limits, budget, retries, concurrency, as JSON; they may differ from those of the last start.

    Raises:
        ValueError: another process writes it, it holds something else, or a cell of the plan differs from the stored one in
            what is measured.
        OSError: it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(
            p.name for p in path.iterdir() if p.name not in ("lock", "gateway") and p.suffix not in (".tmp", ".log")
        )
        if others and "run.json" not in others:
            raise ValueError(f"{path} holds other things ({', '.join(others[:3])}): choose another folder")
        lock = hold(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror}): choose another folder") from error
    try:
        present = read_run(path) if (path / "run.json").exists() else None
        cells = _merged(path, present["cells"] if present else [], plan)
        record = {
            "kind": "evaluation",
            "format": FORMAT,
            "name": path.resolve().name,
            "created": present["created"] if present else time.time(),
            "command": list(command),
            "versions": {"agentgym": __version__, "python": platform.python_version()},
            "folders": sorted({*(present or {}).get("folders", []), *_folders(plan)}),
            "cells": cells,
            "settings": settings,
            "prices": prices,
        }
        # In this order: killed in between, it leaves a folder that the next start takes up.
        write_json(path / "run.json", record)
        (path / "episodes").mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return Store(path, lock, record)


def read_run(path: Path) -> dict[str, Any]:
    """`run.json` of a run folder. Raises ValueError if it holds no evaluation, or one of another format."""
    file = path / "run.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        kind, form = record["kind"], record["format"]
        if (kind, form) == ("evaluation", FORMAT):
            cells_of(path, record)
    except FileNotFoundError:
        raise ValueError(f"{path} holds no evaluation: there is no {file.name}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} does not describe an evaluation: {error!r}") from error
    if (kind, form) != ("evaluation", FORMAT):
        raise ValueError(f"{file} is a run of kind {kind!r}, format {form}; this program reads 'evaluation', {FORMAT}")
    return record


def cells_of(path: Path, record: Mapping[str, Any]) -> list[tuple[Cell, Path]]:
    return [(Cell.from_json(cell), path / cell["file"]) for cell in record["cells"]]


def scan(path: Path) -> Stored:
    """Read a file of episodes once from end to end; only keys and sums stay in memory. Raises as `effective`."""
    found = Stored()
    for _, episode in _read(path, _episode):
        (found.failed if episode.failed else found.done).add((episode.task_id, episode.sample))
        found.spent += Spent.of(episode)
    found.failed -= found.done
    return found


def effective(path: Path) -> Iterator[Trajectory]:
    """The effective episodes of a file, one at a time, in the order of their lines; none where there is no file.

    Raises ValueError for a broken line before the last.
    """
    # The file of a cell has one environment, one of a training run may have more, and their tasks the same ids.
    chosen: dict[tuple[str, str, int], tuple[int, bool]] = {}
    for offset, (key, failed) in _read(path, _head):
        if key not in chosen or chosen[key][1] or not failed:
            chosen[key] = (offset, failed)
    if not chosen:
        return
    with path.open("rb") as lines:
        for offset, _ in sorted(chosen.values()):
            lines.seek(offset)
            line = lines.readline()
            try:
                yield _episode(line)
            except _BROKEN as error:
                lines.seek(0)
                raise _broken(path, lines.read(offset).count(b"\n") + 1, error) from error


def read_cell(path: Path) -> dict[Key, Trajectory]:
    """The effective episodes of a file by their keys, all in memory. Raises as `effective`."""
    return {(trajectory.task_id, trajectory.sample): trajectory for trajectory in effective(path)}


def _episode(line: bytes) -> Trajectory:
    return Trajectory.from_json(json.loads(line))


def _head(line: bytes) -> tuple[tuple[str, str, int], bool]:
    """A line's episode by its key, and whether it failed. Its turns, most of the line, are not parsed."""
    head, found, _ = line.partition(b', "turns": [')
    try:
        record = json.loads(head + b"}" if found and line.endswith(b"}\n") else line)
    except ValueError:  # such words stand in an object before
        record = json.loads(line)
    return (record["env"], record["task_id"], record["sample"]), record["end"] == "error"


def _broken(path: Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{path}:{number}: not an episode ({error!r:.100}): remove this line to go on without it")


def _read(path: Path, read: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """Each line's offset and what is read of it; a last line that is cut is left out. No file: nothing."""
    offset = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found = read(line)
            except _BROKEN as error:
                if not line.endswith(b"\n"):
                    return
                raise _broken(path, number, error) from error
            yield offset, found
            offset += len(line)


def _folders(plan: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The folders of environment modules that were named by value: another process may not find them."""
    registered = {known.entry_point for known in registration.registry.values()}
    for entry_point in {record["env"]["entry_point"] for record in plan} - registered:
        module, _, name = entry_point.partition(":")
        file = getattr(sys.modules.get(module), "__file__", None)
        if name and file:
            parts = module.count(".") + (Path(file).name == "__init__.py")
            yield str(Path(file).resolve().parents[parts])


def _merged(path: Path, present: Sequence[dict[str, Any]], plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of all cells: those that are there, grown where the plan asks for more, and the plan's new ones."""
    cells = {record["name"]: record for record in present}
    files = {record["file"].casefold() for record in present}
    for name, times in Counter(record["name"] for record in plan).items():
        if times > 1:
            raise ValueError(f"two cells are named {name!r}: give agents and environments unique names")
    for record in json.loads(json.dumps(plan)):  # as those present, which went through JSON: it makes lists of tuples
        old = cells.get(record["name"])
        if served := record.pop("served", None) or (old or {}).get("served"):
            record["served"] = served
        if old is None:
            # Two names may make one file name, on file systems too that do not tell capitals from small letters.
            stem = re.sub(r"[^\w.@+-]+", "-", record["name"]).strip("-.").encode()[:200].decode(errors="ignore")
            names = (f"episodes/{stem}{f'-{number}' if number > 1 else ''}.jsonl" for number in count(1))
            record["file"] = next(name for name in names if name.casefold() not in files)
            files.add(record["file"].casefold())
        elif differences := _differences(old, record):
            found = f"{record['name']} with other settings: {'; '.join(differences)}"
            raise ValueError(f"{path} holds {found}; use the same settings, or choose another folder")
        else:
            record["n"] = None if None in (old["n"], record["n"]) else max(old["n"], record["n"])
            record |= {
                "k": max(old["k"], record["k"]),
                "tasks": max(old["tasks"], record["tasks"]),
                "file": old["file"],
            }
        cells[record["name"]] = record
    return list(cells.values())


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences in what is measured: "seed was 0, is now 1"."""
    told = sorted((old.get("served") or {}).keys() & (new.get("served") or {}).keys())
    was, now = _measured(old, told), _measured(new, told)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    marks = [record.get("first_task") for record in (old, new)]
    if not names and all(marks) and marks[0] != marks[1]:
        return ["the data has changed: its first task is another one"]
    return [f"{name} was {_short(was.get(name))}, is now {_short(now.get(name))}" for name in names]


def _measured(record: Mapping[str, Any], told: Sequence[str]) -> dict[str, Any]:
    """The settings that define the measurement of a cell, by readable names. `told`: the fields of the servers' answers that count."""
    found = {name: record.get(name) for name in ("split", "seed", "max_turns", "ids", "shuffle")}
    found["env entry_point"] = record["env"]["entry_point"]
    found |= {f"env kwargs {name}": value for name, value in record["env"].get("kwargs", {}).items()}
    for each in told:  # the source of a split may be a folder on whichever machine serves it
        found |= {f"the server's {each} {k}": v for k, v in record["served"][each].items() if k != "source"}
    found["agent kind"] = record["agent"]["kind"]
    # Addresses and patience do not change a model's answers: a server may come back on another port.
    return found | {name: value for name, value in record["agent"]["settings"].items() if name not in _MAY_DIFFER}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else re.sub(r"\s+", " ", text)[:57] + "..."
