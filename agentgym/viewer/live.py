"""Detects whether a run is being written now."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

# A training step, or an evaluation between steps, may take minutes in which nothing is written.
WRITTEN_SECONDS = 120.0
_LOCKS = Path("/proc/locks")


def lock_held(lock: Path) -> bool:
    """Whether a process holds the `flock` of a file. Never takes it, where the kernel tells who holds locks."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return False
    try:
        lines = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return _cannot_be_taken(lock)
    return any("FLOCK" in line and f":{inode} " in line for line in lines)


def _cannot_be_taken(lock: Path) -> bool:
    """For systems without a list of locks: whether a shared lock, held for an instant, is refused."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def newest(paths: Iterable[Path]) -> float:
    """When the last of these was written, in unix seconds; 0 where there is none."""
    times = [0.0]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def just_written(moment: float) -> bool:
    """Whether a time of writing is so near that more may come."""
    return time.time() - moment < WRITTEN_SECONDS
