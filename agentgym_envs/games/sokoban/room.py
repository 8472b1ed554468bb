"""A Sokoban room: its text form, moves in it, and a solver.

Signs: # wall, _ or space floor, . target, $ box, * box on a target, @ player, + player on a target.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from agentgym_envs.games.grid import DIRECTIONS, in_rows, least_form

NEVER = 1_000_000
Position = tuple[int, frozenset[int]]  # the player's cell and the boxes' cells
WALL, FLOOR, TARGET, BOX, BOX_HOME, PLAYER, PLAYER_HOME = "#_.$*@+"


@dataclass(frozen=True)
class SokobanRoom:
    """The immovable part of a level. Cells are numbered row by row; the border is wall, so every neighbour is a cell."""

    columns: int
    walls: tuple[bool, ...]
    targets: frozenset[int]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        return -self.columns, self.columns, -1, 1


def parse_level(level: str) -> tuple[SokobanRoom, int, frozenset[int]]:
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
    return SokobanRoom(columns, tuple(sign == WALL for sign in cells), targets), players[0], boxes


def content(level: str) -> str:
    """Walls and targets without what moves, equal for rotated and mirrored rooms."""
    moving = str.maketrans({" ": FLOOR, BOX: FLOOR, PLAYER: FLOOR, BOX_HOME: TARGET, PLAYER_HOME: TARGET})
    return least_form(level.translate(moving))


def moved(room: SokobanRoom, player: int, boxes: frozenset[int], step: int) -> tuple[int, frozenset[int]] | None:
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


def drawn(room: SokobanRoom, player: int, boxes: frozenset[int]) -> str:
    signs = [WALL if wall else FLOOR for wall in room.walls]
    for cell in room.targets:
        signs[cell] = TARGET
    for cell in boxes:
        signs[cell] = BOX_HOME if cell in room.targets else BOX
    signs[player] = PLAYER_HOME if player in room.targets else PLAYER
    return in_rows(signs, room.columns, " ")


# ---- the solver


@lru_cache(maxsize=64)
def push_distances(room: SokobanRoom) -> tuple[tuple[int, ...], ...]:
    """For each target, the fewest pushes from each cell to it in an otherwise empty room; `NEVER` if impossible."""
    tables = []
    for target in sorted(room.targets):
        table = [NEVER] * len(room.walls)
        table[target] = 0
        frontier = [target]
        for cell in frontier:  # grows while it is read: breadth first, pulling the box away from the target
            for step in room.steps:
                source = cell - step
                if room.walls[source] or room.walls[source - step] or table[source] != NEVER:
                    continue
                table[source] = table[cell] + 1
                frontier.append(source)
        tables.append(tuple(table))
    return tuple(tables)


def _bound(boxes: frozenset[int], tables: tuple[tuple[int, ...], ...]) -> int:
    """Lower bound of the pushes that bring every box home; at least `NEVER` if impossible."""
    if len(boxes) == 1:
        return tables[0][next(iter(boxes))]
    if len(boxes) <= 4:
        return min(sum(table[box] for table, box in zip(tables, order, strict=True)) for order in permutations(boxes))
    return sum(min(table[box] for table in tables) for box in boxes)


def _walk(room: SokobanRoom, player: int, boxes: frozenset[int]) -> dict[int, int]:
    """Steps from the player to each reachable cell."""
    walls, steps = room.walls, room.steps
    far = {player: 0}
    frontier = [player]
    for cell in frontier:
        for step in steps:
            beside = cell + step
            if beside not in far and not walls[beside] and beside not in boxes:
                far[beside] = far[cell] + 1
                frontier.append(beside)
    return far


def _wedged(room: SokobanRoom, boxes: frozenset[int], pushed: int) -> bool:
    """True if the pushed box is in a 2 x 2 block of walls and boxes with a box off its target: a dead end."""
    walls, targets, columns = room.walls, room.targets, room.columns
    for corner in (pushed, pushed - 1, pushed - columns, pushed - columns - 1):
        block = (corner, corner + 1, corner + columns, corner + columns + 1)
        if all(walls[cell] or cell in boxes for cell in block) and any(
            cell in boxes and cell not in targets for cell in block
        ):
            return True
    return False


def _pushes(room: SokobanRoom, player: int, boxes: frozenset[int]) -> Iterator[tuple[int, int, int, frozenset[int]]]:
    """Reachable pushes that are no immediate dead end: walked steps, box's cell, direction, boxes after."""
    far = _walk(room, player, boxes)
    walls, steps = room.walls, room.steps
    for box in sorted(boxes):
        for direction, step in enumerate(steps):
            walked = far.get(box - step)
            beyond = box + step
            if walked is None or walls[beyond] or beyond in boxes:
                continue
            after = (boxes - {box}) | {beyond}
            if not _wedged(room, after, beyond):
                yield walked, box, direction, after


def solve(
    room: SokobanRoom, player: int, boxes: frozenset[int], *, limit: int = 20_000, weight: int = 1
) -> list[str] | None:
    """Directions that bring every box onto a target; None if `limit` positions were expanded without a plan.

    An A* search over pushes, with the number of moves as cost. The heuristic is the cheapest assignment of boxes to
    targets, each box alone in the room. It never exceeds the true cost, so a `weight` of 1 finds a shortest plan; a
    larger one finds some plan sooner.
    """
    tables = push_distances(room)
    start: Position = (player, boxes)
    bounds: dict[frozenset[int], int] = {boxes: _bound(boxes, tables)}
    if bounds[boxes] >= NEVER:
        return None
    cost = {start: 0}
    came: dict[Position, tuple[Position, int]] = {}
    # The heap orders by estimate, then by age: sets cannot be ordered.
    heap: list[tuple[int, int, int, Position]] = [(weight * bounds[boxes], 0, 0, start)]
    age = opened = 0
    while heap and opened < limit:
        _, _, spent, position = heapq.heappop(heap)
        if spent > cost[position]:
            continue
        if position[1] == room.targets:
            return _moves(room, came, start, position)
        opened += 1
        for walked, box, direction, after in _pushes(room, *position):
            if after not in bounds:
                bounds[after] = _bound(after, tables)
            total, reached = spent + walked + 1, (box, after)
            if bounds[after] < NEVER and total < cost.get(reached, NEVER):
                cost[reached] = total
                came[reached] = (position, direction)
                age += 1
                heapq.heappush(heap, (total + weight * bounds[after], age, total, reached))
    return None


def _moves(room: SokobanRoom, came: dict[Position, tuple[Position, int]], start: Position, end: Position) -> list[str]:
    pushes: list[tuple[Position, int, int]] = []
    while end != start:
        before, direction = came[end]
        pushes.append((before, end[0], direction))
        end = before
    words: list[str] = []
    for (player, boxes), box, direction in reversed(pushes):
        far = _walk(room, player, boxes)
        cell, way = box - room.steps[direction], [direction]
        while cell != player:
            way.append(next(d for d, step in enumerate(room.steps) if far.get(cell - step) == far[cell] - 1))
            cell -= room.steps[way[-1]]
        words += [DIRECTIONS[d] for d in reversed(way)]
    return words
