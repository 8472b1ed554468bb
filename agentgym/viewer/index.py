"""Files that grow: an index of a file of episodes, and the records of `metrics.jsonl`; and the thread that reads them.

The index has a row and the byte position of each line. Each look reads only what was appended. A last line without a line end
is left for later, since it may still be written. A rewritten file (`agentgym rescore`) is read from its start.
"""

import json
import os
import stat
import threading
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from agentgym.storage.jsonl import finite
from agentgym.viewer.rows import EpisodeRow, row_of

# Of the bytes before the place up to which a file was read: they change if it was written anew.
MARK_BYTES = 64
BATCH_LINES = 64
# A line that is longer is not an episode but a mistake, and would fill the memory.
MOST_LINE_BYTES = 256 * 2**20


class NotServed(Exception):
    """There is no such thing to show. The message says what is wrong, for the page."""


class BackgroundThread:
    """One thread at a time, which may outlast the calls that wait for it."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None], seconds: float) -> None:
        """Start the work, unless some is under way; returns when what is under way is done, or after this long."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=work, name=self._name, daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(seconds)


class GrowingFile:
    """The lines of one file. `update` may run in one thread while others read what it has found, which only grows.

    Attributes:
        broken: number of lines that are not what they should be.
        problem: the first of them, or why the file cannot be read.
        size, read_to: bytes of the file, and how far it was read.
        generation: grows when the file was found to be written anew.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = self.generation = 0
        self._done = False
        self._seen = (-1, -1, -1)
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forget the lines: the file was written anew."""
        self.broken = self.read_to = 0
        self.problem: str | None = None
        self._mark = b""

    def add(self, value: Any, size: int) -> None:
        """Take the value of the line at `read_to`. Raises ValueError if it is not what it should be."""
        raise NotImplementedError

    @property
    def share(self) -> float:
        return 1.0 if self._done else min(self.read_to / self.size, 0.9999) if self.size else 0.0

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
            self.generation += 1
            self.forget()
        self._seen, self.size = _signature(found), found.st_size
        file.seek(self.read_to)

    def _read(self, file: BinaryIO, go_on: Callable[[], bool]) -> bool:
        while go_on():
            for _ in range(BATCH_LINES):
                line = file.readline(MOST_LINE_BYTES)
                if not line.endswith(b"\n"):
                    if len(line) >= MOST_LINE_BYTES:
                        self._complain(f"is longer than {MOST_LINE_BYTES >> 20} MiB; what follows is not shown")
                    return True
                if line.strip():
                    try:
                        self.add(parsed(line), len(line))
                    except ValueError as error:
                        self._complain(str(error))
                self.read_to += len(line)
                self._mark = (self._mark + line[-MARK_BYTES:])[-MARK_BYTES:]
        return False

    def _complain(self, what: str) -> None:
        self.broken += 1
        if self.problem is None:
            self.problem = f"{self.path.name}: at byte {self.read_to:,}: {what}"


class EpisodeFile(GrowingFile):
    """The rows of a file of episodes.

    Attributes:
        name: its cell, or the file's name without its end in a training run.
        hides_failed: whether a failed line is superseded by another of its task and sample.
        superseded, failed: how many rows are superseded; how many of the others failed.
    """

    def __init__(self, path: Path, name: str, hides_failed: bool = True):
        super().__init__(path)
        self.name = name
        self.hides_failed = hides_failed

    def forget(self) -> None:
        super().forget()
        self.rows: list[EpisodeRow] = []
        self.superseded = self.failed = 0
        self._effective: dict[tuple[str, int], EpisodeRow] = {}

    @property
    def episodes(self) -> int:
        return len(self.rows) - self.superseded

    def row_at(self, start: int) -> EpisodeRow | None:
        place = bisect_left(self.rows, start, key=lambda row: row.start)
        return next((row for row in self.rows[place : place + 1] if row.start == start), None)

    def add(self, value: Any, size: int) -> None:
        """A row counts; it, or the one of its task and sample before it, is superseded if it failed."""
        row = row_of(value, self.read_to, size)
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
        self.rows.append(row)

    def record(self, row: EpisodeRow) -> dict[str, Any]:
        """The stored episode of a row. Raises NotServed if the line is no longer there."""
        try:
            with open_regular(self.path) as file:
                file.seek(row.start)
                found = parsed(file.read(row.size))
        except (OSError, ValueError) as error:
            raise NotServed(f"{self.path.name} was changed: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("turns"), list):
            raise NotServed(f"{self.path.name} was changed: no episode at byte {row.start:,}")
        return found


class MetricsFile(GrowingFile):
    """The records of `metrics.jsonl` in a resolved folder; a file that is not there, or a link out of the folder, has none."""

    def forget(self) -> None:
        super().forget()
        self.records: list[dict[str, Any]] = []

    def add(self, value: Any, size: int) -> None:
        if not isinstance(value, dict):
            raise ValueError("is not a JSON object")
        self.records.append(value)

    def updated(self) -> list[dict[str, Any]]:
        """All records, after a look at what was appended."""
        if self.path.exists() and is_inside(self.path, self.path.parent) and self.changed():
            self.update()
        return self.records


def _signature(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path, with links resolved, is inside a resolved folder."""
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """The file opened for reading. Raises OSError, also for a pipe or a device, which could hold the reader up for ever."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def parsed(line: bytes) -> Any:
    """The value of a line of JSON, else ValueError. NaN and infinities, which a browser would refuse, become None."""
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("is not valid JSON: too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error.reason}") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


def encoded(value: Any) -> bytes:
    """The value as JSON that any browser reads: ASCII, and null for what JSON has no number for."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(finite(value), allow_nan=False).encode()
