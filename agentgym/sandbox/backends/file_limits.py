"""Limits the number of files in the tmpfs folders of a bubblewrap sandbox, which bwrap limits only in bytes.

A thread, or without root a process, enters the sandbox's mount namespace and remounts the folders, so the sandbox needs no
right to mount. This file is also the program of that process. It uses only the standard library.
"""

import ctypes
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

NS_GET_USERNS = 0xB701
CLONE_FS, CLONE_NEWNS, CLONE_NEWUSER = 0x200, 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REMOUNT = 2, 4, 32
PATIENCE = 20.0  # seconds


def limit_files(pid: int, folders: Sequence[str], files: int) -> str:
    """Limit the number of files in folders of a process's sandbox; returns the error, or "" on success."""
    if os.getuid():  # a process with threads cannot enter the user namespace that the mounts belong to then
        command = [sys.executable, "-I", "-S", __file__, str(pid), str(files), *folders]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else done.stderr.strip()[-300:] or f"exit code {done.returncode}"
    failures: list[str] = []

    def act() -> None:
        try:
            _remount(pid, folders, files)
        except OSError as error:
            failures.append(str(error))

    thread = threading.Thread(target=act, name="limit files")  # it ends in there: its namespace ends with it
    thread.start()
    thread.join()
    return "".join(failures)


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
