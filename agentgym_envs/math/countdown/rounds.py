"""Rounds of Countdown: generation, text form, solver.

A round's text is its sorted numbers and its target, "3 5 8 -> 24". Its hash decides the round's split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from agentgym_envs.settings import check_number
from agentgym_envs.splits import IsTaken, draw, never

FEWEST, MOST = 2, 5  # numbers in a round; the exhaustive solver takes a second for five


@dataclass(frozen=True)
class Difficulty:
    min_count: int = 3
    max_count: int = 4
    max_number: int = 20
    max_target: int = 100

    def __post_init__(self) -> None:
        for name in ("min_count", "max_count"):
            check_number(f"countdown: {name}", getattr(self, name), FEWEST, MOST, whole=True)
        for name in ("max_number", "max_target"):
            check_number(f"countdown: {name}", getattr(self, name), 10, 1000, whole=True)
        if self.min_count > self.max_count:
            raise ValueError(f"countdown: min_count {self.min_count} is above max_count {self.max_count}")


def draw_round(seed: int, split: str, difficulty: Difficulty, is_taken: IsTaken = never) -> str:
    """The text of a seed's round, which has a solution that uses at least two numbers."""
    return draw(seed, split, lambda rng: _propose(rng, difficulty), content=str, is_taken=is_taken)


def parse_round(text: str) -> tuple[list[int], int]:
    numbers, _, target = text.partition(" -> ")
    return [int(n) for n in numbers.split()], int(target)


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression of some of the numbers, each used at most once, that equals the target; None if there is none."""
    for amount in range(1, len(numbers) + 1):  # few numbers first: short expressions are found first
        for start in _choices([(Fraction(n), str(n)) for n in numbers], amount):
            found = _search(start, Fraction(target))
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


Term = tuple[Fraction, str]


def _propose(rng: random.Random, difficulty: Difficulty) -> str | None:
    """A round whose target is the value of an expression of all its numbers; None if the draw failed."""
    count = rng.randint(difficulty.min_count, difficulty.max_count)
    numbers = [rng.randint(1, difficulty.max_number) for _ in range(count)]
    values = [Fraction(n) for n in numbers]
    while len(values) > 1:
        left, right = values.pop(rng.randrange(len(values))), values.pop(rng.randrange(len(values)))
        options = [value for value, _ in _combinations((left, ""), (right, ""))]
        values.append(rng.choice(options))
    target = values[0]
    if target.denominator != 1 or not 1 <= target <= difficulty.max_target or target in numbers:
        return None
    return f"{' '.join(str(n) for n in sorted(numbers))} -> {target}"


def _choices(terms: list[Term], amount: int) -> Iterator[list[Term]]:
    if amount == 0:
        yield []
        return
    for i in range(len(terms) - amount + 1):
        for rest in _choices(terms[i + 1 :], amount - 1):
            yield [terms[i], *rest]


def _search(terms: list[Term], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, one in enumerate(terms):
        for j in range(i + 1, len(terms)):
            rest = terms[:i] + terms[i + 1 : j] + terms[j + 1 :]
            for made in _combinations(one, terms[j]):
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
