"""A control group for each session, where groups can be made: its shared memory counts, and all that it starts.

What an environment forks is counted and ended with its session, however it hides; one session that forks without end meets
its own limit, and no other session does. Where no group can be made, `bounds` has what resource limits can do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from agentgym.processes import cgroups
from agentgym.processes.cgroups import SESSION, Group
from agentgym.service.server.bounds import Bounds


class Groups:
    """The groups of a zygote's workers.

    Args:
        bounds: of each.

    Attributes:
        why_not: why there are none although limits are wanted; "" where there are, or none are wanted.
    """

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._names = (f"{SESSION}{os.getpid()}-{number}" for number in itertools.count())
        self._of: dict[int, Group] = {}
        self._leaving: list[Group] = []
        self.why_not = ""
        self._wanted = bool(bounds.memory_bytes or bounds.pids)
        if self._wanted:
            try:
                first = self._made()
            except OSError as error:
                self.why_not, self._wanted = str(error), False
            else:
                _remove_empty(first)
                cgroups.remove(first)

    def new(self) -> Group | None:
        """A group for a process that is about to be forked; None: it gets none. Raises OSError."""
        return self._made() if self._wanted else None

    def _made(self) -> Group:
        return cgroups.create_plain(next(self._names), self._bounds.memory_bytes, self._bounds.pids)

    def keep(self, pid: int, group: Group | None) -> None:
        """This process went into that group."""
        if group is not None:
            self._of[pid] = group

    def drop(self, group: Group | None) -> None:
        """The process of a group was never forked."""
        if group is not None:
            cgroups.remove(group, patience=0.0)

    def ended(self, pid: int) -> bool:
        """A process ended: end all that is left in its group. Whether the kernel killed any of it for want of memory."""
        group = self._of.pop(pid, None)
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
        """Remove the groups of processes that ended, as far as what was in them is gone."""
        self._leaving = [group for group in self._leaving if not cgroups.remove(group, patience=0.0)]

    def close(self) -> None:
        """Remove all of them."""
        for group in [*self._of.values(), *self._leaving]:
            cgroups.remove(group, patience=1.0)


def enter(group: Group) -> None:
    """Put this process, and all that it starts from now on, into a group. Raises OSError."""
    for folder in group.folders:
        (folder / "cgroup.procs").write_text("0")


def _remove_empty(beside: Group) -> None:
    """Remove what servers have left that were killed. A group that holds a process stays."""
    for folder in beside.folders:
        for left in folder.parent.glob(f"{SESSION}*"):
            pid = left.name.removeprefix(SESSION).partition("-")[0]
            if left != folder and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
