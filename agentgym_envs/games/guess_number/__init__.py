"""Guess a number, told after each guess where it lies. See README.md beside this file.

A level is the lowest and the highest number that it may be, and the number: "213 312 240".
"""

import random
import re
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.settings import check_number
from agentgym_envs.splits import generated_tasks, level_of

MOST = 999_999
_LEVEL = re.compile(r"([0-9]{1,6}) ([0-9]{1,6}) ([0-9]{1,6})")
_GROUPED = re.compile(r"(?<![\w.])(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?!\w|,[0-9])")  # 1,234
_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,6}(?!\w|\.[0-9])")


class GuessNumber(Env):
    """Find a number in a range; each guess is told to be too low or too high."""

    def __init__(
        self,
        width: int = 100,
        highest: int = 1000,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        if tasks is None:
            tasks = self.default_tasks("train", width, highest)
        super().__init__(tasks, width.bit_length() if max_turns is None else max_turns, render_mode)

    @classmethod
    def default_tasks(cls, split: str = "train", width: int = 100, highest: int = 1000) -> TaskSet:
        check_number("guess_number: width", width, 4, MOST, whole=True)
        check_number("guess_number: highest", highest, width, MOST, whole=True)

        def propose(rng: random.Random) -> str:
            low = rng.randint(1, highest - width + 1)
            return f"{low} {low + width - 1} {rng.randrange(low, low + width)}"

        return generated_tasks("guess_number", split, propose, content=str)

    def init(self, task: Task) -> None:
        level = level_of(task, "guess_number")
        found = _LEVEL.fullmatch(level)
        self._range, self._answer = range(0), -1
        if found is not None:
            low, high, self._answer = map(int, found.groups())
            self._range = range(low, high + 1)
        if self._answer not in self._range:
            raise ValueError(
                f'guess_number: a level is like "1 100 42" (lowest, highest, the number), not {level!r:.50}'
            )
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._left = self._range  # what the guesses so far leave
        self._invalid = 0
        return [user(f"Guess a number from {self._told()} in {self.max_turns} turns. Answer with one number.")], {}

    def step(self, action: Action) -> Step:
        text = self.read(action)
        if self._range[-1] >= 1000:  # else "100,200" can only be a list
            text = _GROUPED.sub(lambda grouped: grouped[0].replace(",", ""), text)
        found = _NUMBER.findall(text)
        guess = int(found[-1]) if found else -1
        if guess not in self._range:
            self._invalid += 1
            return self._outcome(f"invalid: answer with a number from {self._told()}")
        if guess == self._answer:
            return self._outcome(f"Correct: {guess}.", found=True)
        if guess < self._answer:
            self._left = range(max(self._left.start, guess + 1), self._left.stop)
            return self._outcome(f"{guess} is too low")
        self._left = range(self._left.start, min(self._left.stop, guess))
        return self._outcome(f"{guess} is too high")

    def expert_action(self) -> str:
        """The middle of what is left: it finds every number in `width.bit_length()` guesses."""
        return str(self._left[(len(self._left) - 1) // 2])

    def random_action(self, rng: random.Random) -> str:
        return str(rng.choice(self._range))

    def _told(self) -> str:
        return f"{self._range[0]} to {self._range[-1]}"

    def _outcome(self, text: str, found: bool = False) -> Step:
        """After the last guess the game is lost (terminated), not truncated."""
        over = found or self.turn >= self.max_turns
        if over and not found:
            text = f"{text}\nOut of turns: the number was {self._answer}."
        return self.outcome(text, float(found), over, success=found, invalid=self._invalid)
