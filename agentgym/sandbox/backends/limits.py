"""Limits that the back ends set alike, and the number of files in a bubblewrap sandbox, which bwrap limits only in bytes.

Each sandbox's programs have a user id of their own, since the kernel limits inotify watches, pages of pipes, queued signals and
descriptors in flight per user id. This file is also a program, so it uses only the standard library.
"""

import ctypes
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

GUEST_MEMORY = 24 << 20  # bytes for the guest and its starter, besides the programs'
GUEST_PROCESSES = 2  # the guest, and a program that it is just starting
PROGRAM_NICENESS = 10  # so that the guest comes first when programs keep the processor busy
PTYS = 16  # pseudo-terminals of a sandbox; the kernel has 3,072 for all (kernel.pty.max, less its reserve)
PTY_OPTIONS = f"newinstance,max={PTYS},ptmxmode=0666,mode=0620,nosuid,noexec"
FIRST, LAST = 0x70000000, 0x7FFFFFFE  # user ids unused by distributions; two sandboxes hardly ever get the same
SMALL = 10_000, 59_999  # where a user namespace has but 65,536 ids

NS_GET_USERNS = 0xB701
CLONE_FS, CLONE_NEWNS, CLONE_NEWUSER = 0x200, 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
PATIENCE = 20.0  # seconds

_dice = random.SystemRandom()  # the global one is the episodes', and a forked process has its parent's


def own_user(few: bool | None = None) -> int:
    """A user id for a new sandbox. `few`: in a user namespace of but 65,536 ids; None: if this process is in such a one."""
    if few is None:
        ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        few = not any(begin <= FIRST and begin + count > LAST for begin, _, count in ranges)
    return _dice.randint(*(SMALL if few else (FIRST, LAST)))


def files_of(disk: int) -> int:
    return disk // 4096 + 1024


def limit_files(pid: int, folders: Sequence[str], files: int) -> str:
    """Limit the files in tmpfs folders of a process's sandbox, which needs no right to mount; the error, or "" on success."""
    try:
        if not os.getuid():
            _in_own_thread(lambda: _remount(pid, folders, files))
            return ""
        # A process with threads cannot enter the user namespace that the mounts belong to.
        command = [sys.executable, "-I", "-S", __file__, str(pid), str(files), *folders]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()[-300:] or f"exit code {done.returncode}"


def _in_own_thread(work: Callable[[], None]) -> None:
    """Do it in a thread that ends with it, and so does the thread's namespace. While a program ends, executors take no work."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _remount(pid: int, folders: Sequence[str], files: int) -> None:
    """Do it in this thread, which is in the sandbox's mount namespace from then on: it must open and import nothing there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        if os.getuid():
            users = fcntl.ioctl(mounts, NS_GET_USERNS)
            call("setns", users, CLONE_NEWUSER)
            os.close(users)
        call("unshare", CLONE_FS)
        call("setns", mounts, CLONE_NEWNS)
        for folder in folders:
            call("mount", None, folder.encode(), None, MS_REMOUNT | MS_NOSUID | MS_NODEV, f"nr_inodes={files}".encode())
    finally:
        os.close(mounts)


if __name__ == "__main__":
    try:
        _remount(int(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
    except OSError as failure:
        sys.exit(str(failure))
