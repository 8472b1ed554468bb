"""Sandboxes of workers that were killed, or died: most end by themselves with whoever made them, and the rest is removed here."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Collection
from typing import Any

SWEEP_SECONDS = 3.0  # for sandboxes to end by themselves, and for more workers to die meanwhile
LONGEST_SECONDS = 120.0


def sweep(pids: Collection[int]) -> None:
    """Remove what sandboxes there are of processes that have ended. Runs in a process of its own.

    Args:
        pids: whose; others' are left alone.
    """
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.cleanup import remove_sandbox, sandboxes

    for found in sandboxes().found:
        if found.pid in pids and not found.alive:
            try:
                remove_sandbox(found)
            except SandboxError as error:
                sys.stderr.write(f"agentgym serve: sandbox {found.id} of a worker that died stays: {error}\n")


class Sweeps:
    """Starts `sweep` after workers died.

    Args:
        fork: see `Forks.fork`.
        kill: see `Forks.kill`.
    """

    def __init__(self, fork: Callable[[str, dict[str, Any], list[int]], None], kill: Callable[[str], None]):
        self._fork = fork
        self._kill = kill
        self._keys = (f"sweep {number}" for number in itertools.count())
        self._pids: set[int] = set()
        self._soon: asyncio.TimerHandle | None = None

    def add(self, pid: int) -> None:
        """A worker died that did not close its environment."""
        self._pids.add(pid)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._begin)

    def _begin(self) -> None:
        pids, self._pids, self._soon = self._pids, set(), None
        key = next(self._keys)
        self._fork(key, {"sweep": sorted(pids)}, [])
        asyncio.get_running_loop().call_later(LONGEST_SECONDS, self._kill, key)

    def close(self) -> None:
        """Begin no more."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
