"""A Ray cluster that the runs of several tests join: starting one takes as long as a small run."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agent_train.cluster.ray_cluster import reaped

START_SECONDS = 120.0
CPUS = 16  # more than the parts of any run that joins, whatever this machine has


@contextlib.contextmanager
def shared_ray():
    """The variables with which a run joins it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joins = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": f"127.0.0.1:{port}"}
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # names of sockets may have 107 characters
    words = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--num-cpus={CPUS}", f"--temp-dir={folder}"]
    words += ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    words += ["--include-log-monitor=false", "--no-monitor"]  # what passes lines of logs on, and the autoscaler
    # Ray would start as many workers as CPUs at once.
    own = {"OMP_NUM_THREADS": "1", "RAY_prestart_worker_first_driver": "0"}
    ray, env = Path(sys.executable).with_name("ray"), {**os.environ, **joins, **own}
    with reaped(str(folder)), (folder / "log").open("wb") as log:
        cluster = subprocess.Popen([ray, "start", *words], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + START_SECONDS
            while "Ray runtime started." not in (told := (folder / "log").read_text()):
                assert cluster.poll() is None, told
                assert time.monotonic() < end, told
                time.sleep(0.1)
            yield joins
        finally:
            cluster.kill()
            cluster.wait()
