"""Policies of one endpoint share its connections, and a limiter that holds back the share of requests that it refuses."""

from __future__ import annotations

import asyncio
import math
import random
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
# Shares of refused requests: up to TOLERATED only the refused wait, above MOST all wait.
TOLERATED, MOST = 0.1, 0.5
REMEMBERED = 50
_Loop = asyncio.AbstractEventLoop
_sessions: weakref.WeakKeyDictionary[_Loop, tuple[aiohttp.ClientSession, Any]] = weakref.WeakKeyDictionary()
_limiters: weakref.WeakKeyDictionary[_Loop, dict[str, ConcurrencyLimiter]] = weakref.WeakKeyDictionary()


async def session() -> aiohttp.ClientSession:
    """This event loop's session. It lives in an async generator, which the loop closes when it shuts down."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        life = _session_life()
        _sessions[loop] = (await anext(life), life)
    return _sessions[loop][0]


async def _session_life() -> AsyncGenerator[aiohttp.ClientSession, None]:
    import aiohttp

    # The loop that runs the episodes bounds how many requests are open, so the pool does not.
    made = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    try:
        yield made
    finally:
        # Both hold the loop, which would else stay as long as the process.
        _sessions.pop(asyncio.get_running_loop(), None)
        _limiters.pop(asyncio.get_running_loop(), None)
        await made.close()


def limiter_of(url: str) -> ConcurrencyLimiter:
    return _limiters.setdefault(asyncio.get_running_loop(), {}).setdefault(url, ConcurrencyLimiter())


class ConcurrencyLimiter:
    """Bounds the requests that an endpoint is sent at a time. A refused one waits as long as the endpoint asks; the others

    - go on if at most a tenth of the last answers were refusals, which is no sign of overload;
    - run one less at a time for each refusal, if there are more;
    - wait too, if most are refused.

    Each answer lets more in: one more up to half of what ran before an overload, from there a tenth, so that at the limit
    of the endpoint about a tenth is refused.

    Attributes:
        limit: requests at a time.
        running: requests that were sent and not yet answered.
        answers: answered requests.
        share: of refusals among the last answers.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self.running = 0
        self.answers = 0
        self._loop = asyncio.get_running_loop()
        self.share = 0.0
        self._told = 0  # requests that were answered or refused
        self._quick = math.inf  # the limit up to which each answer lets one more in
        self._opens = self._narrowed = -math.inf
        self._queue: deque[asyncio.Future[None]] = deque()

    async def enter(self, again: bool = False) -> float:
        """Wait until a request may be sent, until `leave`; returns the seconds waited. A retry goes before new requests."""
        if not self._queue and self._has_place():
            self.running += 1
            return 0.0
        started = self._loop.time()
        place = self._loop.create_future()
        if again:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # it was given a place that it cannot take any more
            raise
        return self._loop.time() - started

    def leave(self) -> None:
        self.running -= 1
        self._admit()

    def answered(self) -> None:
        """A request was answered, so the endpoint may take more at a time."""
        self._tell(0.0)
        self.limit += 1.0 if self.limit < self._quick else TOLERATED
        self.answers += 1

    def refused(self, sent: float, wait: float) -> None:
        """The endpoint refused a request, sent at this time, as too many. If it refuses most, nothing is sent for `wait` seconds."""
        now = self._loop.time()
        self._tell(1.0)
        if self.share > TOLERATED:
            if sent >= self._narrowed:  # requests that were sent before are of the same overload
                self._quick = max(1.0, self.running / 2)
                self._narrowed = now
            self.limit = max(1.0, min(self.limit, self.running) - 1)
        if self.share > MOST:
            self._opens = max(self._opens, now + wait)
            self._loop.call_at(self._opens + 0.001, self._admit)

    def _tell(self, refused: float) -> None:
        """A running mean: of all answers at first, later exponentially weighted."""
        self._told = min(self._told + 1, REMEMBERED)
        self.share += (refused - self.share) / self._told

    def _has_place(self) -> bool:
        return self.running < self.limit and self._loop.time() >= self._opens

    def _admit(self) -> None:
        while self._queue and self._has_place():
            place = self._queue.popleft()
            if not place.done():
                self.running += 1
                place.set_result(None)


def backoff(tries: int) -> float:
    """Seconds to wait after so many tries: exponential, with jitter."""
    return min(FIRST_WAIT * 2 ** (tries - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
