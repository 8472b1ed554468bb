"""Files and folders that are written in one step, and JSON files that others may have written."""

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.storage.jsonl import encodable


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the old content or the new, never half."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(path)
    except OSError:  # a full disk, or nothing to write into
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place and name of `folder` when the block ends; after an error it does not.

    One process at a time writes a folder, so what others left of it, which were killed, goes too.
    """
    unfinished, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("partial", "old"))

    def remove_left(end: str) -> None:
        for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.{end}"):
            shutil.rmtree(left, ignore_errors=True)

    remove_left("partial")
    unfinished.mkdir(parents=True)
    yield unfinished
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    remove_left("old")  # what was there before, only once the new folder is in place


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    return encodable(value, indent=2)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
