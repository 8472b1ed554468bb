"""FrozenLake: reach the goal over the ice. See README.md beside this file.

A level is text rows of P (player), G (goal), O (hole) and _ (ice).
"""

import random
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.grid import DIRECTIONS, LEGAL, in_rows, least_form, read_direction
from agentgym_envs.settings import check_choice, check_number
from agentgym_envs.splits import generated_tasks, level_of

PLAYER, GOAL, HOLE, ICE = "PGO_"
EDGE = "#"
UNREACHABLE = -1
RULES = "P you, G goal, O hole, _ ice. Reach G. Answer with up, down, left or right."
NEAR_RULES = (
    "Reach the goal. You see the corners around you (O hole, _ ice, # edge), open ways and where the goal is. "
    "Answer with up, down, left or right."
)
SLIPPERY = " You may slip sideways."
CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
_SIDEWAYS = ((2, 3), (2, 3), (0, 1), (0, 1))


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


def parse_level(level: str) -> tuple[str, list[tuple[int, int, int, int]], list[int]]:
    """The cells of a level (row by row, in one string), their `neighbours` and their `distances`."""
    rows = level.split("\n")
    cells = "".join(rows)
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(f"frozen_lake: the rows of a level must have equal length: {level!r}")
    if set(cells) - set("PGO_") or cells.count(PLAYER) != 1 or cells.count(GOAL) != 1:
        raise ValueError(f"frozen_lake: a level needs one P and one G, and otherwise only O and _: {level!r}")
    steps = neighbours(len(rows), len(rows[0]))
    away = distances(cells, steps)
    if away[cells.index(PLAYER)] == UNREACHABLE:
        raise ValueError(f"frozen_lake: no safe way from P to G in {level!r}")
    return cells, steps, away


class FrozenLake(Env):
    """Walk over the ice to the goal; a hole ends the episode."""

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.25,
        slippery: float = 0.0,
        view: str = "map",
        shaping: float = 0.0,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        check_settings(size, holes)
        check_number("frozen_lake: slippery", slippery, 0, 1)
        check_number("frozen_lake: shaping", shaping, -100, 100)
        check_choice("frozen_lake: view", view, ("map", "near"))
        if tasks is None:
            tasks = self.default_tasks("train", size=size, holes=holes)
        super().__init__(tasks, size * 5 // 2 if max_turns is None else max_turns, render_mode)
        self.slippery = slippery
        self.view = view
        self.shaping = shaping

    @classmethod
    def default_tasks(cls, split: str = "train", size: int = 4, holes: float = 0.25) -> TaskSet:
        """Levels whose goal is 2 to 2 * size safe moves away from the player, who starts in a corner."""
        check_settings(size, holes)
        total = size * size
        steps = neighbours(size, size)

        def propose(rng: random.Random) -> str | None:
            """P in a corner, G anywhere."""
            start, goal = rng.choice((0, size - 1, total - size, total - 1)), rng.randrange(total)
            signs = [HOLE if rng.random() < holes else ICE for _ in range(total)]
            if start == goal:
                return None
            signs[start], signs[goal] = PLAYER, GOAL
            return in_rows(signs, size)

        def content(level: str) -> str:
            """The map without the player, equal for rotated and mirrored maps."""
            return least_form(level.replace(PLAYER, ICE))

        def accept(level: str) -> bool:
            cells = level.replace("\n", "")
            return 2 <= distances(cells, steps)[cells.index(PLAYER)] <= 2 * size

        return generated_tasks("frozen_lake", split, propose, content, accept, identity=least_form)

    def init(self, task: Task) -> None:
        level = level_of(task, "frozen_lake")
        cells, self._steps, self._away = parse_level(level)
        self._columns = level.index("\n") if "\n" in level else len(level)
        self._start, self._goal = cells.index(PLAYER), cells.index(GOAL)
        self._cells = list(cells.replace(PLAYER, ICE))
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._at = self._start
        self._invalid = 0
        self._slips = random.Random(f"{self.current_task.seed}/{seed}")
        rules = (RULES if self.view == "map" else NEAR_RULES) + (SLIPPERY if self.slippery else "")
        return [user(f"{rules}\n{self._seen()}")], {"distance": self._away[self._at]}

    def step(self, action: Action) -> Step:
        word = read_direction(self.read(action))
        if word is None:
            self._invalid += 1
            return self._outcome(f"invalid: {LEGAL}\n{self._seen()}", 0.0)
        before = self._at
        move = DIRECTIONS.index(word)
        if self.slippery and self._slips.random() < self.slippery:
            move = self._slips.choice(_SIDEWAYS[move])
        self._at = after = self._steps[before][move]
        if after == before:
            return self._outcome(f"wall\n{self._seen()}", 0.0)
        gain = self.shaping * (self._progress(after) - self._progress(before)) if self.shaping else 0.0
        sign = self._cells[after]
        if sign == GOAL:
            return self._outcome("You reached the goal.", 1.0 + gain, True, True)
        if sign == HOLE:
            return self._outcome("You fell into a hole.", gain, True)
        return self._outcome(self._seen(), gain)

    def expert_action(self) -> str:
        """The first move of a shortest safe path (ties: up, down, left, right). Ignores slips."""
        return min(ways := self._safe_ways(), key=ways.__getitem__)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(list(self._safe_ways()))

    def _safe_ways(self) -> dict[str, int]:
        """The moves onto ice or the goal, with the distance to the goal after each."""
        ways = zip(DIRECTIONS, self._steps[self._at], strict=True)
        return {word: self._away[cell] for word, cell in ways if cell != self._at and self._away[cell] >= 0}

    def _outcome(self, text: str, reward: float, terminated: bool = False, success: bool = False) -> Step:
        return self.outcome(text, reward, terminated, success=success, invalid=self._invalid)

    def _progress(self, cell: int) -> float:
        """Share of the path from start to goal that is done at `cell`; 0 in a hole."""
        return 0.0 if self._cells[cell] == HOLE else 1 - self._away[cell] / self._away[self._start]

    def _seen(self) -> str:
        columns = self._columns
        if self.view == "map":
            cells = self._cells.copy()
            cells[self._at] = PLAYER
            return in_rows(cells, columns, " ")
        rows = len(self._cells) // columns
        row, column = divmod(self._at, columns)

        def cell(down: int, right: int) -> str:
            r, c = row + down, column + right
            return self._cells[r * columns + c] if 0 <= r < rows and 0 <= c < columns else EDGE

        corners = " ".join(cell(*offset) for offset in CORNERS)
        ways = zip(DIRECTIONS, self._steps[self._at], strict=True)
        free = " ".join(word for word, beside in ways if beside != self._at and self._cells[beside] != HOLE)
        down, right = (a - b for a, b in zip(divmod(self._goal, columns), (row, column), strict=True))
        vertical = f" {'up' if down < 0 else 'down'} {abs(down)}" if down else ""
        sideways = f" {'left' if right < 0 else 'right'} {abs(right)}" if right else ""
        return f"corners {corners}\nopen {free}\ngoal{vertical}{sideways}"
