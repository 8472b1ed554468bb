"""The server's log: one JSON object a line, as docs/services.md lists them. `event` names what happened."""

import contextlib
import datetime
import json
import logging
import os
import time
import traceback
from typing import Any

from agentgym.core.tracebacks import text_of_error

_TRACEBACK_LETTERS = 3000  # the last of it: with them a line is written to a pipe as a whole
_ERRORS, _ERRORS_SECONDS = 10, 60.0
REFUSALS_SECONDS = 10.0
_log = logging.getLogger("agentgym.service")


def line_of_event(event: str, **fields: Any) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **fields}, default=str)


def log_event(event: str, **fields: Any) -> None:
    _log.warning(line_of_event(event, **fields))


class EnvErrors:
    """Logs exceptions of a session's environment: at most ten a minute, with a count of those left out."""

    def __init__(self, env: str, session: str, token: str):
        self._of = {"env": env, "session": session, "token": token}
        self.since = -_ERRORS_SECONDS
        self._logged = 0
        self._left_out = 0

    def log(self, call: str, error: BaseException) -> None:
        now = time.monotonic()
        if now >= self.since + _ERRORS_SECONDS:
            self.since, self._logged = now, 0
        if self._logged >= _ERRORS:
            self._left_out += 1
            return
        self._logged += 1
        with contextlib.suppress(MemoryError, OSError):  # no memory to write it, or stderr is closed
            where = error.__traceback__.tb_next if error.__traceback__ is not None else None
            told = "".join(traceback.format_exception(type(error), error, where))[-_TRACEBACK_LETTERS:]
            said = {"pid": os.getpid(), "call": call, "error": f"{type(error).__name__}: {text_of_error(error)}"[:300]}
            line = line_of_event("env_error", **self._of, **said, traceback=told, left_out=self._left_out)
            os.write(2, f"{line}\n".encode())
            self._left_out = 0


class Unauthorized:
    """Counts requests with a wrong or missing token, and logs them: at most one line in ten seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._unsaid = 0
        self._last: dict[str, Any] = {}
        self._said = -REFUSALS_SECONDS

    def add(self, peer: str | None, path: str, given: bool) -> None:
        self.count += 1
        self._unsaid += 1
        self._last = {"peer": peer, "path": path[:200], "why": "wrong token" if given else "no token"}
        self.say()

    def say(self, last: bool = False) -> None:
        """Log what was not yet said, if it is time, or if this is the last call."""
        now = time.monotonic()
        if self._unsaid and (last or now >= self._said + REFUSALS_SECONDS):
            log_event("unauthorized", requests=self._unsaid, **self._last)
            self._unsaid, self._said = 0, now
