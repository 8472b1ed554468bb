"""What a server has counted since its start: of each environment, and in all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentgym.service.slots import TIME_BOUNDS, Slot


@dataclass
class Tally:
    """What one environment's sessions have counted.

    Attributes:
        opened, resumed: sessions; how often a client came back to one.
        ended: sessions, by why.
        counters: see `slots.COUNTERS`.
        errors: by code; those that workers answered, and those that the front said for workers that could not.
        times: how many steps took how long: see `Slot.times`.
    """

    opened: int = 0
    resumed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    times: list[int] = field(default_factory=lambda: [0] * (len(TIME_BOUNDS) + 1))

    def add(self, words: Slot) -> None:
        """Add what a worker has counted."""
        self.counters.update(words.counters())
        self.errors.update(words.errors())
        self.times = [mine + more for mine, more in zip(self.times, words.times(), strict=True)]

    def and_those(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.opened + other.opened,
            self.resumed + other.resumed,
            self.ended + other.ended,
            self.counters + other.counters,
            self.errors + other.errors,
            [mine + more for mine, more in zip(self.times, other.times, strict=True)],
        )


@dataclass
class Returns:
    """From the end of a limit that a session broke to its slot being free.

    Attributes:
        count: how many slots returned so.
        seconds: in all.
        longest: of one.
    """

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
