"""Tic-tac-toe against an opponent. See README.md beside this file.

A board is nine signs (X, O or _), row by row; cells are numbered 1 to 9. An opponent is also a text, "<starter> <order>
<care>", such as "O 381952476 01101": who moves first; its preference among cells; and for each of its moves 1 for
optimal play (ties by preference) or 0 for the most preferred free cell. With a random order, a careless move is uniform
over the free cells.
"""

import random
import re
from functools import cache
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.games.grid import in_rows, orders
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import generated_tasks, level_of

AGENT, OPPONENT, FREE = "XO_"
OTHER = {AGENT: OPPONENT, OPPONENT: AGENT}
EMPTY = FREE * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OPPONENTS = {"random": 0.0, "minimax": 1.0, "mix": 0.5}  # chance of each move to be chosen with care
PREFERRED = (5, 1, 3, 7, 9, 2, 4, 6, 8)  # the expert's ties: centre, corners, edges
_RULES = "Tic-tac-toe: you are {}, the opponent is {}. Three in a row wins. Answer with the number of a free cell."
RULES = _RULES.format(AGENT, OPPONENT)
_OPPONENT = re.compile("([XO]) ([1-9]{9}) ([01]{5})")
_CELL = re.compile(r"\b[1-9]\b")
_ENDINGS = {AGENT: ("You win.", 1.0), OPPONENT: ("You lose.", 0.0), None: ("Draw.", 0.5)}


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
    return max(-value(placed(board, cell, mover), OTHER[mover]) for cell in free_cells(board))


def best_cell(board: str, mover: str, order: tuple[int, ...]) -> int:
    free = (cell for cell in order if board[cell - 1] == FREE)
    return min(free, key=lambda cell: value(placed(board, cell, mover), OTHER[mover]))


def rules_for(sign: str) -> str:
    return _RULES.format(sign, OTHER[sign])


def grid(board: str) -> str:
    signs = [str(cell) if sign == FREE else sign for cell, sign in enumerate(board, start=1)]
    return in_rows(signs, 3, " ")


def read_cell(text: str, board: str) -> tuple[int | None, str]:
    """The free cell that a reply names last; else None, and what to tell the player."""
    found = _CELL.findall(text)
    cell = int(found[-1]) if found else None
    if cell is not None and board[cell - 1] == FREE:
        return cell, ""
    legal = " ".join(str(free) for free in free_cells(board))
    return None, f"{'invalid' if cell is None else 'taken'}: answer one of {legal}\n{grid(board)}"


def is_over(board: str) -> bool:
    return FREE not in board or winner(board) is not None


def answer_to(board: str, order: tuple[int, ...], care: tuple[bool, ...]) -> str:
    """The board after the move of a scripted opponent."""
    if care[board.count(OPPONENT)]:
        return placed(board, best_cell(board, OPPONENT, order), OPPONENT)
    return placed(board, next(cell for cell in order if board[cell - 1] == FREE), OPPONENT)


def parse_opponent(level: str) -> tuple[str, tuple[int, ...], tuple[bool, ...]]:
    found = _OPPONENT.fullmatch(level)
    if found is None or len(set(found[2])) < 9:
        raise ValueError(f'tic_tac_toe: a level is like "O 381952476 01101" (starter, order, care), not {level!r}')
    return found[1], tuple(map(int, found[2])), tuple(digit == "1" for digit in found[3])


def content(level: str) -> str:
    """An opponent's text, equal for opponents that play alike on a rotated or mirrored board."""
    starter, order, care = level.split(" ")
    forms = ("".join(str(way[int(cell) - 1] + 1) for cell in order) for way, _ in orders(3, 3))
    return f"{starter} {min(forms)} {care if starter == OPPONENT else care[:4]}"  # if X begins, O moves four times


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

        def propose(rng: random.Random) -> str:
            order = "".join(rng.sample("123456789", 9))
            starter = rng.choice("XO")
            return f"{starter} {order} {''.join(str(int(rng.random() < OPPONENTS[opponent])) for _ in range(5))}"

        return generated_tasks("tic_tac_toe", split, propose, content)

    def init(self, task: Task) -> None:
        self._starter, self._order, self._care = parse_opponent(level_of(task, "tic_tac_toe"))
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._board = EMPTY
        self._invalid = 0
        if self._starter == OPPONENT:
            self._board = answer_to(self._board, self._order, self._care)
        return [user(f"{RULES}\n{grid(self._board)}")], {}

    def step(self, action: Action) -> Step:
        cell, wrong = read_cell(self.read(action), self._board)
        if cell is None:
            self._invalid += 1
            return self._outcome(wrong, 0.0, False, False)
        self._board = placed(self._board, cell, AGENT)
        if not is_over(self._board):
            self._board = answer_to(self._board, self._order, self._care)
        if not is_over(self._board):
            return self._outcome(grid(self._board), 0.0, False, False)
        text, reward = _ENDINGS[winner(self._board)]
        return self._outcome(text, reward, True, reward > 0)

    def expert_action(self) -> str:
        """A perfect move that wins soonest; ties by centre, corners, edges. Never loses."""
        return str(best_cell(self._board, AGENT, PREFERRED))

    def random_action(self, rng: random.Random) -> str:
        return str(rng.choice(free_cells(self._board)))

    def _outcome(self, text: str, reward: float, terminated: bool, success: bool) -> Step:
        return self.outcome(text, reward, terminated, success=success, invalid=self._invalid)
