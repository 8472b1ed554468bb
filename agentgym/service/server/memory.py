"""How much memory a server's processes have, told apart by what they are for."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

# A look asks the kernel to walk through the memory of every process: milliseconds of it for each.
FRESH_SECONDS = 10.0


class Memory:
    """Memory of a server, looked at no more often than every ten seconds."""

    def __init__(self) -> None:
        self._found: Mapping[tuple[str, str], int] = {}
        self._looked = -FRESH_SECONDS
        self._looking = asyncio.Lock()

    async def look(self, server: EnvServer) -> Mapping[tuple[str, str], int]:
        """Bytes of "server" (server, supervisor, zygote), of "spare" workers that wait, and of "sessions", by environment; "" for the
        others."""
        async with self._looking:
            if time.monotonic() >= self._looked + FRESH_SECONDS:
                supervisor, forks = server.forks.pids()
                envs = server.sessions.envs_by_process()
                of = [(("sessions", envs[key]) if key in envs else ("spare", ""), pid) for key, pid in forks.items()]
                self._found = await asyncio.to_thread(_memory_of, supervisor, of)
                self._looked = time.monotonic()
        return self._found


def _memory_of(supervisor: int | None, of: list[tuple[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    found = Counter[tuple[str, str]]({("server", ""): 0, ("spare", ""): 0})
    if supervisor is not None:
        of = [(("server", ""), pid) for pid in (os.getpid(), supervisor, *_children(supervisor))] + of
    for whose, pid in of:
        found[whose] += _proportional(pid)
    return dict(found)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return list(map(int, children.read().split()))
    except OSError:
        return []


def _proportional(pid: int) -> int:
    """Bytes of a process, what it shares divided by those who share it; 0 where it is gone, or may not be looked at."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            return next(1024 * int(line.split()[1]) for line in rollup if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return 0
