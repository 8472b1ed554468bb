"""Levels of FrozenLake: text rows of P (player), G (goal), O (hole) and _ (ice)."""

from __future__ import annotations

import random

from agentgym_envs.games.grid import in_rows, least_form
from agentgym_envs.settings import check_number
from agentgym_envs.splits import IsTaken, draw, never

PLAYER, GOAL, HOLE, ICE = "PGO_"
EDGE = "#"
UNREACHABLE = -1


def check_settings(size: int, holes: float) -> None:
    check_number("frozen_lake: size", size, 3, 16, whole=True)
    check_number("frozen_lake: holes", holes, 0, 0.5)


def neighbours(rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """For each cell (row by row), the cells that up, down, left and right lead to; itself if a wall is there."""
    return [
        (
            cell - columns if cell >= columns else cell,
            cell + columns if cell + columns < rows * columns else cell,
            cell - 1 if cell % columns else cell,
            cell + 1 if (cell + 1) % columns else cell,
        )
        for cell in range(rows * columns)
    ]


def distances(cells: str, steps: list[tuple[int, int, int, int]]) -> list[int]:
    """Shortest safe distance of each cell to the goal; `UNREACHABLE` for holes and cut-off ice."""
    goal = cells.index(GOAL)
    away = [UNREACHABLE] * len(cells)
    away[goal] = 0
    frontier = [goal]
    for cell in frontier:  # grows while it is read: breadth first
        for beside in steps[cell]:
            if away[beside] == UNREACHABLE and cells[beside] != HOLE:
                away[beside] = away[cell] + 1
                frontier.append(beside)
    return away


def parse_level(level: str) -> tuple[int, int, str]:
    """Rows, columns and cells (row by row, in one string) of a level."""
    rows = level.split("\n")
    cells = "".join(rows)
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(f"frozen_lake: the rows of a level must have equal length: {level!r}")
    if set(cells) - set("PGO_") or cells.count(PLAYER) != 1 or cells.count(GOAL) != 1:
        raise ValueError(f"frozen_lake: a level needs one P and one G, and otherwise only O and _: {level!r}")
    if distances(cells, neighbours(len(rows), len(rows[0])))[cells.index(PLAYER)] == UNREACHABLE:
        raise ValueError(f"frozen_lake: no safe way from P to G in {level!r}")
    return len(rows), len(rows[0]), cells


def make_level(seed: int, split: str, size: int, holes: float, is_taken: IsTaken = never) -> str:
    """The level of a seed: P in a corner, G 2 to 2 * size safe moves away."""
    total = size * size
    corners = (0, size - 1, total - size, total - 1)
    steps = neighbours(size, size)

    def propose(rng: random.Random) -> str | None:
        start, goal = rng.choice(corners), rng.randrange(total)
        signs = [HOLE if rng.random() < holes else ICE for _ in range(total)]
        if start == goal:
            return None
        signs[start] = PLAYER
        signs[goal] = GOAL
        return in_rows(signs, size)

    def accept(level: str) -> bool:
        cells = level.replace("\n", "")
        return 2 <= distances(cells, steps)[cells.index(PLAYER)] <= 2 * size

    return draw(seed, split, propose, content, accept, is_taken)


def content(level: str) -> str:
    """The map without the player, equal for rotated and mirrored maps."""
    return least_form(level.replace(PLAYER, ICE))
