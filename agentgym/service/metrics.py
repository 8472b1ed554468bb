"""What a server counts, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.service.sessions import Sessions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(sessions: Sessions) -> str:
    """All metrics of a server as text."""
    counters = sessions.counters()
    nanoseconds = counters.pop("step_nanoseconds")
    lines = _gauge("sessions", "Sessions that are open.", len(sessions.open))
    lines += _gauge("sessions_limit", "Sessions that may be open at a time.", sessions.most)
    lines += _gauge("draining", "1 while the server takes no new sessions as it is ending.", int(sessions.draining))
    lines += _labelled("worker_states", "gauge", "Workers by what they are doing.", "state", sessions.states())
    lines += _counter("sessions_opened", "Sessions opened.", sessions.opened)
    lines += _counter("sessions_resumed", "Times that a client came back to its session.", sessions.resumed)
    lines += _labelled("sessions_ended_total", "counter", "Sessions ended, by why.", "reason", sessions.ended)
    lines += _labelled("refused_total", "counter", "Sessions refused, by why.", "reason", sessions.refused)
    for name, value in counters.items():
        lines += _counter(name, f"{name.replace('_', ' ').capitalize()}, of all sessions.", value)
    lines += _counter("step_seconds", "Time that environments took for steps.", nanoseconds / 1e9)
    return "\n".join([*lines, ""])


def _counter(name: str, help: str, value: float) -> list[str]:
    return [*_head(f"{name}_total", "counter", help), f"agentgym_{name}_total {value}"]


def _gauge(name: str, help: str, value: float) -> list[str]:
    return [*_head(name, "gauge", help), f"agentgym_{name} {value}"]


def _labelled(name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> list[str]:
    lines = _head(name, kind, help)
    return lines + [f'agentgym_{name}{{{label}="{key}"}} {value}' for key, value in sorted(values.items())]


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP agentgym_{name} {help}", f"# TYPE agentgym_{name} {kind}"]
