"""Shared memory of server and workers: each session's state, since when, and its counters; and their sums.

A worker only writes words, so a step costs no message; the server polls all slots many times a second. The memory
outlives its worker, so that hung and killed workers can be seen too.
"""

import mmap
import os
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentgym.service.protocol.frames import CODES, ENV_ERROR

# A worker's state. FREE: no worker.
FREE, INIT, RESET, STEP, CLOSE, WAITING, READING, WRITING, DETACHED = range(9)
CALLING = (INIT, RESET, STEP, CLOSE)
STATE_NAMES = ("free", "init", "reset", "step", "close", "waiting", "reading", "writing", "detached")
# Upper bounds of the histograms' buckets, in microseconds.
TIME_BOUNDS = (100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 10**6, 5 * 10**6, 3 * 10**7)
_BUCKETS = len(TIME_BOUNDS) + 1

# Words of a slot: counters from STEPS on only ever rise.
_STATE, SINCE = 0, 1
STEPS, EPISODES, REQUESTS, BYTES_IN, BYTES_OUT = range(2, 7)
# Why the worker ended its session: 1 + the index of the code in `frames.CODES`; 0: in good order, or not by the worker.
WHY = 7
# Which of its connections the worker serves, counted from 1, and what REQUESTS was when that began.
CONNECTION, REQUESTS_THEN = 8, 9
_ERRORS = 10  # answered errors: a word for each code
_TIMES = {name: 26 + n * (_BUCKETS + 1) for n, name in enumerate(("step", "reset", "open"))}  # sum and histogram
_SANDBOX = _TIMES["open"] + _BUCKETS + 1  # thousandths of a processor, bytes of memory, and 1, of the session's sandbox
WORDS = 80  # whole cache lines, so that no two workers write to one
_BYTES = 8 * WORDS
_ZEROS = memoryview(array("Q", [0] * WORDS))
_NAMES = ("steps", "episodes", "requests", "received_bytes", "sent_bytes")
_CODES = {code: _ERRORS + index for index, code in enumerate(CODES)}


def make_memory(slots: int) -> int:
    """A file descriptor of memory for this many slots, all free."""
    memory = os.memfd_create("agentgym-slots")
    os.ftruncate(memory, max(slots * _BYTES, mmap.PAGESIZE))
    return memory


def map_memory(memory: int) -> memoryview:
    """The memory of `make_memory`, as 8-byte words."""
    return memoryview(mmap.mmap(memory, os.fstat(memory).st_size)).cast("Q")


class Counts:
    """The counters among the words of a session, or the sums of many."""

    __slots__ = ("words",)

    def __init__(self, words: memoryview | list[int]):
        self.words = words

    def count_time(self, what: str, nanoseconds: int) -> None:
        """Add the duration of a "step", "reset" or "open", which makes the environment."""
        first = _TIMES[what]
        self.words[first] += nanoseconds
        self.words[first + 1 + bisect_left(TIME_BOUNDS, -(-nanoseconds // 1000))] += 1

    def count_error(self, code: str) -> None:
        self.words[_CODES[code]] += 1

    @property
    def counters(self) -> dict[str, int]:
        return {**dict(zip(_NAMES, self.words[STEPS:WHY], strict=True)), "env_errors": self.words[_CODES[ENV_ERROR]]}

    @property
    def errors(self) -> dict[str, int]:
        return {code: count for code, word in _CODES.items() if (count := self.words[word])}

    def times(self, what: str) -> tuple[float, list[int]]:
        """All seconds of `what`, and their histogram: one count for each of `TIME_BOUNDS`, and one for longer times."""
        first = _TIMES[what]
        return self.words[first] / 1e9, list(self.words[first + 1 : first + 1 + _BUCKETS])


class Slot(Counts):
    """The words of one session."""

    __slots__ = ("_all",)

    def __init__(self, memory: memoryview, index: int):
        super().__init__(memory[index * WORDS : (index + 1) * WORDS])
        self._all = memory

    def enter(self, state: int) -> int:
        """Enter a state; returns the time in nanoseconds of the monotonic clock."""
        words = self.words
        # The time goes first: a reader of state and then time never takes a new state for an old one.
        now = words[SINCE] = time.monotonic_ns()
        words[_STATE] = state
        return now

    def look(self) -> tuple[int, float]:
        state = self.words[_STATE]
        return state, (time.monotonic_ns() - self.words[SINCE]) / 1e9

    def clear(self) -> None:
        self.words[:] = _ZEROS

    def reserve_sandbox(self, amounts: Sequence[int], most: Sequence[int]) -> bool:
        """Reserve thousandths of a processor, bytes of memory, and 1, until the session ends; False: there are too few.

        `most`: limits of each for the sandboxes of all sessions together; 0: no limit.
        """
        own = slice(_SANDBOX, _SANDBOX + 3)
        # Written before the others are counted: of two that come at once, one may be refused, but never are both taken.
        self.words[own] = memoryview(array("Q", amounts))
        for word, limit in enumerate(most, _SANDBOX):
            if limit and sum(self._all[word::WORDS]) > limit:
                self.words[own] = _ZEROS[:3]
                return False
        return True


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


DELAY_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0)
"""In seconds."""


@dataclass
class Delays:
    """A histogram of delays of the server itself by `DELAY_BOUNDS`, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DELAY_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(DELAY_BOUNDS, seconds)] += 1
        self.seconds += seconds
