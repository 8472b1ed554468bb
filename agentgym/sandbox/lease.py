"""A lease of a pooled sandbox: it acts as the sandbox, and `close` returns it to the pool.

Once a program has run in it, errors are marked as possibly caused by that program; see `agentgym.core.agent_failure`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
_begun: dict[int, tuple[float, Up]] = {}  # by thread: when it last began a program, and how to ask for its back end


def program_since(thread: int | None, then: float) -> Up | None:
    """Asks for the health of the back end in which this thread began a program since `then`; None if it began none."""
    begun, up = _begun.get(thread or 0, (0.0, None))
    return up if up is not None and begun >= then else None


class Lease:
    """A sandbox lent by `SandboxPool.acquire`. After `close` every call raises SandboxError.

    Args:
        drop: called instead of `give_back` if the lease is garbage-collected unclosed; it must take no lock.
        up_since: whether the back end is up, and was since a moment of `time.monotonic`; may take seconds.
    """

    def __init__(
        self,
        box: Sandbox,
        give_back: Callable[[], None],
        drop: Callable[[], None],
        up_since: Callable[[float], bool] = lambda then: False,
    ):
        self.id = box.id
        self.spec = box.spec
        self._box: Sandbox | None = box
        self._give_back = give_back
        self._drop = drop
        self._pid = os.getpid()
        self._up: Up = partial(up_since, time.monotonic())
        self._used = False  # whether a program has run in it
        self._lost = False

    @property
    def alive(self) -> bool:
        return self._box is not None and os.getpid() == self._pid and self._box.alive

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

    def reset(self) -> None:
        with self._told_apart() as box:
            box.reset()
        self._used = False

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None and os.getpid() == self._pid:
            self._give_back()

    def __del__(self) -> None:
        box = getattr(self, "_box", None)
        if box is not None and os.getpid() == self._pid:
            self._drop()

    @contextmanager
    def _told_apart(self, program: bool = False, values: bool = False) -> Iterator[Sandbox]:
        """The sandbox, for one call, whose errors are marked.

        `program`: the call runs one. `values`: a ValueError is about a program's traces, and not about the host's request.
        """
        box = self._box
        if box is None:
            raise SandboxError(f"sandbox {self.id} was returned to its pool: acquire another")
        if os.getpid() != self._pid:
            raise SandboxError(
                f"sandbox {self.id} belongs to process {self._pid}, and this process is a fork of it: acquire one here"
            )
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
