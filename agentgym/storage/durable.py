"""An append-only file of JSON Lines, each of which is on disk when its writer goes on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentgym.storage.jsonl import mend


class NotWritten(Exception):
    """Lines could not be written, and are not in the file."""


class DurableLines:
    """Lines that come while others are written are written and synced together, in a thread. A last line that was cut is removed."""

    def __init__(self, path: Path):
        mend(path)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._size = os.fstat(self._file).st_size
        self._broken: OSError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.name)
        self._waiting: list[tuple[bytes, asyncio.Future[None] | None]] = []
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        """The records of the file. Raises ValueError for a line that is not JSON."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self.path}:{number}: {error}") from error

    async def write(self, *lines: Mapping[str, Any]) -> None:
        """Return when the lines are on disk, all together. Raises NotWritten: none is."""
        written = asyncio.get_running_loop().create_future()
        self._add(lines, written)
        await written

    def note(self, line: Mapping[str, Any]) -> None:
        """Write a line for which nobody waits; it is left out if it cannot be written."""
        self._add((line,), None)

    async def close(self) -> None:
        while self._writing is not None:
            await self._writing
        self._thread.shutdown()
        os.close(self._file)

    def _add(self, lines: tuple[Mapping[str, Any], ...], written: asyncio.Future[None] | None) -> None:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        self._waiting.append((text.encode(), written))
        self._writing = self._writing or asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            data, failure = b"".join(text for text, _ in group), None
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._append, data)
            except OSError as error:
                failure = NotWritten(f"{self.path} cannot be written: {error.strerror or error}")
            for _, written in group:
                if written is not None and not written.done():
                    written.set_result(None) if failure is None else written.set_exception(failure)
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
                self._broken = error  # what came after it could not be read
            raise
        self._size += len(data)
