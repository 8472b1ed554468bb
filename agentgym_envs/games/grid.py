"""Text games on a grid: reading a move from free text, and rotated or mirrored boards, which count as one board."""

from __future__ import annotations

import re
from functools import cache
from operator import itemgetter

DIRECTIONS = ("up", "down", "left", "right")
LEGAL = "answer up, down, left or right"
_WORD = re.compile(r"\b(?:up|down|left|right)\b")


def read_direction(text: str) -> str | None:
    """The last direction word of a text, in any case, or None.

    A reply that thinks aloud names its choice last: "not up, so <answer>right</answer>" is "right".
    """
    text = text.lower()
    if text in DIRECTIONS:
        return text
    found = _WORD.findall(text)
    return found[-1] if found else None


@cache
def orders(rows: int, columns: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The eight rotations and reflections of a board: (old cells in their new order, new number of columns).

    Cells are numbered row by row from 0. The first entry is the identity.
    """
    board = tuple(tuple(range(row * columns, (row + 1) * columns)) for row in range(rows))
    found = []
    for _ in range(4):
        for way in (board, tuple(row[::-1] for row in board)):
            found.append((tuple(cell for row in way for cell in row), len(way[0])))
        board = tuple(zip(*board[::-1], strict=True))  # a quarter turn
    return tuple(found)


def least_form(board: str) -> str:
    """The alphabetically first of a board's eight forms; rows are lines."""
    rows = board.split("\n")
    cells = "".join(rows)
    forms = (("".join(itemgetter(*order)(cells)), columns) for order, columns in orders(len(rows), len(rows[0])))
    least, columns = min(forms)
    return "\n".join(least[i : i + columns] for i in range(0, len(least), columns))
