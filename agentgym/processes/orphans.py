"""Whatever a process started, and its children, and theirs: found and ended, whichever groups and sessions they went into.

A process that adopts gets the children of those below it that have died. So what a dead worker left is a child of the process
above, and can be told apart from the workers, which that one has forked itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GONE_SECONDS = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """This process gets a signal when its parent ends, even if that happened just now."""
    _libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children() -> set[int]:
    """The processes whose parent this one is, those that ended and were not waited for included."""
    found: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as listed:
                found.update(map(int, listed.readall().split()))
    except OSError:  # a kernel without these lists, or a thread that has just ended
        return _children_of_all()
    return found


def _children_of_all() -> set[int]:
    found, own = set(), os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == own:
                    found.add(int(name))
    return found


def kill(pids: set[int]) -> None:
    """Kill children. Their ids are nobody else's, as nobody has waited for them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_children(seconds: float = GONE_SECONDS) -> bool:
    """Kill all children, and what falls to this process as they die; whether all are gone in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kill(children())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return True
        time.sleep(0.005)
    return False
