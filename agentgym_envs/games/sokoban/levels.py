"""Sokoban levels: generated and proved solvable, or read from Boxoban files."""

from __future__ import annotations

import os
import random
from pathlib import Path

from agentgym.core.tasks import Task, TaskSet
from agentgym.datasets import FOLDER_VARIABLE
from agentgym_envs.games.grid import least_form
from agentgym_envs.games.sokoban.room import BOX, FLOOR, PLAYER, TARGET, WALL, content, parse_level
from agentgym_envs.games.sokoban.solver import solve
from agentgym_envs.splits import IsTaken, draw, generated_tasks, never, seeds_of, split_of

SHORTEST = 4  # moves; shorter solutions are trivial


def check_settings(size: int, boxes: int, walls: float) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or not 5 <= size <= 10:
        raise ValueError(f"sokoban: size, the border included, must be a whole number from 5 to 10, not {size!r}")
    if not isinstance(boxes, int) or isinstance(boxes, bool) or not 1 <= boxes <= 3:
        raise ValueError(f"sokoban: boxes must be 1, 2 or 3, not {boxes!r}")
    if boxes > (size - 2) ** 2 // 4:
        raise ValueError(f"sokoban: {boxes} boxes do not fit a room of size {size}; use at most {(size - 2) ** 2 // 4}")
    if not isinstance(walls, (int, float)) or not 0 <= walls <= 0.4:
        raise ValueError(f"sokoban: walls is a share of the inner cells from 0 to 0.4, not {walls!r}")


def longest(size: int, boxes: int) -> int:
    """Maximum length of a generated level's shortest solution, in moves."""
    return (size - 2) * (4 + 2 * boxes)


def make_level(seed: int, split: str, size: int, boxes: int, walls: float, is_taken: IsTaken = never) -> str:
    """The level of a seed, whose shortest solution has 4 to `longest` moves."""
    inner = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]

    def propose(rng: random.Random) -> str | None:
        signs = [WALL] * (size * size)
        floor = [cell for cell in inner if rng.random() >= walls]
        if len(floor) < 2 * boxes + 2:
            return None
        for cell in floor:
            signs[cell] = FLOOR
        cells = rng.sample(floor, 2 * boxes + 1)
        signs[cells[0]] = PLAYER
        for cell in cells[1 : boxes + 1]:
            signs[cell] = BOX
        for cell in cells[boxes + 1 :]:
            signs[cell] = TARGET
        return "\n".join("".join(signs[i : i + size]) for i in range(0, size * size, size))

    def accept(level: str) -> bool:
        plan = solve(*parse_level(level), limit=2_000)
        return plan is not None and SHORTEST <= len(plan) <= longest(size, boxes)

    return draw(seed, split, propose, content, accept, is_taken)


def generated_levels(split: str, size: int, boxes: int, walls: float) -> TaskSet:
    """100,000 train and 1,000 test levels, all test levels distinct and none with a train room (walls and targets).

    Rotated or mirrored levels count as equal. Rooms of size 5 have fewer than 1,000 distinct test levels, which then
    repeat. `metadata["difficulty"]` is the length of the shortest solution.
    """
    check_settings(size, boxes, walls)
    return generated_tasks(
        "sokoban",
        split,
        lambda seed, is_taken: make_level(seed, split, size, boxes, walls, is_taken),
        least_form,
        _moves,
    )


def _moves(level: str) -> int:
    """Length of the shortest solution; `make_level` has checked that it exists."""
    return len(solve(*parse_level(level), limit=2_000) or ())


def boxoban_levels(levels: str, split: str) -> TaskSet:
    """The levels of the Boxoban files `sokoban/<difficulty>*.txt` in the folder AGENTGYM_DATA.

    Args:
        levels: "boxoban:medium", "boxoban:unfiltered" or "boxoban:hard".
        split: "train" or "test", by a hash of the room; the files' own splits are ignored. Of equal levels (rotated or
            mirrored) the first is kept.
    """
    source, _, difficulty = levels.partition(":")
    if source != "boxoban" or difficulty not in ("medium", "unfiltered", "hard"):
        raise ValueError(
            "sokoban: levels must be 'generated', 'boxoban:medium', 'boxoban:unfiltered' or 'boxoban:hard', "
            f"not {levels!r}"
        )
    seeds_of(split, "sokoban")
    folder = os.environ.get(FOLDER_VARIABLE)
    files = sorted(Path(folder).expanduser().glob(f"sokoban/{difficulty}*.txt")) if folder else []
    if not files:
        raise FileNotFoundError(
            f"sokoban: levels={levels!r} needs files sokoban/{difficulty}*.txt: set {FOLDER_VARIABLE} to the folder "
            f"that holds them (now {folder or 'not set'})"
        )
    tasks, seen = [], set()
    for file in files:
        for name, level in _read_levels(file):
            if split_of(content(level)) == split and (form := least_form(level)) not in seen:
                seen.add(form)
                about = {"split": split, "level": level, "difficulty": difficulty}
                tasks.append(Task(f"sokoban-{difficulty}-{file.stem}-{name}", metadata=about))
    return TaskSet(tasks, name=f"sokoban/{levels}/{split}", source=", ".join(str(file) for file in files))


def _read_levels(file: Path) -> list[tuple[str, str]]:
    """Names and levels of a Boxoban file: a line "; name", then the rows, then an empty line."""
    found = []
    for block in file.read_text(encoding="utf-8").split(";")[1:]:
        name, *rows = block.rstrip().split("\n")
        level = "\n".join(rows).replace(" ", FLOOR)
        try:
            parse_level(level)
        except ValueError as error:
            raise ValueError(f"{file}: level {name.strip()}: {error}") from error
        found.append((name.strip(), level))
    return found
