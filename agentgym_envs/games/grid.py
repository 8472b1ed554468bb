"""Text games on a grid: reading a move from free text, and rotated or mirrored boards, which count as one board."""

import re
from collections.abc import Sequence
from functools import cache
from operator import itemgetter

DIRECTIONS = ("up", "down", "left", "right")
LEGAL = "answer up, down, left or right"
_WORD = re.compile(r"\b(?:up|down|left|right)\b")


def read_direction(text: str) -> str | None:
    """The last direction word of a text, in any case, or None: a reply that thinks aloud names its choice last."""
    found = _WORD.findall(text.lower())
    return found[-1] if found else None


@cache
def orders(rows: int, columns: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The rotations and reflections of a board, the identity first: old cells in their new order, number of columns."""
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
    return in_rows(*min(forms))


def in_rows(signs: Sequence[str], columns: int, gap: str = "") -> str:
    return "\n".join([gap.join(signs[i : i + columns]) for i in range(0, len(signs), columns)])
