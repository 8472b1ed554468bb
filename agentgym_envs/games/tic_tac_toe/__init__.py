"""Tic-tac-toe against an opponent. See README.md beside this file."""

from __future__ import annotations

import random
import re
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.grid import in_rows
from agentgym_envs.games.tic_tac_toe.board import (
    AGENT,
    EMPTY,
    FREE,
    OPPONENT,
    OPPONENTS,
    PREFERRED,
    best_cell,
    content,
    free_cells,
    make_opponent,
    parse_opponent,
    placed,
    winner,
)
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import generated_tasks, level_of

RULES = "Tic-tac-toe: you are X, the opponent is O. Three in a row wins. Answer with the number of a free cell."
_CELL = re.compile(r"\b[1-9]\b")
_ENDINGS = {AGENT: ("You win.", 1.0), OPPONENT: ("You lose.", 0.0), None: ("Draw.", 0.5)}


class TicTacToe(Env):
    """Tic-tac-toe as X against a scripted opponent. The task says who begins and how O plays."""

    max_turns = 9  # at most five moves and four mistakes

    def __init__(
        self,
        opponent: str = "random",
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        check_choice("tic_tac_toe: opponent", opponent, OPPONENTS)
        super().__init__(self.default_tasks("train", opponent) if tasks is None else tasks, max_turns, render_mode)

    @classmethod
    def default_tasks(cls, split: str = "train", opponent: str = "random") -> TaskSet:
        check_choice("tic_tac_toe: opponent", opponent, OPPONENTS)
        return generated_tasks(
            "tic_tac_toe", split, lambda seed, is_taken: make_opponent(seed, split, opponent, is_taken), content
        )

    def init(self, task: Task) -> None:
        self._starter, self._order, self._care = parse_opponent(level_of(task, "tic_tac_toe"))
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._board = EMPTY
        self._invalid = 0
        if self._starter == OPPONENT:
            self._answer()
        return [user(f"{RULES}\n{self._grid()}")], {}

    def step(self, action: Action) -> Step:
        found = _CELL.findall(self.read(action))
        cell = int(found[-1]) if found else None
        if cell is None or self._board[cell - 1] != FREE:
            self._invalid += 1
            wrong = "invalid" if cell is None else "taken"
            legal = " ".join(str(free) for free in free_cells(self._board))
            return self._outcome(f"{wrong}: answer one of {legal}\n{self._grid()}", 0.0, False, False)
        self._board = placed(self._board, cell, AGENT)
        if not self._over():
            self._answer()
        if not self._over():
            return self._outcome(self._grid(), 0.0, False, False)
        champion = winner(self._board)
        text, reward = _ENDINGS[champion]
        return self._outcome(text, reward, True, champion != OPPONENT)

    def expert_action(self) -> str:
        """A perfect move that wins soonest; ties by centre, corners, edges. Never loses."""
        return str(best_cell(self._board, AGENT, PREFERRED))

    def random_action(self, rng: random.Random) -> str:
        return str(rng.choice(free_cells(self._board)))

    def _answer(self) -> None:
        careful = self._care[self._board.count(OPPONENT)]
        if careful:
            cell = best_cell(self._board, OPPONENT, self._order)
        else:
            cell = next(cell for cell in self._order if self._board[cell - 1] == FREE)
        self._board = placed(self._board, cell, OPPONENT)

    def _over(self) -> bool:
        return FREE not in self._board or winner(self._board) is not None

    def _outcome(self, text: str, reward: float, terminated: bool, success: bool) -> Step:
        return self.outcome(text, reward, terminated, success=success, invalid=self._invalid)

    def _grid(self) -> str:
        signs = [str(cell) if sign == FREE else sign for cell, sign in enumerate(self._board, start=1)]
        return in_rows(signs, 3, " ")
