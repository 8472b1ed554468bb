"""Shared memory of server and workers: each session's state, since when, and its counters.

A worker only writes words, so a step costs no message; the server polls all slots many times a second. The memory outlives its
worker, so that hung and killed workers can be seen too.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from agentgym.service.protocol.frames import CODES, ENV_ERROR

# What a worker is in. FREE: no worker.
FREE, INIT, RESET, STEP, CLOSE, WAITING, READING, WRITING, DETACHED = range(9)
CALLING = (INIT, RESET, STEP, CLOSE)
STATE_NAMES = ("free", "init", "reset", "step", "close", "waiting", "reading", "writing", "detached")

# Words of a slot: counters from STEPS on only ever rise.
_STATE, _SINCE = 0, 1
STEPS, EPISODES, REQUESTS, BYTES_IN, BYTES_OUT, STEP_NS = range(2, 8)
# Why the worker ended its session: 1 + the place of the code in `frames.CODES`; 0: in good order, or not by the worker.
WHY = 8
# Which of its connections the worker serves, counted from 1, and what REQUESTS was when that began.
CONNECTION, REQUESTS_THEN = 9, 10
# A word for each code: errors that were answered. Then one for each bound of a step's time: how many took as long, or less
# but longer than the bound before; the last is for what took longer than all of them. Then as many for resets, their time in
# all, and how long the session took to open.
ERRORS, TIMES, RESET_TIMES, RESET_NS, OPEN_NS = 11, 27, 42, 57, 58
TIME_BOUNDS = (
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    5_000_000,
    30_000_000,
)
"""In microseconds."""
COUNTERS = {
    "steps": STEPS,
    "episodes": EPISODES,
    "requests": REQUESTS,
    "received_bytes": BYTES_IN,
    "sent_bytes": BYTES_OUT,
    "step_nanoseconds": STEP_NS,
    "reset_nanoseconds": RESET_NS,
    "open_nanoseconds": OPEN_NS,
}
_PLACES = {code: place for place, code in enumerate(CODES)}
# What the session's sandbox may use: thousandths of a processor, bytes of memory, and 1.
_SANDBOX, _SANDBOX_END = 59, 62
_WORDS = 64  # whole cache lines, so that no two workers write to one
_BYTES = 8 * _WORDS


def make_memory(slots: int) -> int:
    """A file descriptor of memory for this many slots, all free."""
    memory = os.memfd_create("agentgym-slots")
    os.ftruncate(memory, max(slots * _BYTES, mmap.PAGESIZE))
    return memory


def map_memory(memory: int) -> memoryview:
    """The memory of `make_memory`, as 8-byte words."""
    return memoryview(mmap.mmap(memory, os.fstat(memory).st_size)).cast("Q")


class Slot:
    """The words of one session."""

    __slots__ = ("_all", "words")

    def __init__(self, memory: memoryview, index: int):
        self._all = memory
        self.words = memory[index * _WORDS : (index + 1) * _WORDS]

    def enter(self, state: int) -> int:
        """Enter a state; returns the time in nanoseconds of the monotonic clock."""
        words = self.words
        # The time goes first: who reads the state before the time never takes a new state for an old one.
        now = words[_SINCE] = time.monotonic_ns()
        words[_STATE] = state
        return now

    def look(self) -> tuple[int, float]:
        """The state, and its age in seconds."""
        state = self.words[_STATE]
        return state, (time.monotonic_ns() - self.words[_SINCE]) / 1e9

    def since(self) -> int:
        return self.words[_SINCE]

    def clear(self) -> None:
        for word in range(_WORDS):
            self.words[word] = 0

    def reserve_sandbox(self, amounts: Sequence[int], most: Sequence[int]) -> bool:
        """Reserve resources for a sandbox until the session ends; False: there are too few.

        Args:
            amounts: thousandths of a processor, bytes of memory, 1.
            most: limits of each for the sandboxes of all sessions together; 0: no limit.
        """
        own = self.words
        # Said before the others are counted: of two that come at once, one may be refused for nothing, and never are both taken.
        own[_SANDBOX:_SANDBOX_END] = memoryview(array("Q", amounts))
        for place, limit in enumerate(most):
            if limit and sum(self._all[_SANDBOX + place :: _WORDS]) > limit:
                own[_SANDBOX:_SANDBOX_END] = memoryview(array("Q", (0, 0, 0)))
                return False
        return True

    def count_step(self, nanoseconds: int) -> None:
        words = self.words
        words[STEPS] += 1
        words[STEP_NS] += nanoseconds
        words[TIMES + _place(nanoseconds)] += 1

    def count_reset(self, nanoseconds: int) -> None:
        self.words[RESET_NS] += nanoseconds
        self.words[RESET_TIMES + _place(nanoseconds)] += 1

    def count_error(self, code: str) -> None:
        self.words[ERRORS + _PLACES[code]] += 1

    def counters(self) -> dict[str, int]:
        words = self.words
        found = {name: words[word] for name, word in COUNTERS.items()}
        return {**found, "env_errors": words[ERRORS + _PLACES[ENV_ERROR]]}

    def errors(self) -> dict[str, int]:
        """Error responses by code, without zeros."""
        return {code: count for code, place in _PLACES.items() if (count := self.words[ERRORS + place])}

    def times(self) -> list[int]:
        """Histogram of step times: one count for each of `TIME_BOUNDS`, and one for longer times."""
        return list(self.words[TIMES : TIMES + len(TIME_BOUNDS) + 1])

    def reset_times(self) -> list[int]:
        return list(self.words[RESET_TIMES : RESET_TIMES + len(TIME_BOUNDS) + 1])

    def open_times(self) -> list[int]:
        found = [0] * (len(TIME_BOUNDS) + 1)
        if taken := self.words[OPEN_NS]:
            found[_place(taken)] = 1
        return found


def _place(nanoseconds: int) -> int:
    return bisect_left(TIME_BOUNDS, -(-nanoseconds // 1000))
