"""A Ray cluster that the runs of several tests join: starting one takes as long as a small run."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from preloaded import Preloaded

from agent_train.cluster.ray_cluster import reaped

START_SECONDS = 120.0
TRIES = 3
# What Ray takes for Python: it asks for a fork where a worker is to start.
PYTHON = """#!{python} -IS
import json, os, socket, sys
if not sys.argv[1].endswith("default_worker.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = {{"words": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
with socket.socket(socket.AF_UNIX) as answers:
    answers.connect({path!r})
    socket.send_fds(answers, [b"."], [0, 1, 2])
    answers.sendall(json.dumps(asked).encode())
    answers.shutdown(socket.SHUT_WR)
    answers.recv(4)
"""
CPUS = 16  # more than the parts of any run that joins, whatever this machine has


def new_address() -> dict[str, str]:
    """The variables with which a run joins a cluster that nobody has started yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joins = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": f"127.0.0.1:{port}"}
    return {**joins, "OMP_NUM_THREADS": "1"}


def python_that_forks(folder: Path, forks: Preloaded) -> Path:
    """What Ray may take for Python, in this folder."""
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, path=str(forks.path)))
    python.chmod(0o755)
    return python


@contextlib.contextmanager
def shared_ray(joins: Mapping[str, str], forks: Preloaded) -> Iterator[None]:
    """The cluster that runs with these variables join, whose workers are forks. On a busy machine Ray may give up its start."""
    with contextlib.ExitStack() as stack:
        for tries_left in reversed(range(TRIES)):
            try:
                stack.enter_context(_cluster(joins, forks))
                break
            except AssertionError:
                if not tries_left:
                    raise
        yield


@contextlib.contextmanager
def _cluster(joins: Mapping[str, str], forks: Preloaded) -> Iterator[None]:
    port = joins["RAY_ADDRESS"].rpartition(":")[2]
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # names of sockets may have 107 characters
    words = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--num-cpus={CPUS}", f"--temp-dir={folder}"]
    words += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    words += ["--include-log-monitor=false", "--no-monitor"]  # what passes lines of logs on, and the autoscaler
    # Ray would start as many workers as CPUs at once.
    own = {"RAY_prestart_worker_first_driver": "0"}
    python, env = python_that_forks(folder, forks), {**os.environ, **joins, **own}
    ray = f"import sys; sys.executable = {str(python)!r}; from ray.scripts.scripts import main; main()"
    with reaped(str(folder)), (folder / "log").open("wb") as log:
        cluster = subprocess.Popen(
            [sys.executable, "-c", ray, "start", *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            end = time.monotonic() + START_SECONDS
            while "Ray runtime started." not in (told := (folder / "log").read_text()):
                assert cluster.poll() is None, told
                assert time.monotonic() < end, told
                time.sleep(0.1)
            yield
        finally:
            cluster.kill()
            cluster.wait()
