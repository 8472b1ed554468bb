"""Warm sandboxes, lent one at a time: `acquire`, use, `close`.

A pool makes a sandbox when a caller waits for one, resets it in the background when it is returned, and lends it again, or
replaces it if it died or cannot be reset. A few are made at a time; after a failure one at a time, with a growing pause, as
long as a caller waits. Each of these jobs has a thread. Callers get a `Lease`, which acts as the sandbox.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from agentgym.sandbox.api import MEGABYTE, SandboxError
from agentgym.sandbox.leases import Lease, Pooled

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds without a new attempt after a failure; doubled each time
FIRST = 1e9  # seconds by which those come earlier who come first
SIGN_SECONDS = 5.0  # in which one that is about to be lent must give a sign of life
LOOK_SECONDS = 1.0  # how often one who waits looks for leases that became garbage

_log = logging.getLogger("agentgym.sandbox")


@dataclass(frozen=True)
class Room:
    """Room for so many sandboxes, with bytes of memory and of disk."""

    sandboxes: int = 1
    memory: float = 0
    disk: float = 0

    def plus(self, other: "Room", times: int = 1) -> "Room":
        if not times:  # none of infinity is no number
            return self
        return Room(*(mine + times * vars(other)[name] for name, mine in vars(self).items()))

    def lacks(self, needed: "Room") -> str:
        """The resources that are needed and missing, in words; "" if none is."""
        if self.sandboxes < needed.sandboxes:
            return "a process may have no more (AGENTGYM_SANDBOXES)"
        for what in "memory", "disk":
            there, wanted = vars(self)[what], vars(needed)[what]
            if there < wanted:
                told = f"{wanted / MEGABYTE:.0f} MB of {what} are needed and {max(there, 0) / MEGABYTE:.0f} MB free"
                return f"{told} (AGENTGYM_SANDBOX_{what.upper()})"
        return ""


class Places:
    """The limit on all sandboxes that exist at a time, of the pools that share it: a pool may close an idle one of another.

    `limit` is a number of sandboxes, or all the room there is.
    """

    def __init__(self, limit: int | Room):
        self.limit = limit if isinstance(limit, Room) else Room(limit, math.inf, math.inf)
        if self.limit.sandboxes < 1:
            raise ValueError(f"a limit of {self.limit.sandboxes} sandboxes: must be at least 1")
        self.taken = Room(0)
        self.ending = Room(0)  # of that taken, what is about to be free
        self.lock = threading.RLock()  # guards this and all that its pools hold
        self.pools: list[SandboxPool] = []

    @property
    def free(self) -> Room:
        return self.limit.plus(self.taken, -1)

    def stuck(self) -> bool:
        """True if every thread that holds a sandbox waits for another one, so that none comes back."""
        holding = {thread for pool in self.pools for _, thread in pool.lent.values()}
        waiting = {waiter.thread for pool in self.pools for waiter in pool.waiters}
        coming = any(pool.idle or pool.dirty or pool.creating or pool.resetting for pool in self.pools)
        return bool(holding) and holding <= waiting and not coming and not self.ending.sandboxes

    def close(self, timeout: float = 3.0) -> None:
        """Close all pools; wait at most `timeout` seconds."""
        with self.lock:
            boxes = [box for pool in [*self.pools] for box in pool.retire()]
        close_all(boxes, timeout)


@dataclass
class _Waiter:
    since: float  # of two, the one who has waited longer comes first
    thread: int = field(default_factory=threading.get_ident)
    served: threading.Event = field(default_factory=threading.Event)
    box: Pooled | None = None
    refused: str = "the pool was closed"  # why it was served without one


class SandboxPool:
    """Sandboxes of one kind. Every method may be called from any thread.

    Args:
        open: makes one sandbox; may take long, and may raise SandboxError, or ValueError if there will never be one. Called by
            several threads at once.
        size: the room that one takes.
        at_once: how many are made at a time.
        idle_seconds: after which an unused sandbox is closed.
        up_since: whether the back end is up, and was since a moment of `time.monotonic`; may take seconds.
    """

    def __init__(
        self,
        open: Callable[[], Pooled],
        places: Places,
        *,
        size: Room = Room(),
        name: str = "sandbox",
        at_once: int = 4,
        idle_seconds: float = 300.0,
        up_since: Callable[[float], bool] = lambda then: False,
    ):
        self.size = size
        self.name = name
        self.up_since = up_since
        self._open = open
        self.places = places
        self._at_once = at_once
        self._idle_seconds = idle_seconds
        self._lock = places.lock
        self.idle: deque[tuple[Pooled, float]] = deque()  # with the time since when; the last used at the right
        self.dirty: deque[Pooled] = deque()
        self.dropped: deque[Pooled] = deque()  # of leases that became garbage; filled without the lock
        self.waiters: deque[_Waiter] = deque()
        # By id(), since a back end may compare sandboxes as it likes; with the thread that acquired it.
        self.lent: dict[int, tuple[Pooled, int]] = {}
        self.ahead = 0  # how many shall be there before a caller comes
        self.creating = 0
        self.resetting = 0
        self._owed = 0  # to be replaced even if no caller waits
        self._job: Callable[[], None] | None = None  # one for which no thread could be started
        self.workers = 0
        self._timer: threading.Timer | None = None  # for what is idle
        self._failures, self._reason, self._retry_at = 0, "", 0.0  # since the last success
        self._closed = False
        self._pid = os.getpid()
        with self._lock:
            places.pools.append(self)

    def acquire(self, timeout: float = 110.0, patience: float = 0.0, first: bool = False) -> Lease:
        """A clean sandbox, in the order of asking. SandboxError: none within `timeout` seconds, and why.

        Args:
            patience: seconds more for which it waits while others have all the room.
            first: come before all who ask without it, as where an episode cannot end without a second sandbox.
        """
        if os.getpid() != self._pid:
            raise SandboxError(f"{self.name}: the pool belongs to process {self._pid}, and this is a fork of it")
        if never := self.places.limit.lacks(self.size):
            raise SandboxError(f"{self.name}: there is never room for one: {never}")
        box: Pooled | None = None
        began = time.monotonic()
        while True:
            waiter = _Waiter(began - FIRST if first else began)
            with self._lock:
                if self._closed:
                    raise SandboxError(f"{self.name}: the pool was closed")
                if box is not None:  # it died while idle; the caller keeps its place in the queue
                    self._take_back(box)
                else:
                    self.ahead = max(self.ahead - 1, 0)
                before = sum(other.since < waiter.since for other in self.waiters)
                self.waiters.insert(0 if box is not None else before, waiter)
                self._look()
            box = self._wait(waiter, began, timeout, patience)
            try:
                box.ping(SIGN_SECONDS)
                return Lease(box, self)
            except SandboxError:
                continue
            except BaseException:  # Ctrl-C: the caller is gone
                self.give_back(box)
                raise

    def prepare(self, count: int = 1) -> None:
        """Make so many for callers that will come, where no caller needs the room. Nobody comes: they close as other idle ones."""
        with self._lock:
            if not self._closed and os.getpid() == self._pid:
                self.ahead += count
                self._look()

    def close(self, timeout: float = 3.0) -> None:
        """End all its sandboxes, lent ones too; wait at most `timeout` seconds. May be called twice."""
        if os.getpid() == self._pid:
            with self._lock:
                boxes = self.retire()
            close_all(boxes, timeout)

    def _wait(self, waiter: _Waiter, began: float, timeout: float, patience: float) -> Pooled:
        deadline = began + timeout
        try:
            while not waiter.served.wait(min(max(deadline - time.monotonic(), 0.0), LOOK_SECONDS)):
                with self._lock:
                    self._look()
                    if not self._failures and self.places.free.lacks(self.size):
                        deadline = max(deadline, min(time.monotonic() + timeout, began + timeout + patience))
                    if waiter.box is None and time.monotonic() >= deadline:
                        waited = f"no sandbox within {deadline - began:g} s"
                        raise SandboxError(f"{self.name}: {waited}: {self._why_none()}")
        except BaseException:  # also Ctrl-C: the caller is gone
            with self._lock:
                if waiter in self.waiters:
                    self.waiters.remove(waiter)
                if waiter.box is not None:
                    self._take_back(waiter.box)
                self._staff_all()  # the place that was kept for it is another's
            raise
        if waiter.box is None:
            raise SandboxError(f"{self.name}: {waiter.refused}")
        return waiter.box

    def _why_none(self) -> str:
        if self._failures:
            return f"the last {self._failures} attempt(s) to make one failed: {self._reason}"
        if lacking := self.places.free.lacks(self.size):
            return f"all {self.places.taken.sandboxes} that there may be are in use: {lacking}"
        return f"{self.creating} are being made, and {len(self.waiters)} more wait for one"

    def give_back(self, box: Pooled) -> None:
        with self._lock:
            self._take_back(box)

    # The methods from here to `_work` are called with the lock held.

    def retire(self) -> list[Pooled]:
        """Stop lending and refuse the callers that wait. Returns the sandboxes, which the caller closes."""
        boxes = [*(box for box, _ in self.idle), *self.dirty, *(box for box, _ in self.lent.values())]
        self.idle.clear()
        self.dirty.clear()
        self.lent.clear()
        self._closed = True
        self.places.taken = self.places.taken.plus(self.size, -len(boxes))
        if self in self.places.pools:
            self.places.pools.remove(self)
        for waiter in self.waiters:
            waiter.served.set()
        self.waiters.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._staff_all()
        return boxes

    def _take_back(self, box: Pooled) -> None:
        if self.lent.pop(id(box), None) is not None:  # it is not there after the pool's close
            self.dirty.append(box)
            self._staff()

    def _look(self) -> None:
        for pool in [*self.places.pools]:  # a place that another pool has lost is wanted, too
            while pool.dropped:
                pool._take_back(pool.dropped.popleft())
        self._serve()
        self._staff()

    def _serve(self) -> None:
        while self.waiters and self.idle:
            waiter = self.waiters.popleft()
            waiter.box, _ = self.idle.pop()
            self.lent[id(waiter.box)] = waiter.box, waiter.thread
            waiter.served.set()

    def _missing(self) -> int:
        coming = self.creating + self.resetting + len(self.dirty)
        ahead = max(self.ahead - len(self.idle), 0)
        return max(len(self.waiters) + self._owed + ahead - coming, 0)

    def _creations(self) -> int:
        """The number of sandboxes to start now, if there are places. After a failure, one at a time."""
        if self._retry_at > time.monotonic():
            return 0
        return max(min(self._missing(), (1 if self._failures else self._at_once) - self.creating), 0)

    def _next_job(self) -> Callable[[], None] | None:
        if self._closed:
            return None
        places = self.places
        if self.dirty:
            self.resetting += 1
            # A sandbox of another pool may need this one's place.
            keep = not places.free.plus(places.ending).lacks(self._claims_before())
            places.ending = places.ending.plus(self.size, not keep)
            return partial(self._clean, self.dirty.popleft(), keep)
        if creations := self._creations():
            claims = self._claims_before()
            # A thread that holds a sandbox and waits for a second one may exceed memory and disk if nobody else would ever end.
            beyond = self.waiters and not claims.sandboxes and places.free.sandboxes > 0 and places.stuck()
            if beyond or not places.free.lacks(claims.plus(self.size)):
                places.taken = places.taken.plus(self.size)
                self.creating += 1
                return self._create
            idle = [pool for pool in places.pools if len(pool.idle) > (0 if self.waiters else pool.ahead)]
            needed = claims.plus(self.size, creations if self.waiters else 1)
            if idle and places.free.plus(places.ending).lacks(needed):
                return min(idle, key=lambda pool: pool.idle[0][1])._end_oldest()
        if self.idle and self.idle[0][1] + self._idle_seconds <= time.monotonic():
            return self._end_oldest()
        return None

    def _end_oldest(self) -> Callable[[], None]:
        box, _ = self.idle.popleft()
        self.ahead = min(self.ahead, len(self.idle))
        self.places.ending = self.places.ending.plus(self.size)
        return partial(self._end, box)

    def _claims_before(self) -> Room:
        """The room that belongs to other pools: those where a caller has waited longer than any caller here."""
        mine = self.waiters[0].since if self.waiters else time.monotonic()
        others = [p for p in self.places.pools if p is not self and p.waiters and p.waiters[0].since < mine]
        claims = Room(0)
        for pool in others:
            claims = claims.plus(pool.size, min(pool._creations(), len(pool.waiters)))
        return claims

    def _staff(self) -> None:
        """Start a thread for each job that there is, and a timer where time alone will make one."""
        try:
            while self.workers < 2 * self._at_once and (job := self._job or self._next_job()) is not None:
                self._job = job
                threading.Thread(target=self._work, args=[job], name=f"{self.name} pool", daemon=True).start()
                self._job = None
                self.workers += 1
            if self.idle and self._timer is None:
                seconds = max(self.idle[0][1] + self._idle_seconds - time.monotonic(), FIRST_PAUSE)
                timer = threading.Timer(seconds, self._expire)
                timer.daemon = True
                timer.start()
                self._timer = timer
        except RuntimeError:  # no more threads can start: the next call tries again
            return

    def _staff_all(self) -> None:
        for pool in self.places.pools:
            pool._staff()

    # The methods from here on are run by the threads, without the lock.

    def _expire(self) -> None:
        with self._lock:
            self._timer = None
            self._staff()

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # a back end broke its contract
            _log.exception("%s: while a sandbox was made, reset or closed", self.name)
        with self._lock:
            self.workers -= 1
            self._staff_all()

    def _create(self) -> None:
        try:
            box = self._open()
        except Exception as error:  # errors of a back end are raised in the waiting callers
            with self._lock:
                first = not self._failures
                pause = min(FIRST_PAUSE * 2 ** min(self._failures, 9), LONGEST_PAUSE)
                self._failures += 1
                self._reason, self._retry_at = str(error) or type(error).__name__, time.monotonic() + pause
                self._owed = self.ahead = 0
                while self.waiters and isinstance(error, ValueError):
                    waiter = self.waiters.popleft()
                    waiter.refused = self._reason
                    waiter.served.set()
                self.creating -= 1
                self.places.taken = self.places.taken.plus(self.size, -1)
                self._staff_all()
            if first:
                _log.warning("%s: a sandbox could not be made: %s", self.name, error)
            time.sleep(pause)  # then this thread's end starts the next attempt
            return
        with self._lock:
            self.creating -= 1
            self._failures, self._retry_at = 0, 0.0
            self._owed = max(self._owed - 1, 0)
            if self._keep(box):
                return
            self.places.ending = self.places.ending.plus(self.size)
        self._end(box)

    def _clean(self, box: Pooled, keep: bool) -> None:
        clean = False
        try:
            if keep and box.alive:
                box.reset()
                clean = True
        except Exception as error:  # a sandbox with any error is replaced
            if not self._closed:  # then none takes its place
                _log.warning("%s: sandbox %s is replaced: %s", self.name, box.id, error)
        with self._lock:
            self.resetting -= 1
            if clean and self._keep(box):
                return
            self._owed += keep
            self.places.ending = self.places.ending.plus(self.size, keep)
        self._end(box)

    def _keep(self, box: Pooled) -> bool:
        if not self._closed:
            self.idle.append((box, time.monotonic()))
            self._serve()
        return not self._closed

    def _end(self, box: Pooled) -> None:
        try:
            box.close()
        finally:
            with self._lock:
                self.places.ending = self.places.ending.plus(self.size, -1)
                self.places.taken = self.places.taken.plus(self.size, -1)


def close_all(boxes: list[Pooled], timeout: float) -> None:
    """Close them concurrently; wait at most `timeout` seconds. Remaining sandboxes end with this process."""
    deadline = time.monotonic() + timeout
    threads = [threading.Thread(target=box.close, daemon=True) for box in boxes]
    for box, thread in zip(boxes, threads, strict=True):
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            if time.monotonic() < deadline:
                box.close()
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0.0))
