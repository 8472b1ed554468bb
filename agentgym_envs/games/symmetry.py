"""Rotated and mirrored boards, which count as one board: play is the same up to direction words."""

from __future__ import annotations

from functools import cache


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
    forms = (("".join([cells[cell] for cell in order]), columns) for order, columns in orders(len(rows), len(rows[0])))
    least, columns = min(forms)
    return "\n".join(least[i : i + columns] for i in range(0, len(least), columns))
