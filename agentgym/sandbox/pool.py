"""Warm sandboxes, lent one at a time: `acquire`, use, `close`.

A pool makes a sandbox when a caller waits for one, resets it in the background when it is returned, and lends it again, or
replaces it if it died or cannot be reset. A few are made at a time; after a failure one at a time, with a growing pause, as
long as a caller waits. Each of these jobs has a thread. Callers get a `Lease`, which acts as the sandbox.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentgym.core.agent_failure import SANDBOX_LOST, SANDBOX_SPOILED, blame
from agentgym.sandbox.api import (
    MEGABYTE,
    WORKSPACE,
    BackendDown,
    Command,
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxSpoiled,
    Session,
)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds without a new attempt after a failure; doubled each time
SIGN_SECONDS = 5.0  # in which one that is about to be lent must give a sign of life
LOOK_SECONDS = 1.0  # how often one who waits looks for leases that became garbage

_log = logging.getLogger("agentgym.sandbox")
Up = Callable[[], bool]
_begun: dict[int, tuple[float, Up]] = {}  # by thread: when it last began a program, and how to ask for its back end


def program_since(thread: int | None, then: float) -> Up | None:
    """Asks for the health of the back end in which this thread began a program since `then`; None if it began none."""
    begun, up = _begun.get(thread or 0, (0.0, None))
    return up if up is not None and begun >= then else None


class Lease:
    """A sandbox lent by `SandboxPool.acquire`. After `close`, which returns it to the pool, every call raises SandboxError.

    Once a program has run in it, errors are marked as possibly caused by that program; see `agentgym.core.agent_failure`.
    """

    def __init__(self, box: "Pooled", pool: "SandboxPool"):
        self.id = box.id
        self.spec = box.spec
        self.box: Pooled | None = box
        self._pool = pool
        self._pid = os.getpid()
        self._up: Up = partial(pool.up_since, time.monotonic())
        self._used = False  # whether a program has run in it
        self._lost = False

    @property
    def alive(self) -> bool:
        return self.box is not None and os.getpid() == self._pid and self.box.alive

    def exec(self, command: Command, **options: Any) -> ExecResult:
        with self._told_apart(program=True, values=True) as box:
            return box.exec(command, **options)

    def session(self, command: Command = "python") -> Session:
        with self._told_apart() as box:
            return _LentSession(self, box.session(command))

    def read(self, path: str, limit: int = 16 * MEGABYTE) -> bytes:
        with self._told_apart(values=True) as box:
            return box.read(path, limit)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        with self._told_apart() as box:
            box.write(path, data, mode)

    def upload(self, source: Path, path: str = WORKSPACE) -> None:
        with self._told_apart() as box:
            box.upload(source, path)

    def put_archive(
        self, data: bytes | str | os.PathLike[str], to: str = WORKSPACE, limit: int = 256 * MEGABYTE
    ) -> None:
        with self._told_apart() as box:
            box.put_archive(data, to, limit)

    def get_archive(self, path: str = WORKSPACE, limit: int = 256 * MEGABYTE) -> bytes:
        with self._told_apart(values=True) as box:
            return box.get_archive(path, limit)

    def protect(self, paths: Sequence[str]) -> None:
        with self._told_apart() as box:
            box.protect(paths)

    def reset(self) -> None:
        with self._told_apart() as box:
            box.reset()
        self._used = False

    def close(self) -> None:
        box, self.box = self.box, None
        if box is not None and os.getpid() == self._pid:
            self._pool.give_back(box)

    def __del__(self) -> None:
        box = getattr(self, "box", None)
        if box is not None and os.getpid() == self._pid:
            self._pool.dropped.append(box)

    @contextmanager
    def _told_apart(self, program: bool = False, values: bool = False) -> Iterator[Sandbox]:
        """For one call that may run a `program`. `values`: a ValueError is about a program's traces, not the host's request."""
        box = self.box
        if box is None:
            raise SandboxError(f"sandbox {self.id} was returned to its pool: acquire another")
        if os.getpid() != self._pid:
            whose = f"belongs to process {self._pid}, and this process is a fork of it"
            raise SandboxError(f"sandbox {self.id} {whose}: acquire one here")
        alive = box.alive or self._lost  # one that the host closed was not lost by a program
        if program:
            self._used = True
            _begun[threading.get_ident()] = time.monotonic(), self._up
        try:
            yield box
        except SandboxError as error:
            if self._used and alive and not isinstance(error, BackendDown):
                self._lost = True
                spoiled, up = isinstance(error, SandboxSpoiled), self._up
                blame(error, lambda: SANDBOX_SPOILED if spoiled else SANDBOX_LOST if up() else None)
            raise
        except (OSError, ValueError) as error:
            if self._used and (values or isinstance(error, OSError)):
                blame(error, lambda: SANDBOX_SPOILED)
            raise


class _LentSession:
    """A session that ends with the lease: later answers would come in between the next borrower's calls."""

    def __init__(self, loan: Lease, session: Session):
        self._loan = loan
        self._session = session

    @property
    def alive(self) -> bool:
        return self._loan.alive and self._session.alive

    def run(self, text: str, timeout: float = 10.0) -> ExecResult:
        with self._loan._told_apart(program=True, values=True):
            return self._session.run(text, timeout)

    def close(self) -> None:
        if self.alive:
            self._session.close()


class Pooled(Sandbox, Protocol):
    def ping(self, timeout: float = 10.0) -> None:
        """Wait for a sign of life. Raises SandboxError if none comes."""


class Places:
    """The limit on sandboxes that exist at a time, over all pools that share it: a pool may close an idle one of another."""

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"a limit of {limit} sandboxes: must be at least 1")
        self.limit = limit
        self.taken = 0
        self.ending = 0  # of those taken, how many are about to be free
        self.lock = threading.RLock()  # guards this and all that its pools hold
        self.pools: list[SandboxPool] = []

    def close(self, timeout: float = 3.0) -> None:
        """Close all pools; wait at most `timeout` seconds."""
        with self.lock:
            boxes = [box for pool in [*self.pools] for box in pool.retire()]
        close_all(boxes, timeout)


@dataclass
class _Waiter:
    since: float
    served: threading.Event = field(default_factory=threading.Event)
    box: Pooled | None = None


class SandboxPool:
    """Sandboxes of one kind. Every method may be called from any thread.

    Args:
        open: makes one sandbox; may take long, and may raise SandboxError. Called by several threads at once.
        at_once: how many are made at a time.
        idle_seconds: after which an unused sandbox is closed.
        up_since: whether the back end is up, and was since a moment of `time.monotonic`; may take seconds.
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
        self.lent: dict[int, Pooled] = {}  # by id(): a back end may compare sandboxes as it likes
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

    def acquire(self, timeout: float = 110.0) -> Lease:
        """A clean sandbox, in the order of asking. SandboxError: none within `timeout` seconds, and why."""
        if os.getpid() != self._pid:
            raise SandboxError(f"{self.name}: the pool belongs to process {self._pid}, and this is a fork of it")
        box: Pooled | None = None
        since = time.monotonic()
        while True:
            waiter = _Waiter(since)
            with self._lock:
                if self._closed:
                    raise SandboxError(f"{self.name}: the pool was closed")
                if box is not None:  # it died while idle; the caller keeps its place in the queue
                    self._take_back(box)
                self.waiters.insert(0 if box is not None else len(self.waiters), waiter)
                self._look()
            box = self._wait(waiter, timeout)
            try:
                box.ping(SIGN_SECONDS)
                return Lease(box, self)
            except SandboxError:
                continue
            except BaseException:  # Ctrl-C: the caller is gone
                self.give_back(box)
                raise

    def close(self, timeout: float = 3.0) -> None:
        """End all its sandboxes, lent ones too; wait at most `timeout` seconds. May be called twice."""
        if os.getpid() == self._pid:
            with self._lock:
                boxes = self.retire()
            close_all(boxes, timeout)

    def _wait(self, waiter: _Waiter, timeout: float) -> Pooled:
        deadline = waiter.since + timeout
        try:
            while not waiter.served.wait(min(max(deadline - time.monotonic(), 0.0), LOOK_SECONDS)):
                with self._lock:
                    self._look()
                    if waiter.box is None and time.monotonic() >= deadline:
                        raise SandboxError(f"{self.name}: no sandbox within {timeout:g} s: {self._why_none()}")
        except BaseException:  # also Ctrl-C: the caller is gone
            with self._lock:
                if waiter in self.waiters:
                    self.waiters.remove(waiter)
                if waiter.box is not None:
                    self._take_back(waiter.box)
                self._staff_all()  # the place that was kept for it is another's
            raise
        if waiter.box is None:
            raise SandboxError(f"{self.name}: the pool was closed")
        return waiter.box

    def _why_none(self) -> str:
        if self._failures:
            return f"the last {self._failures} attempt(s) to make one failed: {self._reason}"
        if self.places.taken >= self.places.limit:
            return f"all {self.places.limit} that there may be are in use (AGENTGYM_SANDBOXES)"
        return f"{self.creating} are being made, and {len(self.waiters)} more wait for one"

    def give_back(self, box: Pooled) -> None:
        with self._lock:
            self._take_back(box)

    # The methods from here to `_work` are called with the lock held.

    def retire(self) -> list[Pooled]:
        """Stop lending and refuse the callers that wait. Returns the sandboxes, which the caller closes."""
        boxes = [*(box for box, _ in self.idle), *self.dirty, *self.lent.values()]
        self.idle.clear()
        self.dirty.clear()
        self.lent.clear()
        self._closed = True
        self.places.taken -= len(boxes)
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
        while self.dropped:
            self._take_back(self.dropped.popleft())
        self._serve()
        self._staff()

    def _serve(self) -> None:
        while self.waiters and self.idle:
            waiter = self.waiters.popleft()
            waiter.box, _ = self.idle.pop()
            self.lent[id(waiter.box)] = waiter.box
            waiter.served.set()

    def _missing(self) -> int:
        coming = self.creating + self.resetting + len(self.dirty)
        return max(len(self.waiters) + self._owed - coming, 0)

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
            keep = places.taken < places.limit or self._claims_before() <= places.ending
            places.ending += not keep
            return partial(self._clean, self.dirty.popleft(), keep)
        if self._creations():
            free = places.limit - places.taken
            if free > self._claims_before():
                places.taken += 1
                self.creating += 1
                return self._create
            idle = [pool for pool in places.pools if pool.idle]
            if not free and idle and self._missing() > places.ending:
                return min(idle, key=lambda pool: pool.idle[0][1])._end_oldest()
        if self.idle and self.idle[0][1] + self._idle_seconds <= time.monotonic():
            return self._end_oldest()
        return None

    def _end_oldest(self) -> Callable[[], None]:
        box, _ = self.idle.popleft()
        self.places.ending += 1
        return partial(self._end, box)

    def _claims_before(self) -> int:
        """The number of places that belong to other pools: those where a caller has waited longer than any caller here."""
        mine = self.waiters[0].since if self.waiters else time.monotonic()
        others = [p for p in self.places.pools if p is not self and p.waiters and p.waiters[0].since < mine]
        return sum(pool._creations() for pool in others)

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
                self._owed = 0
                self.creating -= 1
                self.places.taken -= 1
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
            self.places.ending += 1
        self._end(box)

    def _clean(self, box: Pooled, keep: bool) -> None:
        clean = False
        try:
            if keep and box.alive:
                box.reset()
                clean = True
        except Exception as error:  # a sandbox with any error is replaced
            _log.warning("%s: sandbox %s is replaced: %s", self.name, box.id, error)
        with self._lock:
            self.resetting -= 1
            if clean and self._keep(box):
                return
            self._owed += keep
            self.places.ending += keep
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
                self.places.ending -= 1
                self.places.taken -= 1


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
