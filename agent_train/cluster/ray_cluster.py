"""Ray for a run: a local instance that ends with the run, or the cluster that RAY_ADDRESS names.

`python -m agent_train.cluster.ray_cluster FOLDER` is the reaper of a run that could not clean up, because it was killed or hung. It waits
until its standard input closes, which happens when its parent ends. Then it kills Ray's processes that have files in FOLDER, which
would search for each other for a minute, and removes the folder.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import psutil

from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.config.schema import first_line

MAX_TEMP_PATH = 24
_SAME_TOKEN = (
    "set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN, or for a cluster without tokens RAY_AUTH_MODE=disabled"
)
REAP_SECONDS = 5.0
REMOVE_SECONDS = 50.0
_SIGNAL_SECONDS = 0.05
_POLL_SECONDS = 0.1


async def start_ray(cpus: int, stack: AsyncExitStack) -> None:
    """Start Ray with this number of CPUs, or connect to a cluster; it ends with the stack. PlacementError or LostError if it does not start.

    Ray cannot be stopped while it starts: if cancelled, this waits until it has started.
    """
    import ray

    # It would warn that a thread, where it cannot handle signals, starts it.
    logging.getLogger("ray").setLevel(logging.ERROR)
    start: Callable[..., Any] = functools.partial(ray.init, log_to_driver=False, configure_logging=False)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        scratch = stack.enter_context(_scratch_folder())
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # "local": Ray would otherwise join whatever cluster was last started on this machine.
        start = functools.partial(start, address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=scratch)
    stack.callback(ray.shutdown)
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        while not starting.done():
            await asyncio.wait([starting], timeout=_SIGNAL_SECONDS)
            _take_signals_back()
    finally:
        await asyncio.wait([starting])
        _take_signals_back()
    if error := starting.exception():
        where = f"at RAY_ADDRESS={address}" if address else "on this machine"
        remedy = f"; {_SAME_TOKEN}" if address and "InvalidAuthToken" in str(error.__cause__) else ""
        # One of the run's own waits 30 s for itself, which a busy machine may take longer for.
        raise (PlacementError if address else LostError)(
            f"Ray {where} did not start: {type(error).__name__}: {first_line(error)}{remedy}"
        ) from error


def _take_signals_back() -> None:
    """Restore Python's handler of SIGTERM, which Ray's core replaces by one that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """A temporary folder for the sockets and files of Ray and its processes; removed with the run."""
    # A short path: names of sockets may have 107 characters.
    home = None if len(tempfile.gettempdir()) <= MAX_TEMP_PATH else "/tmp"
    folder = tempfile.mkdtemp(prefix="agent-train-", dir=home)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        with reaped(folder):
            yield folder
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextlib.contextmanager
def reaped(folder: str) -> Iterator[None]:
    """Kill Ray's processes that have files in `folder`, and remove the folder, when this block or this process ends."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "agent_train.cluster.ray_cluster", folder],
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


def _reap(folder: str) -> None:
    deadline = time.monotonic() + REAP_SECONDS
    while (left := list(_of_ray(folder))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_SECONDS)
    # Others of the run have their temporary files there too: a server that is still ending may write one more.
    deadline = time.monotonic() + REMOVE_SECONDS
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_POLL_SECONDS)


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
    _reap(sys.argv[1])
