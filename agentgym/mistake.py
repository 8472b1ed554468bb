"""The user's mistake on a command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Mistake(Exception):
    """In one line; the command prints it and ends with exit code 2."""


def nearest(word: object, known: Iterable[object]) -> str:
    """": did you mean X?", or nothing where nothing is near."""
    near = difflib.get_close_matches(str(word), [str(name) for name in known], 1, 0.5)
    return f": did you mean {near[0]}?" if near else ""
