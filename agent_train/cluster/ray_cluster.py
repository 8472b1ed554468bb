"""Ray for a run: a local instance that ends with the run, or the cluster that RAY_ADDRESS names."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from agent_train.cluster.reaper import reaped

MAX_TEMP_PATH = 24
_POLL_SECONDS = 0.05


async def start_ray(cpus: int, stack: AsyncExitStack) -> None:
    """Start Ray with this number of CPUs, or connect to a cluster; it ends with the stack.

    Ray cannot be stopped while it starts: if cancelled, this waits until it has started.
    """
    import ray

    # It would warn that a thread, where it cannot handle signals, starts it.
    logging.getLogger("ray").setLevel(logging.ERROR)
    start: Callable[..., Any] = functools.partial(ray.init, log_to_driver=False, configure_logging=False)
    if not os.environ.get("RAY_ADDRESS"):
        scratch = stack.enter_context(_scratch_folder())
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # "local": Ray would otherwise join whatever cluster was last started on this machine.
        start = functools.partial(start, address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=scratch)
    stack.callback(ray.shutdown)
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        while not starting.done():
            await asyncio.wait([starting], timeout=_POLL_SECONDS)
            _take_signals_back()
    finally:
        await asyncio.wait([starting])
        _take_signals_back()
    starting.result()


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
