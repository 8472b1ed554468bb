"""`metrics.jsonl` as it lies on the disk: its records, and the lines that a crash has left of some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def record_of(line: bytes) -> Record | None:
    """The record of one line; None where it is cut off, or something else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"kind", "step"} <= found.keys() else None


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order, without the lines that are none.

    Raises:
        FileNotFoundError: no such file.
    """
    return [record for _, record in _lines(path) if record is not None]


def broken_lines(path: str | Path) -> list[int]:
    """The numbers, from 1, of the lines that are no records. A last line without its end may still be written: it is not among them.

    Raises:
        FileNotFoundError: no such file.
    """
    return [number for number, record in _lines(path) if record is None]


def _lines(path: str | Path) -> Iterator[tuple[int, Record | None]]:
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = record_of(line)
            if record is not None or line.endswith(b"\n"):
                yield number, record
