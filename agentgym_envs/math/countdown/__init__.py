"""Countdown: reach a target with given numbers, in a few attempts with feedback. See README.md."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import spoken
from agentgym_envs.math.arithmetic import ArithmeticProblem, compute, numbers_of, parse, written
from agentgym_envs.math.countdown.rounds import Difficulty, draw_round, parse_round, random_expression, solve
from agentgym_envs.splits import IsTaken, generated_tasks

OPERATORS = frozenset("+-*/")

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class Countdown(Env):
    """Reach a target with + - * / and given numbers, each used at most once."""

    max_turns = 3

    def __init__(
        self,
        min_count: int = 3,
        max_count: int = 4,
        max_number: int = 20,
        max_target: int = 100,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        settings = Difficulty(min_count, max_count, max_number, max_target)
        if tasks is None:
            tasks = self.default_tasks("train", **vars(settings))
        super().__init__(tasks, max_turns, render_mode)

    @classmethod
    def default_tasks(
        cls, split: str = "train", min_count: int = 3, max_count: int = 4, max_number: int = 20, max_target: int = 100
    ) -> TaskSet:
        """Rounds drawn by seed. Train and test share no round, whatever the settings; test rounds are distinct."""
        settings = Difficulty(min_count, max_count, max_number, max_target)

        def describe(text: str) -> tuple[int, dict[str, Any]]:
            numbers, target = parse_round(text)
            return target, {"numbers": numbers, "difficulty": len(numbers)}

        def make(seed: int, is_taken: IsTaken) -> str:
            return draw_round(seed, split, settings, is_taken)

        return generated_tasks("countdown", split, make, str, describe)

    def init(self, task: Task) -> None:
        numbers = task.metadata.get("numbers")
        if not isinstance(numbers, list | tuple) or len(numbers) < 2 or not all(_is_positive(n) for n in numbers):
            raise ValueError(
                f'task {task.id!r}: metadata["numbers"] must be two or more positive whole numbers, not {numbers!r}'
            )
        if not _is_positive(task.answer):
            raise ValueError(
                f"task {task.id!r}: the answer must be the target, a positive whole number, not {task.answer!r}"
            )
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        numbers, target = self._round()
        given = ", ".join(str(n) for n in numbers)
        text = (
            f"Make {target} from the numbers {given}. Use + - * / and parentheses, and each number at most once.\n"
            f"Put your expression between <answer> and </answer>, like this: <answer>(3 + 4) * 2</answer>\n"
            f"You have {self.max_turns} attempt{'s' * (self.max_turns > 1)}."
        )
        return [user(text)], {}

    def step(self, action: Action) -> Step:
        """Judge an expression. `info`: `success`, and `value` (text) if the expression has one."""
        text = self.read(action)
        numbers, target = self._round()
        expression = _expression_in(text)
        try:
            value = _value_of(expression, numbers)
        except ArithmeticProblem as problem:
            return self.outcome(f"Not valid: {problem}.{self._attempts()}", success=False)
        if value == target:
            return self.outcome("Correct.", 1.0, terminated=True, success=True, value=written(value))
        told = f"{expression} = {written(value)}, not {target}.{self._attempts()}"
        return self.outcome(told, success=False, value=written(value))

    def expert_action(self) -> str:
        numbers, target = self._round()
        found = solve(numbers, target)
        if found is None:
            raise ValueError(f"countdown: {numbers} cannot make {target}")
        return f"<answer>{found}</answer>"

    def random_action(self, rng: random.Random) -> str:
        return f"<answer>{random_expression(self._round()[0], rng)}</answer>"

    def _round(self) -> tuple[list[int], int]:
        return list(self.current_task.metadata["numbers"]), int(self.current_task.answer)

    def _attempts(self) -> str:
        left = self.max_turns - self.turn
        return f" {left} attempt{'s' * (left > 1)} left." if left else ""


def _expression_in(text: str) -> str:
    text = spoken(text)
    tagged = _TAGGED.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    expression = tagged[-1] if tagged else lines[-1] if lines else ""
    return expression.partition("=")[0].strip()


def _value_of(expression: str, numbers: list[int]) -> Fraction:
    node = parse(expression, OPERATORS)
    given = Counter(Fraction(n) for n in numbers)
    for number, times in Counter(numbers_of(node)).items():
        if number not in given:
            raise ArithmeticProblem(f"{written(number)} is not among the numbers")
        if times > given[number]:
            raise ArithmeticProblem(f"{written(number)} is used too often")
    return compute(node)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
