"""The server's metrics in Prometheus's text format."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentgym import __version__
from agentgym.service.protocol.frames import PROTOCOL
from agentgym.service.server.sessions import Sessions
from agentgym.service.server.slots import TIME_BOUNDS
from agentgym.service.server.tallies import LAG_BOUNDS, SessionCounts

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer
import asyncio
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = {
    "steps": "Steps that environments made.",
    "episodes": "Episodes that were played to their end.",
    "requests": "Messages from clients.",
    "received_bytes": "Bytes from clients.",
    "sent_bytes": "Bytes to clients.",
    "env_errors": "Calls in which an environment raised.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Labels = Mapping[str, str]
# Name, help, how many took how long, and the counter of their time in all.
_HISTOGRAMS: tuple[tuple[str, str, Callable[[SessionCounts], list[int]], str], ...] = (
    ("step_seconds", "Time that environments took for a step.", lambda tally: tally.times, "step_nanoseconds"),
    ("reset_seconds", "Time that environments took for a reset.", lambda tally: tally.reset_times, "reset_nanoseconds"),
    (
        "open_seconds",
        "From the request for a session to its environment being made.",
        lambda tally: tally.open_times,
        "open_nanoseconds",
    ),
)


def exposition(server: EnvServer, memory: Mapping[tuple[str, str], int]) -> str:
    """All metrics of a server as text. `memory` is what `Memory.look` returns."""
    sessions = server.sessions
    counted = sessions.tallies()
    tallies = {env: counted.get(env, SessionCounts()) for env in server.served}
    lines = [*_of_the_server(sessions), *_of_the_processes(server, memory), *_of_envs(sessions, tallies)]
    for name, help in _COUNTERS.items():
        lines += _family(f"{name}_total", "counter", help, [({"env": e}, t.counters[name]) for e, t in tallies.items()])
    for name, help, times, total in _HISTOGRAMS:
        lines += _head(name, "histogram", help)
        for env, tally in tallies.items():
            seconds = [bound / 1e6 for bound in TIME_BOUNDS]
            lines += _histogram(name, {"env": env}, seconds, times(tally), tally.counters[total] / 1e9)
    return "\n".join([*lines, ""])


def _of_the_server(sessions: Sessions) -> Iterable[str]:
    returns = sessions.returns
    yield from _family("sessions", "gauge", "Sessions that are open.", [({}, len(sessions.open))])
    yield from _family("sessions_limit", "gauge", "Sessions that may be open at a time.", [({}, sessions.most)])
    help = "1 while the server takes no new sessions as it is ending."
    yield from _family("draining", "gauge", help, [({}, int(sessions.draining))])
    states = sessions.states()
    help = "Workers by what they are doing; spare ones wait for a session."
    yield from _family("worker_states", "gauge", help, [({"state": s}, n) for s, n in states.items()])
    refused = [({"reason": reason}, n) for reason, n in sorted(sessions.refused.items())]
    yield from _family("refused_total", "counter", "Sessions refused, by why.", refused)
    help = "Times from the end of a broken limit until the slot is free."
    yield from _head("slot_return_seconds", "summary", help)
    yield _sample("slot_return_seconds_sum", {}, returns.seconds)
    yield _sample("slot_return_seconds_count", {}, returns.count)
    yield from _family("slot_return_seconds_max", "gauge", "The longest of these.", [({}, returns.longest)])


def _of_envs(sessions: Sessions, tallies: Mapping[str, SessionCounts]) -> Iterable[str]:
    opened = sessions.open_by_env()
    rows = [({"env": env}, opened.get(env, 0)) for env in tallies]
    yield from _family("env_sessions", "gauge", "Sessions that are open, by environment.", rows)
    rows = [({"env": env}, tally.opened) for env, tally in tallies.items()]
    yield from _family("sessions_opened_total", "counter", "Sessions opened.", rows)
    rows = [({"env": env}, tally.resumed) for env, tally in tallies.items()]
    yield from _family("sessions_resumed_total", "counter", "Times that a client came back to its session.", rows)
    rows = [({"env": e, "reason": why}, n) for e, tally in tallies.items() for why, n in sorted(tally.ended.items())]
    yield from _family("sessions_ended_total", "counter", "Sessions ended, by why.", rows)
    rows = [({"env": e, "code": code}, n) for e, tally in tallies.items() for code, n in sorted(tally.errors.items())]
    yield from _family("errors_total", "counter", "Errors that clients were told in sessions, by code.", rows)


def _of_the_processes(server: EnvServer, memory: Mapping[tuple[str, str], int]) -> Iterable[str]:
    about = {"version": __version__, "python": platform.python_version(), "protocol": str(PROTOCOL)}
    yield from _family("build_info", "gauge", "1, with the server's version.", [(about, 1)])
    help = "Requests that were refused for their token."
    yield from _family("unauthorized_total", "counter", help, [({}, server.unauthorized.count)])
    help = "HTTP connections: a request runs (busy), or none does and the last had a token or was anonymous."
    rows = [({"state": state}, count) for state, count in server.connections.states().items()]
    yield from _family("connections", "gauge", help, rows)
    yield from _family(
        "connections_limit", "gauge", "HTTP connections that may be open.", [({}, server.connections.most)]
    )
    cut = server.connections.cut
    help = "HTTP connections that were cut: idle ones to make room (capacity), or with a request that did not come (too slow)."
    rows = [({"reason": reason}, cut[reason]) for reason in ("capacity", "too slow")]
    yield from _family("connections_cut_total", "counter", help, rows)
    help = (
        "Memory, with shares of what processes share: of the server, of spare workers and of sessions, by environment."
    )
    rows = [({"of": of, **({"env": env} if env else {})}, size) for (of, env), size in memory.items()]
    yield from _family("memory_bytes", "gauge", help, rows)
    lags = server.sessions.lags
    yield from _head("front_lag_seconds", "histogram", "By how much the server comes late: so long its requests wait.")
    yield from _histogram("front_lag_seconds", {}, LAG_BOUNDS, lags.counts, lags.seconds)


def _histogram(
    name: str, labels: Labels, bounds: Sequence[float], counts: Sequence[int], seconds: float
) -> Iterable[str]:
    below = 0
    for bound, count in zip(bounds, counts, strict=False):
        below += count
        yield _sample(f"{name}_bucket", {**labels, "le": f"{bound:g}"}, below)
    # From the same numbers as the rows above, which a worker may be about to add to.
    every = sum(counts)
    yield _sample(f"{name}_bucket", {**labels, "le": "+Inf"}, every)
    yield _sample(f"{name}_sum", labels, seconds)
    yield _sample(f"{name}_count", labels, every)


def _family(name: str, kind: str, help: str, rows: Iterable[tuple[Labels, float]]) -> list[str]:
    return [*_head(name, kind, help), *(_sample(name, labels, value) for labels, value in rows)]


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP agentgym_{name} {help}", f"# TYPE agentgym_{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    told = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"agentgym_{name}{{{told}}} {value}" if told else f"agentgym_{name} {value}"


# A look asks the kernel to walk through the memory of every process: milliseconds of it for each.
FRESH_SECONDS = 10.0


class Memory:
    """The memory of a server's processes, measured at most every ten seconds."""

    def __init__(self) -> None:
        self._found: Mapping[tuple[str, str], int] = {}
        self._looked = -FRESH_SECONDS
        self._looking = asyncio.Lock()

    async def look(self, server: EnvServer) -> Mapping[tuple[str, str], int]:
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
