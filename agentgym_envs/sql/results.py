"""Compares the rows of two query results.

Rows are compared as multisets: duplicates count, and order counts if requested. Some permutation of the columns must
match; column names are ignored. NULL equals only NULL. Numbers are equal by value: integers exactly, others within a
relative 1e-6 (near zero, an absolute 1e-9). Text is compared exactly, case included, and '3' is not 3.
"""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Value = None | int | float | str | bytes
Row = tuple[Value, ...]

RELATIVE, ABSOLUTE = 1e-6, 1e-9
# Columns laid on each other before a match is given up; a result in the gold's own order needs one each.
MAX_TRIES = 2_000


@dataclass(frozen=True)
class Segment:
    """Rows that the gold query leaves tied, so they may come in any order.

    `take` is how many of them the result has; fewer if LIMIT or OFFSET cuts through the ties, and then any subset is right.
    """

    rows: Sequence[Row]
    take: int


def same_result(segments: Sequence[Segment], found: Sequence[Row], columns: int, ordered: bool = False) -> bool:
    """True if a result matches the segments; a gold without an order is one segment."""
    gold = [row for segment in segments for row in segment.rows]
    if len(found) != sum(segment.take for segment in segments):
        return False
    if any(len(row) != columns for row in (*gold, *found)):
        return False
    return not found or _Matcher(segments, gold, found, ordered).match(
        0, frozenset(), [0] * len(gold), [0] * len(found)
    )


class _Matcher:
    def __init__(self, segments: Sequence[Segment], gold: Sequence[Row], found: Sequence[Row], ordered: bool):
        self.gold, self.found = list(zip(*gold, strict=True)), list(zip(*found, strict=True))
        self.sizes, self.ordered = [(len(segment.rows), segment.take) for segment in segments], ordered
        self.tries = MAX_TRIES
        self.classes = functools.cache(lambda ours, theirs: _classes(self.gold[ours], self.found[theirs]))
        self.alike = functools.cache(lambda ours, theirs: self._holds(*self.classes(ours, theirs)))

    def match(self, column: int, used: frozenset[int], gold: list[int], found: list[int]) -> bool:
        """Match each gold column from `column` on with an unused column of the result.

        `gold` and `found` number the classes of the rows by the columns so far; equal rows have equal numbers.
        """
        if column == len(self.gold):
            return True
        failed: list[tuple[Value, ...]] = []
        # The column at the same position first.
        for other in sorted(set(range(len(self.found))) - used, key=lambda place: (place != column, place)):
            if self.tries <= 0:
                return False
            if self.found[other] in failed or not self.alike(column, other):  # an equal column would fail too
                continue
            self.tries -= 1
            ours, theirs = self.classes(column, other)
            numbers: dict[Hashable, int] = {}
            gold_next = [numbers.setdefault(pair, len(numbers)) for pair in zip(gold, ours, strict=True)]
            found_next = [numbers.setdefault(pair, len(numbers)) for pair in zip(found, theirs, strict=True)]
            if self._holds(gold_next, found_next) and self.match(column + 1, used | {other}, gold_next, found_next):
                return True
            failed.append(self.found[other])
        return False

    def _holds(self, gold: Sequence[Hashable], found: Sequence[Hashable]) -> bool:
        """True if the found rows, each given as one value, can be drawn from the gold's segments."""
        place = at = 0
        cut: list[Counter[Hashable]] = []
        takes: list[int] = []
        rest = Counter(found)
        for size, take in self.sizes:
            pool = Counter(gold[place : place + size])
            place += size
            if self.ordered:
                if not Counter(found[at : at + take]) <= pool:
                    return False
                at += take
            elif take == size:
                rest.subtract(pool)
            else:
                cut.append(pool)
                takes.append(take)
        return self.ordered or (min(rest.values(), default=0) >= 0 and _can_be_dealt(+rest, cut, takes))


def _can_be_dealt(rest: Counter[Hashable], pools: list[Counter[Hashable]], takes: list[int]) -> bool:
    """True if rows can be drawn from the at most two segments that LIMIT and OFFSET cut."""
    if len(pools) < 2:
        return rest <= (pools[0] if pools else Counter())
    first, second = pools
    if any(count > first[row] + second[row] for row, count in rest.items()):
        return False
    least = sum(max(0, count - second[row]) for row, count in rest.items())
    most = sum(min(count, first[row]) for row, count in rest.items())
    return least <= takes[0] <= most


def _classes(ours: Sequence[Value], theirs: Sequence[Value]) -> tuple[list[Hashable], list[Hashable]]:
    numbers = {value for value in (*ours, *theirs) if isinstance(value, int | float)}
    exact = all(isinstance(value, int) or value.is_integer() for value in numbers)
    names: dict[int | float, Hashable] = {} if exact else _groups(numbers)

    def name(value: Value) -> Hashable:
        if isinstance(value, int | float):
            return names.get(value, value)
        return None if value is None else (type(value), value)

    return [name(value) for value in ours], [name(value) for value in theirs]


def _groups(numbers: set[int | float]) -> dict[int | float, Hashable]:
    """Maps each number to the smallest of a chain of numbers within tolerance."""
    named: dict[int | float, Hashable] = {}
    last: int | float = math.nan  # close to no number
    for number in sorted(numbers):
        close = math.isclose(number, last, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        named[number] = named[last] if close else number
        last = number
    return named
