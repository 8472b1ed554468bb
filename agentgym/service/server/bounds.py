"""Limits of worker processes: resource limits, and control groups where they can be made.

A control group counts shared memory and all child processes of a session; resource limits bound each process alone.
"""

import contextlib
import itertools
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from agentgym.processes import cgroups
from agentgym.processes.cgroups import SESSION, ControlGroup

# Of 1000: where memory runs out, a worker goes before the server does.
_OOM_SCORE = b"500"
# For each session: the HTTP connection, the worker's, one to tell it things, its process; with TLS two more.
_FILES_EACH, _FILES_MORE = 6, 256
MORE_MEMORY = "it may take no more (--session-memory)"


@dataclass(frozen=True)
class Bounds:
    """Limits of a worker's process; 0: no limit."""

    memory_bytes: int = 0  # above what it begins with; without a control group: private memory, of each process alone
    open_files: int = 0  # at a time; 0: as many as the server
    pids: int = 0  # processes and threads at a time, in a control group only

    def __post_init__(self) -> None:
        if min(self.memory_bytes, self.open_files, self.pids) < 0:
            raise ValueError(f"limits are at least 0, not {self}")

    def times(self, sessions: int) -> "Bounds":
        return Bounds(self.memory_bytes * sessions, self.open_files * sessions, self.pids * sessions)


def keep_within(bounds: Bounds) -> None:
    """Set the limits for this process and its children. It dumps no core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(_OOM_SCORE)
    if bounds.open_files:
        _limit(resource.RLIMIT_NOFILE, bounds.open_files)


def limit_memory(bounds: Bounds) -> None:
    """Let this process take at most `memory_bytes` from now on."""
    if bounds.memory_bytes:
        with open("/proc/self/statm") as pages:
            has = int(pages.read().split()[5]) * os.sysconf("SC_PAGESIZE")
        _limit(resource.RLIMIT_DATA, has + bounds.memory_bytes)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def why_no_memory() -> str:
    """The reason for a MemoryError, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return "this machine has none left" if soft == resource.RLIM_INFINITY else MORE_MEMORY


def raise_open_files(sessions: int) -> int:
    """Raise the limit of open files to the hard limit; returns the old one. Raises ValueError if that is too few."""
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


class Groups:
    """The control groups of a zygote's workers. `why_not` says why limits that were asked for cannot be kept."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._names = (f"{SESSION}{os.getpid()}-{number}" for number in itertools.count())
        self.of: dict[int, ControlGroup | None] = {}  # by process id
        self._leaving: list[ControlGroup] = []
        self.why_not = ""
        self._wanted = bool(bounds.memory_bytes or bounds.pids)
        try:
            first = self.new()
        except OSError as error:
            self.why_not, self._wanted = str(error), False
        else:
            if first is not None:
                _remove_left_beside(first)
                cgroups.remove(first)

    def new(self) -> ControlGroup | None:
        """A new group for the next process; None: no group is needed. Raises OSError."""
        if not self._wanted:
            return None
        return cgroups.create_plain(next(self._names), self._bounds.memory_bytes, self._bounds.pids)

    def ended(self, pid: int) -> bool:
        """Kill what is left in the group of an ended process; returns whether it ran out of memory."""
        group = self.of.pop(pid, None)
        if group is None:
            return False
        for folder in group.folders:
            with contextlib.suppress(OSError):  # what forks faster than it is killed
                (folder / "pids.max").write_text("0")
        ran_out = cgroups.oom_kills(group) > 0
        self._leaving.append(group)
        self.sweep()
        return ran_out

    def sweep(self) -> None:
        """Remove the groups of ended processes that are empty by now."""
        self._leaving = [group for group in self._leaving if not cgroups.remove(group, patience=0.0)]

    def close(self) -> None:
        for group in [*self.of.values(), *self._leaving]:
            if group is not None:
                cgroups.remove(group, patience=1.0)


def _remove_left_beside(own: ControlGroup) -> None:
    """Remove the groups that killed servers left behind."""
    for folder in own.folders:
        for left in folder.parent.glob(f"{SESSION}*"):
            pid = left.name.removeprefix(SESSION).partition("-")[0]
            if left != folder and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
