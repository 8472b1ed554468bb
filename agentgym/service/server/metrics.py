"""The server's metrics in Prometheus's text format."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentgym import __version__
from agentgym.service.protocol.frames import PROTOCOL
from agentgym.service.server.slots import DELAY_BOUNDS, TIME_BOUNDS, Delays

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Measuring makes the kernel walk through the memory of every process: milliseconds for each.
FRESH_SECONDS = 10.0
_COUNTERS = {
    "steps": "Steps that environments made.",
    "episodes": "Episodes that were played to their end.",
    "requests": "Messages from clients.",
    "received_bytes": "Bytes from clients.",
    "sent_bytes": "Bytes to clients.",
    "env_errors": "Calls in which an environment raised.",
}
_TIMES = {
    "step": "Time that environments took for a step.",
    "reset": "Time that environments took for a reset.",
    "open": "From the request for a session to its environment being made.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
# The suffix of a row's name after its family's, its labels, and its value.
Rows = list[tuple[str, Mapping[str, str], float]]
Memories = Mapping[tuple[str, str], int]


def exposition(server: EnvServer, memory: Memories) -> str:
    """All metrics of a server as text. `memory` is what `Memory.look` returns."""
    lines = []
    for name, kind, help, rows in _families(server, memory):
        lines += [f"# HELP agentgym_{name} {help}", f"# TYPE agentgym_{name} {kind}"]
        for suffix, labels, value in rows:
            told = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
            lines.append(f"agentgym_{name}{suffix}{f'{{{told}}}' if told else ''} {value}")
    return "\n".join([*lines, ""])


def _families(server: EnvServer, memory: Memories) -> Iterable[tuple[str, str, str, Rows]]:
    sessions, connections, counted = server.sessions, server.connections, server.sessions.tallies()
    # All that is served has its rows from the start.
    tallies = {env: counted[env] for env in server.served}
    opened = dict.fromkeys(tallies, 0) | Counter(session.env for session in sessions.open.values())
    cut = {reason: connections.cut[reason] for reason in ("capacity", "too slow")}
    about = {"version": __version__, "python": platform.python_version(), "protocol": str(PROTOCOL)}
    of_memory: Rows = [("", {"of": of, **({"env": env} if env else {})}, size) for (of, env), size in memory.items()]

    yield "build_info", "gauge", "1, with the server's version.", [("", about, 1)]
    yield "sessions", "gauge", "Sessions that are open.", _one(len(sessions.open))
    yield "sessions_limit", "gauge", "Sessions that may be open at a time.", _one(sessions.most)
    yield "draining", "gauge", "1 while the server ends and takes no new sessions.", _one(sessions.draining)
    yield "worker_states", "gauge", "Workers by state; spare ones wait for a session.", _by("state", sessions.states())
    yield "refused_total", "counter", "Sessions refused, by why.", _by("reason", sessions.refused)
    yield "unauthorized_total", "counter", "Requests refused for their token.", _one(server.unauthorized.count)
    help = "HTTP connections: a request runs (busy), or none does and the last had a token or was anonymous."
    yield "connections", "gauge", help, _by("state", connections.states())
    yield "connections_limit", "gauge", "HTTP connections that may be open.", _one(connections.most)
    help = "HTTP connections that were cut: idle ones to make room (capacity), or with a late request (too slow)."
    yield "connections_cut_total", "counter", help, _by("reason", cut)
    yield "env_sessions", "gauge", "Sessions that are open, by environment.", _by("env", opened)
    yield "sessions_opened_total", "counter", "Sessions opened.", _by("env", {e: t.opened for e, t in tallies.items()})
    help = "Times that a client came back to its session."
    yield "sessions_resumed_total", "counter", help, _by("env", {e: t.resumed for e, t in tallies.items()})
    ended = [row for env, tally in tallies.items() for row in _by("reason", tally.ended, env=env)]
    yield "sessions_ended_total", "counter", "Sessions ended, by why.", ended
    errors = [row for env, tally in tallies.items() for row in _by("code", tally.errors, env=env)]
    yield "errors_total", "counter", "Errors that clients were told in sessions, by code.", errors
    for name, help in _COUNTERS.items():
        yield f"{name}_total", "counter", help, _by("env", {e: t.counters[name] for e, t in tallies.items()})
    yield "memory_bytes", "gauge", "Proportional memory of the server, spare workers and sessions.", of_memory
    bounds = [bound / 1e6 for bound in TIME_BOUNDS]
    for what, help in _TIMES.items():
        rows = [row for env, t in tallies.items() for row in _histogram({"env": env}, bounds, *t.times(what))]
        yield f"{what}_seconds", "histogram", help, rows
    help = "Times from the end of a broken limit until the slot is free."
    yield "slot_return_seconds", "histogram", help, _delays(sessions.slot_returns)
    help = "Delay of the server's event loop, for which its requests wait."
    yield "event_loop_lag_seconds", "histogram", help, _delays(sessions.lags)


def _one(value: float) -> Rows:
    return [("", {}, int(value))]


def _by(label: str, counts: Mapping[str, float], **labels: str) -> Rows:
    return [("", {**labels, label: name}, count) for name, count in sorted(counts.items())]


def _delays(delays: Delays) -> Rows:
    return _histogram({}, DELAY_BOUNDS, delays.seconds, delays.counts)


def _histogram(labels: Mapping[str, str], bounds: Sequence[float], seconds: float, counts: Sequence[int]) -> Rows:
    """`counts` has one number for each bound, and one for larger values."""
    below = 0
    rows: Rows = []
    for bound, count in zip([*(f"{bound:g}" for bound in bounds), "+Inf"], counts, strict=True):
        below += count
        rows.append(("_bucket", {**labels, "le": bound}, below))
    return [*rows, ("_sum", labels, seconds), ("_count", labels, below)]


class Memory:
    """The memory of a server's processes, measured at most every ten seconds."""

    def __init__(self) -> None:
        self._found: Memories = {}
        self._looked = -FRESH_SECONDS
        self._looking = asyncio.Lock()

    async def look(self, server: EnvServer) -> Memories:
        """Bytes by ("server" | "spare" | "sessions", environment or ""). The server's include supervisor and zygote."""
        async with self._looking:
            if time.monotonic() >= self._looked + FRESH_SECONDS:
                supervisor, forks = server.forks.pids()
                envs = server.sessions.envs_by_process()
                of = [(("sessions", envs[key]) if key in envs else ("spare", ""), pid) for key, pid in forks.items()]
                self._found = await asyncio.to_thread(_memory_of, supervisor, of)
                self._looked = time.monotonic()
        return self._found


def _memory_of(supervisor: int | None, of: list[tuple[tuple[str, str], int]]) -> Memories:
    found = Counter[tuple[str, str]]({("server", ""): 0, ("spare", ""): 0})
    if supervisor is not None:
        own = [os.getpid(), supervisor]
        try:
            with open(f"/proc/{supervisor}/task/{supervisor}/children") as children:
                own += map(int, children.read().split())
        except OSError:  # it has ended
            pass
        of = [(("server", ""), pid) for pid in own] + of
    for whose, pid in of:
        found[whose] += _proportional(pid)
    return dict(found)


def _proportional(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 if it is gone or cannot be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            return next(1024 * int(line.split()[1]) for line in rollup if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return 0
