"""Sokoban: push every box onto a target. See README.md beside this file."""

import random
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.grid import DIRECTIONS, LEGAL, read_direction
from agentgym_envs.games.sokoban.levels import boxoban_levels, check_settings, generated_levels, longest
from agentgym_envs.games.sokoban.room import drawn, moved, parse_level, solve
from agentgym_envs.settings import check_number
from agentgym_envs.splits import level_of

RULES = (
    "# wall, _ floor, @ you, $ box, . target, * box on target, + you on target. "
    "Push every box onto a target. Answer with up, down, left or right."
)
BOXOBAN_TURNS = 200


class Sokoban(Env):
    """Push every box onto a target. Boxes are pushed one at a time and never pulled."""

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        walls: float = 0.25,
        levels: str = "generated",
        shaping: float = 0.0,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        check_settings(size, boxes, walls)
        check_number("sokoban: shaping", shaping, -100, 100)
        if tasks is None:
            tasks = self.default_tasks("train", size=size, boxes=boxes, walls=walls, levels=levels)
        if max_turns is None:
            max_turns = 2 * longest(size, boxes) if levels == "generated" else BOXOBAN_TURNS
        super().__init__(tasks, max_turns, render_mode)
        self.shaping = shaping

    @classmethod
    def default_tasks(
        cls, split: str = "train", size: int = 6, boxes: int = 1, walls: float = 0.25, levels: str = "generated"
    ) -> TaskSet:
        if levels == "generated":
            return generated_levels(split, size, boxes, walls)
        return boxoban_levels(levels, split)

    def init(self, task: Task) -> None:
        self._room, self._start, self._boxes_at_start = parse_level(level_of(task, "sokoban"))
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._player, self._boxes = self._start, self._boxes_at_start
        self._invalid = 0
        self._plan: list[str] | None = None
        self._lost = False
        self._length = len(self._planned() or ()) if self.shaping else 0
        return [user(f"{RULES}\n{self._grid()}")], {}

    def step(self, action: Action) -> Step:
        word = read_direction(self.read(action))
        if word is None:
            self._invalid += 1
            return self._outcome(f"invalid: {LEGAL}\n{self._grid()}", 0.0)
        after = moved(self._room, self._player, self._boxes, self._room.steps[DIRECTIONS.index(word)])
        if after is None:
            return self._outcome(f"blocked\n{self._grid()}", 0.0)
        before = self._progress()
        self._player, self._boxes = after
        # A plan stays valid while it is followed.
        self._plan = self._plan[1:] if self._plan and self._plan[0] == word else None
        gain = self.shaping * (self._progress() - before)
        if self._boxes == self._room.targets:
            return self._outcome("All boxes are on targets.", 1.0 + gain, True)
        return self._outcome(self._grid(), gain)

    def expert_action(self) -> str:
        """The next move of a plan; a deviation makes a new plan."""
        plan = self._planned()
        return plan[0] if plan else self._legal()[0]

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self._legal())

    def _planned(self) -> list[str] | None:
        """The moves that are left, the fewest with up to three boxes; None if no plan was found."""
        if self._plan is None and not self._lost:
            few = len(self._boxes) <= 3
            self._plan = solve(self._room, self._player, self._boxes, weight=1 if few else 3)
            self._lost = self._plan is None
        return self._plan

    def _progress(self) -> float:
        """Share of the first plan's moves that are no longer needed, at least 0; 0 without a plan or without shaping."""
        plan = self._planned() if self._length else None
        return 0.0 if plan is None else max(0.0, 1 - len(plan) / self._length)

    def _legal(self) -> list[str]:
        room = self._room
        ways = zip(DIRECTIONS, room.steps, strict=True)
        return [w for w, step in ways if moved(room, self._player, self._boxes, step)] or list(DIRECTIONS)

    def _outcome(self, text: str, reward: float, solved: bool = False) -> Step:
        return self.outcome(text, reward, solved, success=solved, invalid=self._invalid)

    def _grid(self) -> str:
        return drawn(self._room, self._player, self._boxes)
