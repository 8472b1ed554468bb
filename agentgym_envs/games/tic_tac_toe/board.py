"""The tic-tac-toe board, perfect play, and opponents.

A board is nine signs (X, O or _), row by row; cells are numbered 1 to 9. An opponent is also a text, "<starter> <order>
<care>", such as "O 381952476 01101": who moves first; its preference among cells; and for each of its moves 1 for
optimal play (ties by preference) or 0 for the most preferred free cell. With a random order, a careless move is uniform
over the free cells.
"""

from __future__ import annotations

import random
from functools import cache

from agentgym_envs.games.grid import orders
from agentgym_envs.splits import IsTaken, draw, never

AGENT, OPPONENT, FREE = "XO_"
EMPTY = FREE * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OPPONENTS = {"random": 0.0, "minimax": 1.0, "mix": 0.5}  # chance of each move to be chosen with care
PREFERRED = (5, 1, 3, 7, 9, 2, 4, 6, 8)  # the expert's ties: centre, corners, edges


def winner(board: str) -> str | None:
    for a, b, c in LINES:
        if board[a] != FREE and board[a] == board[b] == board[c]:
            return board[a]
    return None


def free_cells(board: str) -> list[int]:
    return [cell for cell, sign in enumerate(board, start=1) if sign == FREE]


def placed(board: str, cell: int, sign: str) -> str:
    return board[: cell - 1] + sign + board[cell:]


@cache
def value(board: str, mover: str) -> int:
    """Value of the board for `mover`, who is to move, under perfect play; there are about 5,500 boards to cache.

    0 for a draw; for a win 1 plus the free cells left at the end, so a sooner win is worth more; minus that for a loss.
    """
    if winner(board) is not None:
        return -(1 + board.count(FREE))
    if FREE not in board:
        return 0
    other = OPPONENT if mover == AGENT else AGENT
    return max(-value(placed(board, cell, mover), other) for cell in free_cells(board))


def best_cell(board: str, mover: str, order: tuple[int, ...]) -> int:
    other = OPPONENT if mover == AGENT else AGENT
    best = value(board, mover)
    return next(c for c in order if board[c - 1] == FREE and -value(placed(board, c, mover), other) == best)


def parse_opponent(level: str) -> tuple[str, tuple[int, ...], tuple[bool, ...]]:
    parts = level.split(" ")
    if (
        len(parts) != 3
        or parts[0] not in (AGENT, OPPONENT)
        or sorted(parts[1]) != list("123456789")
        or len(parts[2]) != 5
        or set(parts[2]) - set("01")
    ):
        raise ValueError(f'tic_tac_toe: a level is like "O 381952476 01101" (starter, order, care), not {level!r}')
    return parts[0], tuple(int(digit) for digit in parts[1]), tuple(digit == "1" for digit in parts[2])


def make_opponent(seed: int, split: str, opponent: str, is_taken: IsTaken = never) -> str:
    care = OPPONENTS[opponent]

    def propose(rng: random.Random) -> str:
        order = "".join(rng.sample("123456789", 9))
        return f"{rng.choice('XO')} {order} {''.join(str(int(rng.random() < care)) for _ in range(5))}"

    return draw(seed, split, propose, content, is_taken=is_taken)


def content(level: str) -> str:
    """An opponent's text, equal for opponents that play alike on a rotated or mirrored board.

    If X begins, O moves at most four times, so the fifth care is dropped.
    """
    starter, order, care = level.split(" ")
    forms = ("".join(str(way[int(cell) - 1] + 1) for cell in order) for way, _ in orders(3, 3))
    return f"{starter} {min(forms)} {care if starter == OPPONENT else care[:4]}"
