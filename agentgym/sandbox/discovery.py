"""All sandboxes on this machine, and whether the process that made each still runs.

A back end keeps the `marks` of this process with whatever it makes, and reads them back with `found`. A host is told apart by
its name, its boot and its process namespace, and a process by its id and its birth, so that no mark is taken for another's.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """A sandbox that exists.

    Attributes:
        id: what its back end calls it.
        backend: "docker" or "bubblewrap".
        run: the run that it was made for.
        pid: of the process that made it.
        host: where that process runs; see `this_host`.
        started: when it was made, in seconds since 1970.
        alive: whether that process is still there; also True where that cannot be known, on another host.
    """

    id: str
    backend: str
    run: str
    pid: int
    host: str
    started: float
    alive: bool


def marks(run: str) -> dict[str, str]:
    """The record of a sandbox that this process makes now: run, pid, born, host, started."""
    pid = os.getpid()
    return {
        "run": run,
        "pid": str(pid),
        "born": str(_birth(pid)),
        "host": this_host(),
        "started": f"{time.time():.3f}",
    }


def found(id: str, backend: str, kept: Mapping[str, str]) -> Found:
    """A sandbox and its marks, read back. Missing or unreadable marks make it one of another host."""
    try:
        pid, born, started = int(kept["pid"]), int(kept["born"]), float(kept["started"])
        host = kept["host"]
    except (KeyError, ValueError):
        return Found(id, backend, kept.get("run", ""), 0, "", 0.0, alive=True)
    alive = host != this_host() or _birth(pid) == born
    return Found(id, backend, kept.get("run", ""), pid, host, started, alive)


@cache
def this_host() -> str:
    """This machine since its last start, and the namespace that its process ids belong to."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = "unknown", "unknown"
    return f"{socket.gethostname()} {boot} {namespace}"


def _birth(pid: int) -> int:
    """When a living process began, in clock ticks since the boot, whatever the clock on the wall does; -1 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])  # Z, X: it has ended, and was not yet waited for
