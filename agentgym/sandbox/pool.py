"""Warm sandboxes, lent one at a time: `acquire`, use, `close`.

A pool makes a sandbox when somebody waits for one, keeps it when it is given back, resets it in the background and lends it
again. What died, or cannot be reset, is replaced. Making them is bounded: a few at a time, and after a failure one at a time
with a growing pause, for as long as somebody waits. The work is done by threads that start when there is some and end when
there is none.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agentgym.sandbox.api import Sandbox, SandboxError
from agentgym.sandbox.lease import Lease

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds without a new attempt after a failure; doubled each time
SIGN_SECONDS = 5.0  # in which one that is about to be lent must give a sign of life
LOOK_SECONDS = 1.0  # how often one who waits looks for leases that became garbage

_log = logging.getLogger("agentgym.sandbox")


class Pooled(Sandbox, Protocol):
    """A sandbox in a pool. It can be asked whether it still answers."""

    def ping(self, timeout: float = 10.0) -> None:
        """Wait for a sign of life. SandboxError if there is none."""
        ...


class Places:
    """The limit on sandboxes that exist at a time, over all pools that share it.

    A pool that needs a place while an idle sandbox of another holds one has that one closed.

    Raises:
        ValueError: the limit is less than 1.
    """

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"a limit of {limit} sandboxes: must be at least 1")
        self.limit = limit
        self.taken = 0
        self.ending = 0  # of those taken, how many are about to be free
        self.changed = threading.Condition()  # guards this and all that its pools hold
        self.pools: list[SandboxPool] = []

    def close(self, timeout: float = 3.0) -> None:
        """Close all pools, and wait for at most `timeout` seconds. What is late ends with this process."""
        with self.changed:
            boxes = [box for pool in [*self.pools] for box in pool.retire()]
        close_all(boxes, timeout)


@dataclass
class _Waiter:
    since: float = field(default_factory=time.monotonic)
    served: threading.Event = field(default_factory=threading.Event)
    box: Pooled | None = None


@dataclass
class _Failures:
    """Attempts that failed since the last that did not."""

    count: int = 0
    reason: str = ""
    retry_at: float = 0.0

    def add(self, error: Exception) -> None:
        """After a failure: how long to pause."""
        self.count += 1
        self.reason = str(error) or type(error).__name__
        self.retry_at = time.monotonic() + min(FIRST_PAUSE * 2 ** (self.count - 1), LONGEST_PAUSE)


class SandboxPool:
    """Sandboxes of one kind. Every method may be called from any thread.

    Args:
        open: makes one sandbox; may take long, and may raise SandboxError. Called by several threads at once.
        places: how many there may be; shared with other pools or not.
        name: what it is called in errors.
        at_once: how many may be in the making at a time.
        idle_seconds: after which one that nobody wanted is closed.
        up_since: whether the back end is up, and was never down since a moment of `time.monotonic`; see `Lease`.
    """

    def __init__(
        self,
        open: Callable[[], Pooled],
        places: Places,
        *,
        name: str = "sandbox",
        at_once: int = 4,
        idle_seconds: float = 300.0,
        up_since: Callable[[float], bool] = lambda then: False,
    ):
        self.name = name
        self._up_since = up_since
        self._open = open
        self._places = places
        self._at_once = at_once
        self._idle_seconds = idle_seconds
        self._changed = places.changed
        self._idle: deque[tuple[Pooled, float]] = deque()  # with the time since when; the last used at the right
        self._dirty: deque[Pooled] = deque()
        self._dropped: deque[Pooled] = deque()  # of leases that became garbage; filled without the lock
        self._waiters: deque[_Waiter] = deque()
        self._lent: dict[int, Pooled] = {}  # by id(): a back end may compare sandboxes as it likes
        self._creating = 0
        self._resetting = 0
        self._owed = 0  # to be replaced though nobody waits
        self._workers = 0
        self._busy = 0
        self._failures = _Failures()
        self._closed = False
        self._pid = os.getpid()
        with self._changed:
            places.pools.append(self)

    def acquire(self, timeout: float = 110.0) -> Lease:
        """A clean sandbox, in the order of asking; its `close` gives it back.

        Raises:
            SandboxError: none within `timeout` seconds: the message says what failed, or that all are in use.
        """
        if os.getpid() != self._pid:
            raise SandboxError(f"{self.name}: the pool belongs to process {self._pid}, and this is a fork of it")
        waiter = _Waiter()
        with self._changed:
            self._check_open()
            self._waiters.append(waiter)
            self._look()
        while True:
            box = self._wait(waiter, timeout)
            try:
                box.ping(SIGN_SECONDS)
                return Lease(box, partial(self._give_back, box), partial(self._dropped.append, box), self._up_since)
            except SandboxError:  # it died while nobody used it; whoever met it stays first in the row
                waiter = _Waiter(waiter.since)
                with self._changed:
                    self._check_open()
                    self._take_back(box)
                    self._waiters.appendleft(waiter)
                    self._look()
            except BaseException:  # Ctrl-C: nobody takes it
                self._give_back(box)
                raise

    def close(self, timeout: float = 3.0) -> None:
        """End all its sandboxes, lent ones too, and wait for that for at most `timeout` seconds. May be called twice."""
        if os.getpid() == self._pid:
            with self._changed:
                boxes = self.retire()
            close_all(boxes, timeout)

    def _wait(self, waiter: _Waiter, timeout: float) -> Pooled:
        deadline = waiter.since + timeout
        try:
            while not waiter.served.wait(min(max(deadline - time.monotonic(), 0.0), LOOK_SECONDS)):
                with self._changed:
                    self._look()
                    if waiter.box is None and time.monotonic() >= deadline:
                        raise SandboxError(f"{self.name}: no sandbox within {timeout:g} s: {self._why_none()}")
        except BaseException:  # also Ctrl-C: nobody would take what is put there
            with self._changed:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                if waiter.box is not None:
                    self._take_back(waiter.box)
                self._staff_all()  # the place that was kept for it is another's
            raise
        if waiter.box is None:
            raise SandboxError(f"{self.name}: the pool was closed")
        return waiter.box

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"{self.name}: the pool was closed")

    def _why_none(self) -> str:
        failures, places = self._failures, self._places
        if failures.count:
            return f"the last {failures.count} attempt(s) to make one failed: {failures.reason}"
        if places.taken >= places.limit:
            return f"all {places.limit} that there may be are in use (AGENTGYM_SANDBOXES)"
        return f"{self._creating} are being made, and {len(self._waiters)} more wait for one"

    def _give_back(self, box: Pooled) -> None:
        with self._changed:
            self._take_back(box)

    # What follows, up to the threads' own, is called with the lock held.

    def retire(self) -> list[Pooled]:
        """Stop lending and refuse the callers that wait. Returns the sandboxes, which the caller closes."""
        boxes = [*(box for box, _ in self._idle), *self._dirty, *self._lent.values()]
        for held in (self._idle, self._dirty, self._lent):
            held.clear()  # type: ignore[attr-defined]
        self._closed = True
        self._places.taken -= len(boxes)
        if self in self._places.pools:
            self._places.pools.remove(self)
        for waiter in self._waiters:
            waiter.served.set()
        self._waiters.clear()
        self._changed.notify_all()
        self._staff_all()
        return boxes

    def _take_back(self, box: Pooled) -> None:
        if self._lent.pop(id(box), None) is not None:  # it is not there after the pool's close
            self._dirty.append(box)
            self._staff()

    def _look(self) -> None:
        """Whatever can go on, goes on."""
        while self._dropped:
            self._take_back(self._dropped.popleft())
        self._serve()
        self._staff()

    def _serve(self) -> None:
        while self._waiters and self._idle:
            waiter = self._waiters.popleft()
            waiter.box, _ = self._idle.pop()
            self._lent[id(waiter.box)] = waiter.box
            waiter.served.set()

    def _missing(self) -> int:
        """The number of sandboxes to make, beyond those on their way."""
        coming = self._creating + self._resetting + len(self._dirty)
        return max(len(self._waiters) + self._owed - coming, 0)

    def _may_create(self) -> int:
        """The number of sandboxes that may be started now. After a failure, one at a time."""
        return (1 if self._failures.count else self._at_once) - self._creating

    def _next_job(self) -> Callable[[], None] | None:
        now = time.monotonic()
        if self._closed:
            return None
        if self._dirty:
            self._resetting += 1
            box = self._dirty.popleft()
            keep = not self._claimed_by_others()
            self._places.ending += not keep
            return lambda: self._clean(box, keep)
        if self._missing() and self._may_create() > 0 and now >= self._failures.retry_at:
            free = self._places.limit - self._places.taken
            if free > self._claims_before():
                self._places.taken += 1
                self._creating += 1
                return self._create
            idle = [pool for pool in self._places.pools if pool._idle]
            if not free and idle and self._missing() > self._places.ending:
                return min(idle, key=lambda pool: pool._idle[0][1])._end_oldest()
        if self._idle and self._idle[0][1] + self._idle_seconds <= now:
            return self._end_oldest()
        return None

    def _end_oldest(self) -> Callable[[], None]:
        box, _ = self._idle.popleft()
        self._places.ending += 1
        return lambda: self._end(box)

    def _claims(self) -> int:
        """The number of places that this pool would take now if there were no limit."""
        if self._failures.retry_at > time.monotonic():
            return 0
        return max(min(self._missing(), self._may_create()), 0)

    def _claims_before(self) -> int:
        """The number of places that belong to other pools: those where a caller has waited longer than any caller here."""
        mine = self._waiters[0].since if self._waiters else time.monotonic()
        others = [p for p in self._places.pools if p is not self and p._waiters and p._waiters[0].since < mine]
        return sum(pool._claims() for pool in others)

    def _claimed_by_others(self) -> bool:
        """True if a sandbox must make room for one of another pool."""
        return self._places.taken >= self._places.limit and self._claims_before() > self._places.ending

    def _pause(self) -> float | None:
        """Seconds until time alone makes a job; None: only an event does."""
        now, moments = time.monotonic(), []
        if self._missing() and self._failures.retry_at > now:
            moments.append(self._failures.retry_at)
        if self._idle:
            moments.append(self._idle[0][1] + self._idle_seconds)
        return max(min(moments) - now, 0.0) if moments and not self._closed else None

    def _staff(self) -> None:
        """Have as many threads as there are jobs, and one to wait where time alone will make one."""
        places, creations = self._places, 0
        if self._failures.retry_at <= time.monotonic():
            room = places.limit - places.taken + sum(len(pool._idle) for pool in places.pools if pool is not self)
            creations = max(min(self._missing(), self._may_create(), room), 0)
        jobs = len(self._dirty) + creations
        wanted = max(min(self._busy + jobs, 2 * self._at_once), int(self._pause() is not None))
        while self._workers < wanted and not self._closed:
            self._workers += 1
            try:
                threading.Thread(target=self._work, name=f"{self.name} pool", daemon=True).start()
            except RuntimeError:  # no thread can be had: those that there are, and the next call, go on
                self._workers -= 1
                break
        self._changed.notify_all()

    def _staff_all(self) -> None:
        for pool in self._places.pools:
            pool._staff()

    # What follows is run by the threads, without the lock.

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                if job is None:
                    pause = self._pause()
                    if pause is None or self._workers - self._busy > 1:
                        self._workers -= 1
                        return
                    self._changed.wait(pause)
                    continue
                self._busy += 1
            try:
                job()
            except Exception:  # a back end broke its promise; the thread goes on
                _log.exception("%s: while a sandbox was made, reset or closed", self.name)
            with self._changed:
                self._busy -= 1

    def _create(self) -> None:
        try:
            box = self._open()
        except Exception as error:  # whatever a back end raises is told to those who wait
            with self._changed:
                self._failures.add(error)
                first = self._failures.count == 1
                self._owed = 0
                self._creating -= 1
                self._places.taken -= 1
                self._staff_all()
            if first:
                _log.warning("%s: a sandbox could not be made: %s", self.name, error)
            return
        with self._changed:
            self._creating -= 1
            self._failures = _Failures()
            self._owed = max(self._owed - 1, 0)
            if self._keep(box):
                return
            self._places.ending += 1
        self._end(box)

    def _clean(self, box: Pooled, keep: bool) -> None:
        clean = False
        try:
            if keep and box.alive:
                box.reset()
                clean = True
        except Exception as error:  # it is replaced, whatever is wrong with it
            _log.warning("%s: sandbox %s is replaced: %s", self.name, box.id, error)
        with self._changed:
            self._resetting -= 1
            if clean and self._keep(box):
                return
            self._owed += keep
            self._places.ending += keep
        self._end(box)

    def _keep(self, box: Pooled) -> bool:
        """With the lock: put it where it can be lent; False after the pool's close."""
        if self._closed:
            return False
        self._idle.append((box, time.monotonic()))
        self._serve()
        self._staff_all()
        return True

    def _end(self, box: Pooled) -> None:
        try:
            box.close()
        finally:
            with self._changed:
                self._places.ending -= 1
                self._places.taken -= 1
                self._staff_all()


def close_all(boxes: list[Pooled], timeout: float) -> None:
    """Close them all at the same time, and wait for at most `timeout` seconds. What is late ends with this process."""
    deadline = time.monotonic() + timeout
    left = deque(boxes)

    def close_some() -> None:
        while left and time.monotonic() < deadline:
            try:
                box = left.popleft()
            except IndexError:
                return
            box.close()

    threads = [threading.Thread(target=close_some, daemon=True) for _ in range(min(len(boxes), 16))]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # the interpreter is ending, and starts no thread any more
        close_some()
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
