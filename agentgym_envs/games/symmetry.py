"""Turned and mirrored boards. Play on one is play on the other with other direction words, so they count as one board."""

from __future__ import annotations

from functools import cache


@cache
def orders(rows: int, columns: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The eight ways to turn and mirror a board: for each the cells of the old board in their new order, and the new columns.

    Cells are numbered row by row from 0. The first way changes nothing.
    """
    board = tuple(tuple(range(row * columns, (row + 1) * columns)) for row in range(rows))
    found = []
    for _ in range(4):
        for way in (board, tuple(row[::-1] for row in board)):
            found.append((tuple(cell for row in way for cell in row), len(way[0])))
        board = tuple(zip(*board[::-1], strict=True))  # a quarter turn
    return tuple(found)


def least_form(board: str) -> str:
    """The first in alphabetical order of the eight forms of a board, whose rows are lines: the same for all eight."""
    rows = board.split("\n")
    cells = "".join(rows)
    forms = (("".join([cells[cell] for cell in order]), columns) for order, columns in orders(len(rows), len(rows[0])))
    least, columns = min(forms)
    return "\n".join(least[i : i + columns] for i in range(0, len(least), columns))
