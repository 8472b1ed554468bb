"""Clean up Ray after a run that could not do so itself, because it was killed or hung.

`python -m agent_train.cluster.reaper FOLDER` waits until its standard input closes, which happens when its parent ends. Then it kills
Ray's processes that have files in FOLDER, which would search for each other for a minute, and removes the folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

REAP_SECONDS = 5.0
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def reaped(folder: str) -> Iterator[None]:
    """Kill Ray's processes that have files in `folder`, and remove the folder, when this block or this process ends."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "agent_train.cluster.reaper", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C on the terminal must not reach it
    )
    try:
        yield
    finally:
        if reaper.stdin is not None:
            reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.wait(2 * REAP_SECONDS)


def reap(folder: str) -> None:
    """Kill Ray's processes that have files in the folder for up to REAP_SECONDS, then remove the folder."""
    deadline = time.monotonic() + REAP_SECONDS
    while (left := list(_of_ray(folder))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _of_ray(folder: str) -> Iterator[psutil.Process]:
    inside = folder + os.sep
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if not (title.startswith("ray::") or "/ray/" in title) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if inside in title or any(file.path.startswith(inside) for file in process.open_files()):
                yield process


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
