"""Tic-tac-toe in which both sides are players. See README.md beside this file."""

import random
import re
from typing import Any

from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action
from agentgym.core.players import PlayersEnv
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.tic_tac_toe import (
    AGENT,
    EMPTY,
    OPPONENT,
    OTHER,
    PREFERRED,
    TicTacToe,
    answer_to,
    best_cell,
    free_cells,
    grid,
    is_over,
    parse_opponent,
    placed,
    read_cell,
    rules_for,
    winner,
)
from agentgym_envs.settings import check_number
from agentgym_envs.splits import SEEDS, check_split, level_of

NAME = "tic_tac_toe_self"
MISTAKES = 4  # the most rejected replies of a player; one more loses the game
_START = re.compile("([XO]) ([1-9]{0,2})")


class TicTacToeSelf(PlayersEnv):
    """Tic-tac-toe of X against O, both players; where the task has a scripted opponent, X alone is asked."""

    players = (AGENT, OPPONENT)
    max_turns = 9 + 2 * MISTAKES

    def __init__(
        self,
        mistakes: int = MISTAKES,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        check_number(f"{NAME}: mistakes", mistakes, 0, MISTAKES, whole=True)
        self._allowed = mistakes
        super().__init__(tasks, max_turns, render_mode)

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """Starts to train on, and the perfect opponents of tic_tac_toe's test split."""
        check_split(NAME, split)
        if split == "test":
            return TicTacToe.default_tasks("test", "minimax")
        return TaskSet.generate(_start, SEEDS[split], name=f"{NAME}/{split}")

    def init(self, task: Task) -> None:
        level = level_of(task, NAME)
        start = _START.fullmatch(level)
        self._script: tuple[tuple[int, ...], tuple[bool, ...]] | None = None
        self._moves: list[int] = []
        if start is None or len(set(start[2])) < len(start[2]):
            self._starter, order, care = parse_opponent(level)
            self._script = order, care
        else:
            self._starter, self._moves = start[1], [int(cell) for cell in start[2]]
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._board, sign = EMPTY, self._starter
        for cell in self._moves:
            self._board, sign = placed(self._board, cell, sign), OTHER[sign]
        self._invalid = dict.fromkeys(self.players, 0)
        for player in [AGENT] if self._script else self.players:
            self.tell(rules_for(player), player)
        return self.opening(self._next(sign))

    def step(self, action: Action) -> Step:
        player = self.turn_of
        cell, wrong = read_cell(self.read(action), self._board)
        if cell is None:
            self._invalid[player] += 1
            if self._invalid[player] > self._allowed:
                return self._over(OTHER[player], f"{player} has made too many mistakes.")
            self.tell(wrong, player)
            return self.pass_to(player, success=False, invalid=sum(self._invalid.values()))
        self._board = placed(self._board, cell, player)
        following = OTHER[player] if is_over(self._board) else self._next(OTHER[player])
        if is_over(self._board):
            return self._over(winner(self._board))
        return self.pass_to(following, success=False, invalid=sum(self._invalid.values()))

    def expert_action(self) -> str:
        """A perfect move that wins soonest; ties by centre, corners, edges. Never loses."""
        return str(best_cell(self._board, self.turn_of, PREFERRED))

    def random_action(self, rng: random.Random) -> str:
        return str(rng.choice(free_cells(self._board)))

    def _next(self, sign: str) -> str:
        """Let a scripted opponent move if it is its turn, and show the next player the board."""
        if self._script is not None and sign == OPPONENT:
            self._board, sign = answer_to(self._board, *self._script), AGENT
        self.tell(grid(self._board), sign)
        return sign

    def _over(self, winning: str | None, why: str = "") -> Step:
        told = "Draw." if winning is None else f"{winning} wins."
        self.tell(f"{why} {told}".lstrip())
        rewards = {player: 0.5 if winning is None else float(player == winning) for player in self.players}
        return self.end(rewards, success=winning != OPPONENT, invalid=sum(self._invalid.values()))


def _start(seed: int) -> Task:
    """A game that begins with none, one or two moves by chance, so that no two games need be alike."""
    rng = random.Random(seed)
    cells = "".join(rng.sample("123456789", rng.randrange(3)))
    level = f"{rng.choice(AGENT + OPPONENT)} {cells}"
    return Task(f"{NAME}-train-{seed}", seed=seed, metadata={"split": "train", "level": level})
