"""Guess a number, told after each guess where it lies. See README.md beside this file."""

import random
import re
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.settings import check_number
from agentgym_envs.splits import check_split, split_of

_NUMBER = re.compile(r"(?<![\w.])[0-9]+(?!\w|\.[0-9])")


class GuessNumber(Env):
    """Find a number from 1 to `highest`; each guess is told to be too low or too high."""

    def __init__(
        self,
        highest: int = 100,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        if tasks is None:
            tasks = self.default_tasks("train", highest)
        self.highest = highest
        super().__init__(tasks, highest.bit_length() if max_turns is None else max_turns, render_mode)

    @classmethod
    def default_tasks(cls, split: str = "train", highest: int = 100) -> TaskSet:
        """One task for each number; one number in eight is a test number."""
        check_split("guess_number", split)
        check_number("guess_number: highest", highest, 10, 10_000, whole=True)
        chosen = [number for number in range(1, highest + 1) if split_of(str(number)) == split]
        tasks = [Task(id=f"guess_number-{number}", answer=number, metadata={"split": split}) for number in chosen]
        return TaskSet(tasks, name=f"guess_number/{split}", source=f"highest={highest}").shuffled(0)

    def init(self, task: Task) -> None:
        if type(task.answer) is not int or not 1 <= task.answer <= self.highest:
            wanted = f"needs answer= a whole number from 1 to {self.highest}"
            raise ValueError(f"guess_number: task {task.id!r} {wanted}, not {task.answer!r}")
        self._answer = task.answer
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._low, self._high = 1, self.highest  # what the guesses so far leave
        self._invalid = 0
        rules = f"Guess a number from 1 to {self.highest} in {self.max_turns} turns. Answer with one number."
        return [user(rules)], {}

    def step(self, action: Action) -> Step:
        found = _NUMBER.findall(self.read(action))
        guess = int(found[-1]) if found and len(found[-1]) <= len(str(self.highest)) else 0
        if not 1 <= guess <= self.highest:
            self._invalid += 1
            return self._outcome(f"invalid: answer with a number from 1 to {self.highest}")
        if guess == self._answer:
            return self._outcome(f"Correct: {guess}.", found=True)
        if guess < self._answer:
            self._low = max(self._low, guess + 1)
            return self._outcome(f"{guess} is too low")
        self._high = min(self._high, guess - 1)
        return self._outcome(f"{guess} is too high")

    def expert_action(self) -> str:
        """The middle of what is left, which finds every number in `highest.bit_length()` guesses."""
        return str((self._low + self._high) // 2)

    def random_action(self, rng: random.Random) -> str:
        return str(rng.randint(1, self.highest))

    def _outcome(self, text: str, found: bool = False) -> Step:
        """After the last guess the game is lost (terminated), not truncated."""
        over = found or self.turn >= self.max_turns
        if over and not found:
            text = f"{text}\nOut of turns: the number was {self._answer}."
        return self.outcome(text, float(found), over, success=found, invalid=self._invalid)
