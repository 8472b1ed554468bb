"""A small file of JSON Lines that grows, such as `metrics.jsonl`: its records, kept in memory."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.viewer.index import open_regular, parsed

MOST_BYTES = 256 * 2**20


@dataclass
class GrowingLines:
    """The records of a file, those since the last look at each `update`. Lines that are none are counted in `broken`."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0
    _read_to: int = 0
    _inode: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self) -> list[dict[str, Any]]:
        """Read what was appended; returns all records. A missing file has none."""
        with self._lock:
            try:
                found = self.path.stat()
                if found.st_ino != self._inode or found.st_size < self._read_to:
                    self.records, self.broken, self._read_to, self._inode = [], 0, 0, found.st_ino
                if found.st_size > self._read_to:
                    self._read()
            except OSError:
                return self.records
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


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
