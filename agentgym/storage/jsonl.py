"""JSON Lines: a line for any text and any value, and the last line of a process that was killed."""

import json
import math
import os
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
_MOST_LEVELS = 100  # lists and objects inside each other, of a value that is too deep as it is
_MOST_BITS = 10_000  # of an integer that Python writes in decimal digits, and reads


def line_of(record: Any) -> str:
    """The record as one line with its end. NumPy values become numbers and lists, what JSON does not know becomes text."""
    try:
        return encodable(record, default=plain) + "\n"
    except TypeError:  # a key that is a tuple, say
        return encodable(_with_text_keys(record), default=plain) + "\n"


def line_of_any(record: Any) -> str:
    """As `line_of`, also of a value that JSON cannot carry or that Python would not read: one within itself, or of endless digits."""
    try:
        return line_of(record)
    except (ValueError, RecursionError):
        return line_of(_storable(record, _MOST_LEVELS))


def encodable(value: Any, **how: Any) -> str:
    """A value as JSON that any file and terminal can take."""
    text = json.dumps(value, ensure_ascii=False, **how)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write: only an escape can carry it
        text = json.dumps(value, **how)
    return text


def mend(path: Path) -> None:
    """Remove a last line that was cut off; one that lacks only its end gets it. Reads no more than that line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        begin, last = size, b""
        while begin and b"\n" not in last:
            end, begin = begin, max(0, begin - _BLOCK)
            file.seek(begin)
            last = file.read(end - begin) + last
        last = last[last.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            json.loads(last)
        except ValueError:
            file.truncate(size - len(last))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def plain(value: Any) -> Any:
    """The JSON form of other values: NumPy's become numbers and lists, the rest text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _with_text_keys(inner) for name, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list | tuple) else value


def _storable(value: Any, levels: int) -> Any:
    """The value with long integers in hexadecimal digits, and a text in place of what is too deep."""
    if isinstance(value, dict | list | tuple) and not levels:
        return "(too deep to be stored)"
    if isinstance(value, dict):
        return {name: _storable(inner, levels - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner, levels - 1) for inner in value]
    return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value
