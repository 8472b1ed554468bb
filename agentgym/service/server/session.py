"""One session in the server: its process, connection and resume token, and the time limits of its worker."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass, field

from agentgym.service.protocol.frames import DEADLINE, IDLE, TOO_SLOW, ServiceLimits
from agentgym.service.server import slots
from agentgym.service.server.packets import Packets
from agentgym.service.server.slots import Slot

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
    """A limit that ran out, `seconds` ago."""

    code: str
    message: str
    seconds: float
    calling: bool = False
    deaf: bool = False


def overdue(state: int, seconds: float, limits: ServiceLimits) -> Overdue | None:
    """The limit that a worker broke by being in a state for this long; None: none."""
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


@dataclass
class ServedSession:
    """One session and its process."""

    id: str
    env: str
    protocol: str
    owner: str
    slot: int
    words: Slot
    resumable: bool
    local: bool = False
    opened: float = field(default_factory=time.monotonic)
    process: str = ""
    client: int | None = None
    control: socket.socket | None = None
    shared: Packets | None = None
    connections: int = 0
    ending: tuple[str, str] | None = None
    kill_at: float | None = None
    killed: bool = False
    pinged_at: float = 0.0
    due: float | None = None
    _next: bytes = b""  # digest of the token that the newest hello has
    _used: bytes = b""  # and of the one that was used last
    _opens: int = 0  # the number of the connection that the latter opened, or is about to

    def new_token(self) -> str:
        """A new resume token for the hello of a new connection; the previous one becomes invalid."""
        self.connections += 1
        self._opens = self.connections
        secret = secrets.token_urlsafe(32)
        self._next = _digest(secret)
        return f"{self.id}.{secret}"

    def claim(self, secret: str) -> bool:
        """Use up the secret of a resume token; returns whether it was valid.

        A hello may be lost, and the next token with it. So a used token stays valid until the client says something on the
        connection that it opened.
        """
        given = _digest(secret)
        new = hmac.compare_digest(self._next, given)
        again = hmac.compare_digest(self._used, given)
        if self.ending is not None or not (new or (again and not self._was_heard())):
            return False
        self._next, self._used, self._opens = b"", given, self.connections + 1
        return True

    def _was_heard(self) -> bool:
        words = self.words.words
        return words[slots.CONNECTION] == self._opens and words[slots.REQUESTS] != words[slots.REQUESTS_THEN]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
