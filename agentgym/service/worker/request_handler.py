"""Numbered requests, each run once, as "agentgym/1" and "sandbox/1" have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentgym.service.protocol.frames import (
    BAD_REQUEST,
    ENV_ERROR,
    OUT_OF_MEMORY,
    Refused,
    error_frame,
    json_of_text,
    last_word,
    text_of_json,
)
from agentgym.service.worker.session_worker import CallRunner, SessionInfo, described


class RequestHandler:
    """Runs requests and keeps the last answers for a client that resumes; see `session_worker.ProtocolHandler`.

    A subclass has a method `call_NAME` for each call, and checks requests by `check`.
    """

    resumable = True
    last_word = staticmethod(last_word)
    check: Callable[[Any, int], None]

    def __init__(self, held: Any, calls: CallRunner, session: SessionInfo):
        self.ended = False
        self.draining = False
        self._held = held
        self._calls = calls
        self._session = session
        self._last = 0
        self._kept: dict[int, str] = {}

    def _hello(self, resume: str | None, protocol: int, **more: Any) -> str:
        told = {"session": self._session.id, "resume": resume, "protocol": protocol, "last": self._last}
        return text_of_json({**told, **more, "limits": vars(self._session.limits)})

    def answer(self, text: str) -> str:
        """The answer to a message."""
        try:
            return self._answered(json_of_text(text))
        except Refused as refused:
            if refused.fatal:
                raise
            self._calls.count_error(refused.code)
            return text_of_json(error_frame(refused.code, str(refused), fatal=False))

    def _answered(self, request: Any, keep: int = 1) -> str:
        id = request.get("id") if isinstance(request, dict) else None
        id = id if type(id) is int else None
        if id is not None and 0 < id <= self._last:
            why = f"request {id} was run, and its answer is not kept any more; the last is {self._last}"
            return self._kept.get(id) or text_of_json(error_frame(BAD_REQUEST, why, fatal=False, id=id))
        try:
            self.check(request, self._last + 1)
            answer = f'{{"id": {id}, "result": {text_of_json(self._run(request))}}}'
        except (Exception, SystemExit) as error:
            refused = self._refusal(error)
            if refused.code == OUT_OF_MEMORY:
                raise
            if isinstance(error, Refused):  # others were counted as they were raised
                self._calls.count_error(refused.code)
            answer = text_of_json(error_frame(refused.code, str(refused), refused.fatal, id))
            self.ended = self.ended or refused.fatal
        if id == self._last + 1:
            self._last += 1
            self._kept[self._last] = answer
            while len(self._kept) > keep:
                del self._kept[self._last + 1 - len(self._kept)]  # the oldest: ids follow one another
        return answer

    def _run(self, request: dict[str, Any]) -> Any:
        return getattr(self, f"call_{request['call']}")(request)

    def _refusal(self, error: BaseException) -> Refused:
        return error if isinstance(error, Refused) else Refused(ENV_ERROR, described(error))
