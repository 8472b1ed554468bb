"""One session in the server: its process, connection and resume token, and the time limits of its worker."""

import hmac
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import DEADLINE, IDLE, TOO_SLOW, ServiceLimits
from agentgym.service.server import slots
from agentgym.service.server.events import log_event
from agentgym.service.server.forks import Packets
from agentgym.service.server.slots import Slot
from agentgym.service.server.tokens import digest_of

CLOSED, LEFT = "closed", "left"
_CAUSES = {DEADLINE: "deadline", frames.OUT_OF_MEMORY: "memory", frames.ENV_ERROR: "exception"}
# The limit that each state has, the code of breaking it, and the message.
_LIMITS = {
    slots.INIT: ("init_seconds", DEADLINE, "init took longer than its limit of {}"),
    slots.RESET: ("reset_seconds", DEADLINE, "reset took longer than its limit of {}"),
    slots.STEP: ("step_seconds", DEADLINE, "step took longer than its limit of {}"),
    slots.CLOSE: ("close_seconds", DEADLINE, "close took longer than its limit of {}"),
    slots.WAITING: ("idle_seconds", IDLE, "nothing was asked for {}"),
    slots.DETACHED: ("resume_seconds", IDLE, "the client did not come back within {}"),
    slots.READING: ("message_seconds", TOO_SLOW, "a message took longer than {} to arrive"),
    slots.WRITING: ("message_seconds", TOO_SLOW, "an answer was not taken within {}"),
}


def overdue(state: int, seconds: float, limits: ServiceLimits) -> tuple[str, str, float] | None:
    """The limit that a worker broke by being in a state for this long: code, message and seconds ago. None: none."""
    if state not in _LIMITS:
        return None
    name, code, why = _LIMITS[state]
    allowed: float = getattr(limits, name)
    return (code, why.format(f"{allowed:g} s"), seconds - allowed) if seconds > allowed else None


@dataclass
class ServedSession:
    id: str
    env: str
    protocol: str
    owner: str
    slot: int
    words: Slot
    resumable: bool
    opened: float = field(default_factory=time.monotonic)
    process: str = ""  # its key at `forks`
    client: int | None = None  # a duplicate of the client's connection, for the last word
    control: socket.socket | None = None  # to its worker, or `shared` if it shares a process
    shared: Packets | None = None
    connections: int = 0
    ending: tuple[str, str] | None = None  # code and message of its end
    kill_at: float | None = None
    killed: bool = False
    pinged_at: float = 0.0
    due: float | None = None  # when the last limit that it broke ran out
    _next: bytes = b""  # digest of the token that the newest hello has
    _used: bytes = b""  # and of the one that was used last
    _opens: int = 0  # the number of the connection that the latter opened, or is about to

    def new_token(self) -> str:
        """A new resume token for the hello of a new connection; the previous one becomes invalid."""
        self.connections += 1
        self._opens = self.connections
        secret = secrets.token_urlsafe(32)
        self._next = digest_of(secret)
        return f"{self.id}.{secret}"

    def claim(self, secret: str) -> bool:
        """Use up the secret of a resume token; returns whether it was valid.

        It stays valid until the client says something on the connection that it opened: the hello may be lost.
        """
        given, words = digest_of(secret), self.words.words
        new = hmac.compare_digest(self._next, given)
        again = hmac.compare_digest(self._used, given)
        heard = words[slots.CONNECTION] == self._opens and words[slots.REQUESTS] != words[slots.REQUESTS_THEN]
        if self.ending is not None or not (new or (again and not heard)):
            return False
        self._next, self._used, self._opens = b"", given, self.connections + 1
        return True

    def log_end(self, pid: int | None, reason: str, message: str, status: int | None) -> None:
        """Log the end, unless the client closed the session or the server is ending."""
        if reason in (CLOSED, LEFT, frames.DRAINING):
            return
        told: dict[str, Any] = {"cause": _CAUSES.get(reason, reason.lower())}
        if reason == frames.WORKER_DIED and status is not None:
            code = os.waitstatus_to_exitcode(status)
            told = {"cause": "exit", "exit_code": code}
            if code < 0:  # real-time signals have no name
                known = -code in set(signal.Signals)
                told = {"cause": "signal", "signal": signal.Signals(-code).name if known else str(-code)}
        told |= {"code": reason, "message": message, "seconds": round(time.monotonic() - self.opened, 3)}
        log_event("session_ended", env=self.env, session=self.id, token=self.owner, pid=pid, **told)
