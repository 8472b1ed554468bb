"""The write-ahead record of a run: an append-only file of JSON Lines, each on disk before what it says is answered."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentgym.storage.jsonl import mend


class RecordError(Exception):
    """A line could not be written, and is not in the file."""


class Record:
    """Lines that come while others are written are written and synced together, in a thread. A last line that was cut is removed."""

    def __init__(self, path: Path):
        mend(path)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._size = os.fstat(self._file).st_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._waiting: list[tuple[bytes, asyncio.Future[None] | None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._broken: OSError | None = None

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was written before. Raises ValueError for a line that is not JSON."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self.path}:{number}: not a line of a record: {error}") from error

    async def write(self, *lines: dict[str, Any]) -> None:
        """Return when lines are on disk. Raises RecordError."""
        written = asyncio.get_running_loop().create_future()
        self._add(lines, written)
        await written

    def note(self, line: dict[str, Any]) -> None:
        """Write a line that nobody waits for; it is lost if it cannot be written."""
        self._add([line], None)

    def _add(self, lines: Any, written: asyncio.Future[None] | None) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        self._waiting.append((text.encode(), written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            failure: OSError | None = None
            try:
                await loop.run_in_executor(self._thread, self._append, b"".join(text for text, _ in group))
            except OSError as error:
                failure = error
            for _, written in group:
                if written is None or written.done():
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(RecordError(f"{self.path} cannot be written: {failure.strerror or failure}"))
        self._writing = None

    def _append(self, data: bytes) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fdatasync(self._file)
        except OSError as error:
            try:
                os.ftruncate(self._file, self._size)  # a part of a line may be there
            except OSError:
                self._broken = error  # what comes after it could not be read
            raise
        self._size += len(data)

    async def close(self) -> None:
        while self._writing is not None:
            await self._writing
        self._thread.shutdown()
        os.close(self._file)
