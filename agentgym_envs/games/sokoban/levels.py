"""Sokoban levels: generated and proved solvable, or read from Boxoban files."""

import os
import random
from pathlib import Path
from typing import Any

from agentgym.core.tasks import Task, TaskSet
from agentgym.datasets import FOLDER_VARIABLE
from agentgym_envs.games.grid import in_rows, least_form
from agentgym_envs.games.sokoban.room import BOX, FLOOR, PLAYER, TARGET, WALL, content, parse_level, solve
from agentgym_envs.settings import check_choice, check_number
from agentgym_envs.splits import check_split, generated_tasks, split_of

SHORTEST = 4  # moves; shorter solutions are trivial


def check_settings(size: int, boxes: int, walls: float) -> None:
    check_number("sokoban: size", size, 5, 10, whole=True)
    check_number("sokoban: boxes", boxes, 1, 3, whole=True)
    check_number("sokoban: walls", walls, 0, 0.4)
    if boxes > (size - 2) ** 2 // 4:
        raise ValueError(f"sokoban: {boxes} boxes do not fit a room of size {size}; use at most {(size - 2) ** 2 // 4}")


def longest(size: int, boxes: int) -> int:
    """Maximum length of a generated level's shortest solution, in moves."""
    return (size - 2) * (4 + 2 * boxes)


def generated_levels(split: str, size: int, boxes: int, walls: float) -> TaskSet:
    """Levels whose shortest solution has 4 to `longest` moves; `metadata["difficulty"]` is its length.

    Test levels are distinct, and no room (walls and targets) is in both splits; rotated or mirrored levels count as
    equal. Rooms of size 5 have fewer than 1,000 distinct test levels, which then repeat.
    """
    check_settings(size, boxes, walls)
    inner = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]

    def propose(rng: random.Random) -> str | None:
        floor = [cell for cell in inner if rng.random() >= walls]
        if len(floor) < 2 * boxes + 2:
            return None
        signs = [WALL] * (size * size)
        things = zip(rng.sample(floor, 2 * boxes + 1), PLAYER + boxes * BOX + boxes * TARGET, strict=True)
        for cell, sign in (*((cell, FLOOR) for cell in floor), *things):
            signs[cell] = sign
        return in_rows(signs, size)

    def moves(level: str) -> int:
        return len(solve(*parse_level(level), limit=2_000) or ())

    def accept(level: str) -> bool:
        return SHORTEST <= moves(level) <= longest(size, boxes)

    def describe(level: str) -> tuple[None, dict[str, Any]]:
        return None, {"level": level, "difficulty": moves(level)}

    return generated_tasks("sokoban", split, propose, content, accept, least_form, describe)


def boxoban_levels(levels: str, split: str) -> TaskSet:
    """The levels of the Boxoban files `sokoban/<difficulty>*.txt` in the folder AGENTGYM_DATA.

    A hash of the room decides the split; the files' own splits are ignored. Of equal levels the first is kept.
    """
    check_choice("sokoban: levels", levels, ("generated", "boxoban:medium", "boxoban:unfiltered", "boxoban:hard"))
    difficulty = levels.removeprefix("boxoban:")
    check_split("sokoban", split)
    folder = os.environ.get(FOLDER_VARIABLE)
    files = sorted(Path(folder).expanduser().glob(f"sokoban/{difficulty}*.txt")) if folder else []
    if not files:
        raise FileNotFoundError(
            f"sokoban: levels={levels!r} needs files sokoban/{difficulty}*.txt: set {FOLDER_VARIABLE} to the folder "
            f"that holds them (now {folder or 'not set'})"
        )
    tasks, seen = [], set()
    for file in files:
        # Blocks of a line "; name", then the rows, then an empty line.
        for block in file.read_text(encoding="utf-8").split(";")[1:]:
            name, *rows = block.rstrip().split("\n")
            level = "\n".join(rows).replace(" ", FLOOR)
            try:
                parse_level(level)
            except ValueError as error:
                raise ValueError(f"{file}: level {name.strip()}: {error}") from error
            if split_of(content(level)) == split and (form := least_form(level)) not in seen:
                seen.add(form)
                about = {"split": split, "level": level, "difficulty": difficulty}
                tasks.append(Task(f"sokoban-{difficulty}-{file.stem}-{name.strip()}", metadata=about))
    return TaskSet(tasks, name=f"sokoban/{levels}/{split}", source=", ".join(str(file) for file in files))
