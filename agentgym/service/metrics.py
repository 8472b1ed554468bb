"""What a server counts, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentgym.service.sessions import Sessions
from agentgym.service.slots import TIME_BOUNDS
from agentgym.service.tallies import Tally

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


def exposition(sessions: Sessions, envs: Iterable[str]) -> str:
    """All metrics of a server as text.

    Args:
        sessions: its table.
        envs: the ids of what it serves; all have their rows from the start.
    """
    counted = sessions.tallies()
    tallies = {env: counted.get(env, Tally()) for env in envs}
    lines = [*_of_the_server(sessions), *_of_envs(sessions, tallies)]
    for name, help in _COUNTERS.items():
        lines += _family(f"{name}_total", "counter", help, [({"env": e}, t.counters[name]) for e, t in tallies.items()])
    lines += _step_seconds(tallies)
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
    help = "From the end of a limit that a session broke to its slot being free."
    yield from _head("slot_return_seconds", "summary", help)
    yield _sample("slot_return_seconds_sum", {}, returns.seconds)
    yield _sample("slot_return_seconds_count", {}, returns.count)
    yield from _family("slot_return_seconds_max", "gauge", "The longest of these.", [({}, returns.longest)])


def _of_envs(sessions: Sessions, tallies: Mapping[str, Tally]) -> Iterable[str]:
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


def _step_seconds(tallies: Mapping[str, Tally]) -> Iterable[str]:
    yield from _head("step_seconds", "histogram", "Time that environments took for a step.")
    for env, tally in tallies.items():
        below = 0
        for bound, count in zip(TIME_BOUNDS, tally.times, strict=False):
            below += count
            yield _sample("step_seconds_bucket", {"env": env, "le": f"{bound / 1e6:g}"}, below)
        # From the same numbers as the rows above, which a worker may be about to add to.
        every = sum(tally.times)
        yield _sample("step_seconds_bucket", {"env": env, "le": "+Inf"}, every)
        yield _sample("step_seconds_sum", {"env": env}, tally.counters["step_nanoseconds"] / 1e9)
        yield _sample("step_seconds_count", {"env": env}, every)


def _family(name: str, kind: str, help: str, rows: Iterable[tuple[Labels, float]]) -> list[str]:
    return [*_head(name, kind, help), *(_sample(name, labels, value) for labels, value in rows)]


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP agentgym_{name} {help}", f"# TYPE agentgym_{name} {kind}"]


def _sample(name: str, labels: Labels, value: float) -> str:
    told = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"agentgym_{name}{{{told}}} {value}" if told else f"agentgym_{name} {value}"
