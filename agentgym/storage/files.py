"""Files that are written in one step."""

import json
import os
from pathlib import Path
from typing import Any


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


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    """A value as indented JSON that any file and terminal can take."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write: only an escape can carry it
        text = json.dumps(value, indent=2)
    return text
