"""Files that grow: an index of a file of episodes, and the records of `metrics.jsonl`.

The index has a row and the byte position of each line. Each look reads only what was appended. A last line without a line end
is left for later, since it may still be written. A rewritten file (`agentgym rescore`) is read from its start.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from agentgym.storage.jsonl import finite
from agentgym.viewer.rows import Row, row_of

# Of the bytes before the place up to which a file was read: they change if it was written anew.
MARK_BYTES = 64
BATCH_LINES = 64
# A line that is longer is not an episode but a mistake, and would fill the memory.
MOST_LINE_BYTES = 256 * 2**20


class NotServed(Exception):
    """There is no such thing to show. The message says what is wrong, for the page."""


@dataclass
class EpisodeFile:
    """The rows of one file. `update` may run in one thread while others read `rows`, which only grows.

    Attributes:
        name: its cell, or the file's name without its end in a training run.
        hides_failed: whether a failed line is superseded by another of its task and sample.
        broken: number of lines that are not episodes.
        problem: the first of them, or why the file cannot be read.
        superseded, failed: how many rows are superseded; how many of the others failed.
        size, read_to: bytes of the file, and how far it was read.
        generation: grows when the file was found to be written anew.
    """

    path: Path
    name: str
    hides_failed: bool = True
    rows: list[Row] = field(default_factory=list)
    broken: int = 0
    problem: str | None = None
    superseded: int = 0
    failed: int = 0
    size: int = 0
    read_to: int = 0
    generation: int = 0
    _done: bool = False
    _seen: tuple[int, int, int] = (-1, -1, -1)
    _mark: bytes = b""
    _effective: dict[tuple[str, int], Row] = field(default_factory=dict)
    _by_start: dict[int, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def share(self) -> float:
        return 1.0 if self._done else min(self.read_to / self.size, 0.9999) if self.size else 0.0

    @property
    def episodes(self) -> int:
        return len(self.rows) - self.superseded

    def row_at(self, start: int) -> Row | None:
        return self._by_start.get(start)

    def changed(self) -> bool:
        """True if there is something to read; quick."""
        try:
            return not self._done or _signature(self.path.stat()) != self._seen
        except OSError:
            return self.problem is None

    def update(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Read what was appended, until its end or until `go_on` says no. Never raises for what a file may hold."""
        with self._lock:
            try:
                with open_regular(self.path) as file:
                    self._begin(file)
                    self._done = self._read(file, go_on)
            except OSError as error:
                self.problem = f"{self.path.name}: {error.strerror or error}"
                self._done = True

    def _begin(self, file: BinaryIO) -> None:
        """Go to where reading ended; forget everything if it is not the same file."""
        found = os.fstat(file.fileno())
        same = found.st_ino == self._seen[0] and found.st_size >= self.read_to
        if same and self.read_to:
            file.seek(self.read_to - len(self._mark))
            same = file.read(len(self._mark)) == self._mark
        if not same:
            self._forget()
        self._seen, self.size = _signature(found), found.st_size
        file.seek(self.read_to)

    def _forget(self) -> None:
        self.rows, self._effective, self._by_start = [], {}, {}
        self.broken = self.superseded = self.failed = self.read_to = 0
        self.problem, self._mark = None, b""
        self.generation += 1

    def _read(self, file: BinaryIO, go_on: Callable[[], bool]) -> bool:
        while go_on():
            for _ in range(BATCH_LINES):
                line = file.readline(MOST_LINE_BYTES)
                if not line.endswith(b"\n"):
                    if len(line) >= MOST_LINE_BYTES:
                        self._complain(f"is longer than {MOST_LINE_BYTES >> 20} MiB; what follows is not shown")
                    return True
                self._take(line)
                self.read_to += len(line)
                self._mark = (self._mark + line[-MARK_BYTES:])[-MARK_BYTES:]
        return False

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self._add(row_of(parsed(line), self.read_to, len(line)))
        except ValueError as error:
            self._complain(str(error))

    def _add(self, row: Row) -> None:
        """A row counts; it, or the one of its task and sample before it, is superseded if it failed."""
        key = (row.task, row.sample)
        before = self._effective.get(key) if self.hides_failed else None
        if before is not None:
            old = row if row.failed and not before.failed else before
            old.superseded = True
            self.superseded += 1
            self.failed -= old is before and old.failed
        if not row.superseded:
            self._effective[key] = row
            self.failed += row.failed
        self._by_start[row.start] = row
        self.rows.append(row)

    def _complain(self, what: str) -> None:
        self.broken += 1
        if self.problem is None:
            self.problem = f"{self.path.name}: at byte {self.read_to:,}: {what}"

    def record(self, row: Row) -> dict[str, Any]:
        """The stored episode of a row.

        Raises:
            NotServed: the line is no longer there.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(row.start)
                found = parsed(file.read(row.size))
        except (OSError, ValueError) as error:
            raise NotServed(f"{self.path.name} was changed: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("turns"), list):
            raise NotServed(f"{self.path.name} was changed: no episode at byte {row.start:,}")
        return found


def _signature(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_regular(path: Path) -> BinaryIO:
    """The file opened for reading; a pipe or a device, which could hold the reader up for ever, is refused.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def parsed(line: bytes) -> Any:
    """The value of a line of JSON. NaN and infinities, which a browser would refuse, become None.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("is not valid JSON: too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error.reason}") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


MOST_BYTES = 256 * 2**20


@dataclass
class GrowingLines:
    """The records of a file, those since the last look at each `update`. Broken lines are counted in `broken`."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0
    _read_to: int = 0
    _inode: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self) -> list[dict[str, Any]]:
        """Read what was appended; returns all records. A missing file has none."""
        with self._lock, suppress(OSError):
            found = self.path.stat()
            if found.st_ino != self._inode or found.st_size < self._read_to:
                self.records, self.broken, self._read_to, self._inode = [], 0, 0, found.st_ino
            if found.st_size > self._read_to:
                self._read()
        return self.records

    def _read(self) -> None:
        with open_regular(self.path) as file:
            file.seek(self._read_to)
            new = file.read(MOST_BYTES)
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            try:
                record = parsed(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                self.records.append(record)
            elif line.strip():
                self.broken += 1


def encoded(value: Any) -> bytes:
    """The value as JSON that any browser reads: ASCII, and null for what JSON has no number for."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(finite(value), allow_nan=False).encode()
