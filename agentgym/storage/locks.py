"""A folder that one process writes: the file `lock` in it, held by `flock` for as long as that process lives."""

import fcntl
import os
from pathlib import Path

_LOCKS = Path("/proc/locks")


def hold(folder: Path) -> int:
    """A descriptor that holds the folder's lock until this process ends, however it ends.

    ValueError: another process holds it; the message names folder and process.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        writer = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        who = f"another process{f' ({writer})' if writer else ''}"
        raise ValueError(f"{folder} is being written by {who}: wait for it, end it, or choose another folder") from None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()}\n".encode())
    return lock


def lock_held(lock: Path) -> bool:
    """True if a process holds the `flock` of a file. Never takes it, where the kernel tells who holds locks."""
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
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
