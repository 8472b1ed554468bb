"""Removes the sandboxes of workers that died. Most end with their owner; the rest is removed here."""

import signal
import sys
import time
from collections.abc import Collection, Iterable

SWEEP_SECONDS = 3.0  # for sandboxes to end by themselves, and to collect more dead workers
LONGEST_SECONDS = 60


def may_be() -> bool:
    """True if a module that makes sandboxes is imported."""
    return "agentgym.sandbox.api" in sys.modules


def sweep(pids: Collection[int]) -> None:
    """Remove the sandboxes of these ended processes, within a time limit."""
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends.select import remove_sandbox, sandboxes

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST_SECONDS)
    for found in sandboxes()[0]:
        if found.pid in pids and not found.alive:
            try:
                remove_sandbox(found)
            except SandboxError as error:
                sys.stderr.write(f"agentgym serve: sandbox {found.id} of a worker that died stays: {error}\n")
    signal.alarm(0)


class Sweeps:
    """When to remove sandboxes next, and of which processes."""

    def __init__(self, pids: Iterable[int]):
        self.pids: set[int] = set()
        self._due = 0.0
        for pid in pids:
            self.add(pid)

    def add(self, pid: int) -> None:
        if may_be():
            if not self.pids:
                self._due = time.monotonic() + SWEEP_SECONDS
            self.pids.add(pid)

    def seconds(self) -> float | None:
        """Seconds until the next removal; None: none is due."""
        return max(0.0, self._due - time.monotonic()) if self.pids else None

    def take(self) -> set[int]:
        if self.seconds() != 0.0:
            return set()
        pids, self.pids = self.pids, set()
        return pids
