"""What the kernel keeps a worker within, so that one that grows without end fails alone."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

# Of 1000: where memory runs out, a worker goes before the server does.
_OOM_SCORE = b"500"
# For each session: the HTTP connection, the worker's, one to tell it things, its process; with TLS two more.
_FILES_EACH, _FILES_MORE = 6, 256
MORE_MEMORY = "it may take no more (--session-memory)"


@dataclass(frozen=True)
class Bounds:
    """Limits of a worker's process.

    Attributes:
        memory_bytes: above what it has when it begins; 0: as much as there is. In a control group its shared memory and all
            that it starts count together (see `groups`); without one, private memory alone, and each process that it
            starts may take as much again.
        open_files: at a time, unless it asks the kernel for more; 0: as many as the server.
        pids: processes and threads at a time, in a control group alone; 0: as many as there may be.
    """

    memory_bytes: int = 0
    open_files: int = 0
    pids: int = 0

    def __post_init__(self) -> None:
        if min(self.memory_bytes, self.open_files, self.pids) < 0:
            raise ValueError(f"limits are at least 0, not {self}")

    def times(self, sessions: int) -> Bounds:
        """The limits of a process that so many sessions share."""
        return Bounds(self.memory_bytes * sessions, self.open_files * sessions, self.pids * sessions)


def keep_within(bounds: Bounds) -> None:
    """Set the limits for this process and those that it starts. It dumps no core, whatever happens to it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(_OOM_SCORE)
    if bounds.open_files:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = bounds.open_files if hard == resource.RLIM_INFINITY else min(bounds.open_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit_memory(bounds: Bounds) -> None:
    """Let this process take no more than `memory_bytes` from now on."""
    if bounds.memory_bytes:
        with open("/proc/self/statm") as pages:
            has = int(pages.read().split()[5]) * os.sysconf("SC_PAGESIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = has + bounds.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def why_no_memory() -> str:
    """What an environment is told to have met that got no more memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return "this machine has none left" if soft == resource.RLIM_INFINITY else MORE_MEMORY


def raise_open_files(sessions: int) -> int:
    """Let this process hold as many files as it ever may; what it might hold before.

    Args:
        sessions: how many must fit.

    Raises:
        ValueError: they do not.
    """
    needed = _FILES_EACH * sessions + _FILES_MORE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        fits = max(0, (hard - _FILES_MORE) // _FILES_EACH)
        raise ValueError(
            f"{sessions} sessions take {needed} open files, and this machine allows {hard} (ulimit -Hn): raise that, or"
            f" serve at most {fits}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
    return soft
