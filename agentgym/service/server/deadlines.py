"""What a session may take how long for."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.service.protocol.frames import DEADLINE, IDLE, TOO_SLOW, ServiceLimits
from agentgym.service.server import slots

_CALLS = {
    slots.INIT: ("init", "init_seconds"),
    slots.RESET: ("reset", "reset_seconds"),
    slots.STEP: ("step", "step_seconds"),
    slots.CLOSE: ("close", "close_seconds"),
}
_OTHERS = {
    slots.WAITING: ("idle_seconds", IDLE, "nothing was asked for {}"),
    slots.DETACHED: ("resume_seconds", IDLE, "the client did not come back within {}"),
    slots.READING: ("message_seconds", TOO_SLOW, "a message took longer than {} to arrive"),
    slots.WRITING: ("message_seconds", TOO_SLOW, "an answer was not taken within {}"),
}


@dataclass(frozen=True)
class Overdue:
    """A limit that ran out.

    Attributes:
        code: one of `frames.CODES`.
        message: which limit.
        seconds: how long ago.
        calling: whether the worker is in a call: nothing but its end ends that.
        deaf: whether the client takes no message.
    """

    code: str
    message: str
    seconds: float
    calling: bool = False
    deaf: bool = False


def overdue(state: int, seconds: float, limits: ServiceLimits) -> Overdue | None:
    """The limit that a worker breaks that has been in a state for so long, or None."""
    if state in _CALLS:
        word, name = _CALLS[state]
        allowed: float = getattr(limits, name)
        message = f"{word} took longer than its limit of {allowed:g} s"
        return Overdue(DEADLINE, message, seconds - allowed, calling=True) if seconds > allowed else None
    if state not in _OTHERS:
        return None
    name, code, why = _OTHERS[state]
    allowed = getattr(limits, name)
    if seconds <= allowed:
        return None
    return Overdue(code, why.format(f"{allowed:g} s"), seconds - allowed, deaf=state == slots.WRITING)
