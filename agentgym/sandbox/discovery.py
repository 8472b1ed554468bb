"""The marks that a back end keeps with each sandbox: which run and process made it, and whether that process still runs."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Found:
    """A sandbox. Process `pid` on `host` made it `started` seconds after 1970; if it is `alive`, or on another host."""

    id: str
    backend: str
    run: str
    pid: int
    host: str
    started: float
    alive: bool


def marks(run: str) -> dict[str, str]:
    pid = os.getpid()
    return {"run": run, "pid": str(pid), "born": str(_birth(pid)), "host": this_host(), "started": f"{time.time():.3f}"}


def found(id: str, backend: str, kept: Mapping[str, str]) -> Found:
    """A sandbox and its marks, read back. Without readable marks it is one of another host."""
    try:
        pid, born, started = int(kept["pid"]), int(kept["born"]), float(kept["started"])
        host = kept["host"]
    except (KeyError, ValueError):
        return Found(id, backend, kept.get("run", ""), 0, "", 0.0, alive=True)
    alive = host != this_host() or _birth(pid) == born
    return Found(id, backend, kept.get("run", ""), pid, host, started, alive)


@cache
def this_host() -> str:
    """This machine since its last start, and the namespace of its process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = "unknown", "unknown"
    return f"{socket.gethostname()} {boot} {namespace}"


def _birth(pid: int) -> int:
    """The start of a living process in clock ticks since boot; -1 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])  # Z, X: it has ended, and was not yet waited for
