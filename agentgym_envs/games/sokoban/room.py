"""A Sokoban room: its text form, and moves in it.

Signs: # wall, _ or space floor, . target, $ box, * box on a target, @ player, + player on a target.
"""

from dataclasses import dataclass

from agentgym_envs.games.grid import in_rows, least_form

WALL, FLOOR, TARGET, BOX, BOX_HOME, PLAYER, PLAYER_HOME = "#_.$*@+"


@dataclass(frozen=True)
class Room:
    """The immovable part of a level. Cells are numbered row by row; the border is wall, so every neighbour is a cell."""

    columns: int
    walls: tuple[bool, ...]
    targets: frozenset[int]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        return -self.columns, self.columns, -1, 1


def parse_level(level: str) -> tuple[Room, int, frozenset[int]]:
    """The room, the player's cell and the boxes' cells of a level."""
    rows = level.replace(" ", FLOOR).split("\n")
    columns = len(rows[0])
    cells = "".join(rows)
    if columns < 3 or len(rows) < 3 or len({len(row) for row in rows}) != 1:
        raise ValueError(f"sokoban: a level is a rectangle of at least 3 x 3 signs: {level!r}")
    if set(cells) - set("#_.$*@+"):
        raise ValueError(f"sokoban: a level has only the signs # _ . $ * @ + and space: {level!r}")
    if set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) != {WALL}:
        raise ValueError(f"sokoban: the border of a level is all wall (#): {level!r}")
    players = [i for i, sign in enumerate(cells) if sign in (PLAYER, PLAYER_HOME)]
    boxes = frozenset(i for i, sign in enumerate(cells) if sign in (BOX, BOX_HOME))
    targets = frozenset(i for i, sign in enumerate(cells) if sign in (TARGET, BOX_HOME, PLAYER_HOME))
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise ValueError(f"sokoban: a level has one player, and as many targets as boxes, at least one: {level!r}")
    return Room(columns, tuple(sign == WALL for sign in cells), targets), players[0], boxes


def content(level: str) -> str:
    """Walls and targets without what moves, equal for rotated and mirrored rooms."""
    moving = str.maketrans({" ": FLOOR, BOX: FLOOR, PLAYER: FLOOR, BOX_HOME: TARGET, PLAYER_HOME: TARGET})
    return least_form(level.translate(moving))


def moved(room: Room, player: int, boxes: frozenset[int], step: int) -> tuple[int, frozenset[int]] | None:
    """Player and boxes after a step; None if a wall or an unpushable box blocks it."""
    ahead = player + step
    if room.walls[ahead]:
        return None
    if ahead not in boxes:
        return ahead, boxes
    beyond = ahead + step
    if room.walls[beyond] or beyond in boxes:
        return None
    return ahead, (boxes - {ahead}) | {beyond}


def drawn(room: Room, player: int, boxes: frozenset[int]) -> str:
    signs = [WALL if wall else FLOOR for wall in room.walls]
    for cell in room.targets:
        signs[cell] = TARGET
    for cell in boxes:
        signs[cell] = BOX_HOME if cell in room.targets else BOX
    signs[player] = PLAYER_HOME if player in room.targets else PLAYER
    return in_rows(signs, room.columns, " ")
