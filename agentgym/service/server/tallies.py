"""Counts since the server's start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from agentgym.service.server.slots import TIME_BOUNDS, Slot


@dataclass
class SessionCounts:
    """Counts of one environment's sessions."""

    opened: int = 0
    resumed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    times: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))
    reset_times: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))
    open_times: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))

    def add(self, words: Slot) -> None:
        self.counters.update(words.counters())
        self.errors.update(words.errors())
        self.times = _sums(self.times, words.times())
        self.reset_times = _sums(self.reset_times, words.reset_times())
        self.open_times = _sums(self.open_times, words.open_times())

    def and_those(self, other: SessionCounts) -> SessionCounts:
        return SessionCounts(
            self.opened + other.opened,
            self.resumed + other.resumed,
            self.ended + other.ended,
            self.counters + other.counters,
            self.errors + other.errors,
            _sums(self.times, other.times),
            _sums(self.reset_times, other.reset_times),
            _sums(self.open_times, other.open_times),
        )


def _sums(one: list[int], other: list[int]) -> list[int]:
    return [mine + more for mine, more in zip(one, other, strict=True)]


@dataclass
class Returns:
    """Times from the end of a broken limit until the slot is free."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


LAG_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""In seconds."""


@dataclass
class Lags:
    """Delays of the server's event loop, for which every request waits."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LAG_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LAG_BOUNDS, seconds)] += 1
        self.seconds += seconds
