"""The server's metrics in Prometheus's text format."""

import asyncio
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agentgym import __version__
from agentgym.service.protocol.frames import PROTOCOL
from agentgym.service.server.session_server import SessionServer
from agentgym.service.server.slots import LAG_BOUNDS, TIME_BOUNDS, SessionCounts

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
Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float]]


def exposition(server: SessionServer, memory: Mapping[tuple[str, str], int]) -> str:
    """All metrics of a server as text. `memory` is what `Memory.look` returns."""
    sessions, counted = server.sessions, server.sessions.tallies()
    # All that is served has its rows from the start.
    tallies = {env: counted.get(env, SessionCounts()) for env in server.served}
    lines = [line for name, kind, help, rows in _families(server, tallies) for line in _family(name, kind, help, rows)]
    rows = [({"of": of, **({"env": env} if env else {})}, size) for (of, env), size in memory.items()]
    lines += _family("memory_bytes", "gauge", "Proportional memory of the server, spare workers and sessions.", rows)
    lines += _head("slot_return_seconds", "summary", "Times from the end of a broken limit until the slot is free.")
    lines.append(_sample("slot_return_seconds_sum", {}, sessions.returns.seconds))
    lines.append(_sample("slot_return_seconds_count", {}, sessions.returns.count))
    for what, help in _TIMES.items():
        lines += _head(f"{what}_seconds", "histogram", help)
        for env, tally in tallies.items():
            bounds = [bound / 1e6 for bound in TIME_BOUNDS]
            lines += _histogram(f"{what}_seconds", {"env": env}, bounds, *tally.times(what))
    lines += _head("front_lag_seconds", "histogram", "Delay of the server's event loop, for which its requests wait.")
    lines += _histogram("front_lag_seconds", {}, LAG_BOUNDS, sessions.lags.seconds, sessions.lags.counts)
    return "\n".join([*lines, ""])


def _families(server: SessionServer, tallies: Mapping[str, SessionCounts]) -> Iterable[tuple[str, str, str, Samples]]:
    """Name, type, help and samples of each counter and gauge."""
    sessions, connections = server.sessions, server.connections
    about = {"version": __version__, "python": platform.python_version(), "protocol": str(PROTOCOL)}
    yield "build_info", "gauge", "1, with the server's version.", [(about, 1)]
    yield "sessions", "gauge", "Sessions that are open.", [({}, len(sessions.open))]
    yield "sessions_limit", "gauge", "Sessions that may be open at a time.", [({}, sessions.most)]
    yield "draining", "gauge", "1 while the server ends and takes no new sessions.", [({}, int(sessions.draining))]
    yield "worker_states", "gauge", "Workers by state; spare ones wait for a session.", _by("state", sessions.states())
    yield "refused_total", "counter", "Sessions refused, by why.", _by("reason", sessions.refused)
    yield "slot_return_seconds_max", "gauge", "The longest slot_return_seconds.", [({}, sessions.returns.longest)]
    yield "unauthorized_total", "counter", "Requests refused for their token.", [({}, server.unauthorized.count)]
    help = "HTTP connections: a request runs (busy), or none does and the last had a token or was anonymous."
    yield "connections", "gauge", help, _by("state", connections.states())
    yield "connections_limit", "gauge", "HTTP connections that may be open.", [({}, connections.most)]
    help = "HTTP connections that were cut: idle ones to make room (capacity), or with a late request (too slow)."
    cut = {reason: connections.cut[reason] for reason in ("capacity", "too slow")}
    yield "connections_cut_total", "counter", help, _by("reason", cut)
    opened = Counter(session.env for session in sessions.open.values())
    yield (
        "env_sessions",
        "gauge",
        "Sessions that are open, by environment.",
        _by("env", {e: opened[e] for e in tallies}),
    )
    yield "sessions_opened_total", "counter", "Sessions opened.", [({"env": e}, t.opened) for e, t in tallies.items()]
    help = "Times that a client came back to its session."
    yield "sessions_resumed_total", "counter", help, [({"env": e}, t.resumed) for e, t in tallies.items()]
    ended = [({"env": env, **reason}, n) for env, t in tallies.items() for reason, n in _by("reason", t.ended)]
    yield "sessions_ended_total", "counter", "Sessions ended, by why.", ended
    errors = [({"env": env, **code}, n) for env, t in tallies.items() for code, n in _by("code", t.errors)]
    yield "errors_total", "counter", "Errors that clients were told in sessions, by code.", errors
    for name, help in _COUNTERS.items():
        yield f"{name}_total", "counter", help, [({"env": e}, t.counters[name]) for e, t in tallies.items()]


def _by(label: str, counts: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({label: name}, count) for name, count in sorted(counts.items())]


def _histogram(
    name: str, labels: Labels, bounds: Sequence[float], seconds: float, counts: Sequence[int]
) -> Iterable[str]:
    """The rows of a histogram. `counts` has one number for each bound, and one for larger values."""
    below = 0
    for bound, count in zip([*(f"{bound:g}" for bound in bounds), "+Inf"], counts, strict=True):
        below += count
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, below)
    yield _sample(f"{name}_sum", labels, seconds)
    yield _sample(f"{name}_count", labels, below)


def _family(name: str, kind: str, help: str, rows: Samples) -> list[str]:
    return [*_head(name, kind, help), *(_sample(name, labels, value) for labels, value in rows)]


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP agentgym_{name} {help}", f"# TYPE agentgym_{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    told = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"agentgym_{name}{{{told}}} {value}" if told else f"agentgym_{name} {value}"


class Memory:
    """The memory of a server's processes, measured at most every ten seconds."""

    def __init__(self) -> None:
        self._found: Mapping[tuple[str, str], int] = {}
        self._looked = -FRESH_SECONDS
        self._looking = asyncio.Lock()

    async def look(self, server: SessionServer) -> Mapping[tuple[str, str], int]:
        """Bytes by ("server" | "spare" | "sessions", environment or ""). The server's include supervisor and zygote."""
        async with self._looking:
            if time.monotonic() >= self._looked + FRESH_SECONDS:
                supervisor, forks = server.forks.pids()
                envs = server.sessions.envs_by_process()
                of = [(("sessions", envs[key]) if key in envs else ("spare", ""), pid) for key, pid in forks.items()]
                self._found = await asyncio.to_thread(_memory_of, supervisor, of)
                self._looked = time.monotonic()
        return self._found


def _memory_of(supervisor: int | None, of: list[tuple[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    found = Counter[tuple[str, str]]({("server", ""): 0, ("spare", ""): 0})
    if supervisor is not None:
        of = [(("server", ""), pid) for pid in (os.getpid(), supervisor, *_children(supervisor))] + of
    for whose, pid in of:
        found[whose] += _proportional(pid)
    return dict(found)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return list(map(int, children.read().split()))
    except OSError:
        return []


def _proportional(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 if it is gone or cannot be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            return next(1024 * int(line.split()[1]) for line in rollup if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return 0
