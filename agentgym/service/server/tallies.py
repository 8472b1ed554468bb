"""Counts since the server's start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from agentgym.service.server.slots import WORDS, Counts


class SessionCounts(Counts):
    """Counts of one environment's sessions: opened, resumed, ended by reason, and the sums of their slots."""

    def __init__(self) -> None:
        super().__init__([0] * WORDS)
        self.opened = 0
        self.resumed = 0
        self.ended: Counter[str] = Counter()

    def add(self, other: Counts) -> None:
        self.words = [mine + more for mine, more in zip(self.words, other.words, strict=True)]
        if isinstance(other, SessionCounts):
            self.opened += other.opened
            self.resumed += other.resumed
            self.ended += other.ended


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
    """Delays of the server's event loop, for which every request waits: a histogram by `LAG_BOUNDS`, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LAG_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LAG_BOUNDS, seconds)] += 1
        self.seconds += seconds
