"""Countdown: reach a target with given numbers, in a few attempts with feedback. See README.md.

A round's text is its sorted numbers and its target, "3 5 8 -> 24". Its hash decides the round's split.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import spoken
from agentgym_envs.math.arithmetic import ArithmeticProblem, compute, numbers_of, parse, written
from agentgym_envs.settings import check_number
from agentgym_envs.splits import generated_tasks

FEWEST, MOST = 2, 5  # numbers in a round; the exhaustive solver takes a second for five
Term = tuple[Fraction, str]
OPERATORS = frozenset("+-*/")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def check_settings(min_count: int, max_count: int, max_number: int, max_target: int) -> None:
    check_number("countdown: min_count", min_count, FEWEST, MOST, whole=True)
    check_number("countdown: max_count", max_count, FEWEST, MOST, whole=True)
    check_number("countdown: max_number", max_number, 10, 1000, whole=True)
    check_number("countdown: max_target", max_target, 10, 1000, whole=True)
    if min_count > max_count:
        raise ValueError(f"countdown: min_count {min_count} is above max_count {max_count}")


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression of some of the numbers, each used at most once, that equals the target; None if there is none."""
    for amount in range(1, len(numbers) + 1):  # few numbers first: short expressions are found first
        for start in itertools.combinations([(Fraction(n), str(n)) for n in numbers], amount):
            found = _search(list(start), Fraction(target))
            if found is not None:
                return found[1:-1] if found.startswith("(") else found
    return None


def random_expression(numbers: Sequence[int], rng: random.Random) -> str:
    """A random valid expression of at least two of the numbers."""
    parts = [str(n) for n in rng.sample(list(numbers), rng.randint(2, len(numbers)))]
    while len(parts) > 1:
        left, right = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        parts.append(f"({left} {rng.choice('+-*/')} {right})")
    return parts[0][1:-1]


def _search(terms: list[Term], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in itertools.combinations(range(len(terms)), 2):
        rest = terms[:i] + terms[i + 1 : j] + terms[j + 1 :]
        for made in _combinations(terms[i], terms[j]):
            found = _search([*rest, made], target)
            if found is not None:
                return found
    return None


def _combinations(one: Term, other: Term) -> Iterator[Term]:
    """The terms that two terms combine to; only the nonnegative difference, since a sign can be applied later."""
    big, small = (one, other) if one[0] >= other[0] else (other, one)
    yield big[0] + small[0], f"({big[1]} + {small[1]})"
    yield big[0] - small[0], f"({big[1]} - {small[1]})"
    yield big[0] * small[0], f"({big[1]} * {small[1]})"
    if small[0]:
        yield big[0] / small[0], f"({big[1]} / {small[1]})"
    if big[0] and big[0] != small[0]:
        yield small[0] / big[0], f"({small[1]} / {big[1]})"


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
        check_settings(min_count, max_count, max_number, max_target)
        if tasks is None:
            tasks = self.default_tasks("train", min_count, max_count, max_number, max_target)
        super().__init__(tasks, max_turns, render_mode)

    @classmethod
    def default_tasks(
        cls, split: str = "train", min_count: int = 3, max_count: int = 4, max_number: int = 20, max_target: int = 100
    ) -> TaskSet:
        """Rounds drawn by seed. Train and test share no round, whatever the settings; test rounds are distinct."""
        check_settings(min_count, max_count, max_number, max_target)

        def propose(rng: random.Random) -> str | None:
            """A round whose target is the value of an expression of all its numbers; None if the draw failed."""
            numbers = [rng.randint(1, max_number) for _ in range(rng.randint(min_count, max_count))]
            values = [Fraction(n) for n in numbers]
            while len(values) > 1:
                left, right = values.pop(rng.randrange(len(values))), values.pop(rng.randrange(len(values)))
                values.append(rng.choice([value for value, _ in _combinations((left, ""), (right, ""))]))
            target = values[0]
            if target.denominator != 1 or not 1 <= target <= max_target or target in numbers:
                return None
            return f"{' '.join(str(n) for n in sorted(numbers))} -> {target}"

        def describe(text: str) -> tuple[int, dict[str, Any]]:
            given, _, target = text.partition(" -> ")
            numbers = [int(n) for n in given.split()]
            return int(target), {"numbers": numbers, "difficulty": len(numbers)}

        return generated_tasks("countdown", split, propose, str, describe=describe)

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
        text = spoken(self.read(action))
        numbers, target = self._round()
        tagged = _TAGGED.findall(text)
        lines = [line for line in text.splitlines() if line.strip()]
        expression = (tagged or lines or [""])[-1].partition("=")[0].strip()
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
