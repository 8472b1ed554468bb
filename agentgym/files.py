"""Files that are written in one step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new, never half."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with unfinished.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one step, indented."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
