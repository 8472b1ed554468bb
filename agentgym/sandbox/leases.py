"""A sandbox that is lent: `SandboxPool.acquire` makes a `Lease`, which acts as the sandbox until `close` returns it."""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

Up = Callable[[], bool]
# Errors of writes that the guest leaves as they are: no program could have made that path writable.
_HOSTS_OWN = (errno.ENAMETOOLONG, errno.EINVAL, errno.EACCES, errno.EPERM)
_begun: dict[int, tuple[float, Up]] = {}  # by thread: when it last began a program, and how to ask for its back end


class Pooled(Sandbox, Protocol):
    def ping(self, timeout: float = 10.0) -> None:
        """Wait for a sign of life. Raises SandboxError if none comes."""


class Lender(Protocol):
    """The part of a pool that a lease uses."""

    up_since: Callable[[float], bool]
    dropped: deque[Pooled]  # of leases that became garbage; filled without the lock

    def give_back(self, box: Pooled) -> None: ...


def program_since(thread: int | None, then: float) -> Up | None:
    """Asks for the health of the back end in which this thread began a program since `then`; None if it began none."""
    begun, up = _begun.get(thread or 0, (0.0, None))
    return up if up is not None and begun >= then else None


class Lease:
    """A sandbox lent by `SandboxPool.acquire`. After `close`, which returns it to the pool, every call raises SandboxError.

    Once a program has run in it, errors are marked as possibly caused by that program; see `agentgym.core.agent_failure`.
    """

    def __init__(self, box: Pooled, pool: Lender):
        self.id = box.id
        self.spec = box.spec
        self.box: Pooled | None = box
        self._pool = pool
        self._pid = os.getpid()
        self._up: Up = partial(pool.up_since, time.monotonic())
        self._used = False  # whether a program has run in it
        self._lost = False
        self._called = time.monotonic()  # when the last call ended

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
        with self._told_apart(writes=True) as box:
            box.write(path, data, mode)

    def upload(self, source: Path, path: str = WORKSPACE) -> None:
        with self._told_apart(writes=True) as box:
            box.upload(source, path)

    def put_archive(
        self, data: bytes | str | os.PathLike[str], to: str = WORKSPACE, limit: int = 256 * MEGABYTE
    ) -> None:
        with self._told_apart(writes=True) as box:
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

    def kill(self) -> None:
        """End the sandbox, also while another thread waits for a program in it: that call raises SandboxError."""
        if (box := self.box) is not None:
            self._used = False  # no program is to blame for what fails from here on
            box.close()

    def __del__(self) -> None:
        box = getattr(self, "box", None)
        if box is not None and os.getpid() == self._pid:
            self._pool.dropped.append(box)

    @contextmanager
    def _told_apart(self, program: bool = False, values: bool = False, writes: bool = False) -> Iterator[Sandbox]:
        """For one call that may run a `program`, or `writes` to a path.

        `values`: a ValueError is about a program's traces, not the host's request.
        """
        box = self.box
        if box is None:
            raise SandboxError(f"sandbox {self.id} was returned to its pool: acquire another")
        if os.getpid() != self._pid:
            whose = f"belongs to process {self._pid}, and this process is a fork of it"
            raise SandboxError(f"sandbox {self.id} {whose}: acquire one here")
        idle, limit = time.monotonic() - self._called, self.spec.idle_timeout
        if box.alive and idle > limit:
            raise SandboxError(f"sandbox {self.id} has ended: no call came for {idle:.0f} s (idle_timeout={limit:g})")
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
            hosts = writes and isinstance(error, OSError) and error.errno in _HOSTS_OWN
            if self._used and not hosts and (values or isinstance(error, OSError)):
                blame(error, lambda: SANDBOX_SPOILED)
            raise
        finally:
            self._called = time.monotonic()


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
