"""The protocol "sandbox/1" as the worker speaks it: it holds one sandbox and passes a client's calls to its guest."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

from agentgym.core.registration import EnvSpec
from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.guest.guest_sandbox import FILE_TIMEOUT, GRACE, Header
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import Refused
from agentgym.service.protocol.sandbox_frames import GUEST_CALLS, LARGEST_DATA, PART, PROTOCOL, check_sandbox_request
from agentgym.service.worker.protocol_handler import CallRunner, RequestHandler, SessionInfo, described

if TYPE_CHECKING:  # the server imports this module, and needs no Docker
    from agentgym.sandbox.served import ServedSandbox

# The guest ends a program whose time is up, and has at least this long for it before the server ends the session.
KILL_SECONDS = 5.0


class SandboxHandler(RequestHandler):
    """`clean`: no programs have run since the sandbox was started or reset, so nothing is lost with it."""

    check = staticmethod(check_sandbox_request)

    def __init__(self, held: ServedSandbox, calls: CallRunner, session: SessionInfo):
        super().__init__(held, calls, session)
        self.clean = True
        self._parts: list[bytes] = []
        self._reading = False

    @staticmethod
    def make(spec: EnvSpec, tasks: object) -> ServedSandbox:
        from agentgym.sandbox.served import ServedSandbox

        return ServedSandbox.of_settings(spec.kwargs)

    @staticmethod
    def has_sandbox(held: Any) -> bool:
        return True

    def hello(self, resume: str | None) -> str:
        return self._hello(resume, PROTOCOL, most=vars(self._held.most))

    def _answered(self, request: Any, keep: int = 1) -> str:
        answer = super()._answered(request, keep)
        if self.draining and self.clean and self._held.box is not None:
            self.ended = True  # it was given back, and must not be lent again
        return answer

    def _refusal(self, error: BaseException) -> Refused:
        if isinstance(error, SandboxError):
            return Refused(frames.SANDBOX_ERROR, str(error), fatal=True)
        return error if isinstance(error, Refused) else Refused(frames.ENV_ERROR, described(error), fatal=True)

    def _run(self, request: dict[str, Any]) -> Any:
        call = request["call"]
        if call == "close":
            self.ended = True
            return {}
        if self.draining and self.clean:
            raise Refused(frames.DRAINING, "the server is ending: open a sandbox at another", fatal=True)
        if call == "start":
            return self._start(request)
        if self._held.box is None:
            raise Refused(frames.BAD_REQUEST, f"{call} needs a sandbox: start comes first")
        if call == "next":
            if not self._reading:
                raise Refused(frames.BAD_REQUEST, "next: nothing is being read")
            return self._calls.call("step", self._next)
        if self._reading:
            # Its parts would be taken for the answer to this.
            raise Refused(frames.BAD_REQUEST, f"{call}: a read must be taken to its end first", fatal=True)
        return self._part(request) if call == "part" else self._pass_on(request)

    def _start(self, request: dict[str, Any]) -> Any:
        if self._held.box is not None:
            raise Refused(frames.BAD_REQUEST, "start: this session has its sandbox; open another session")
        try:
            spec = self._held.spec_of(request["spec"], self._session.limits.init_seconds)
        except ValueError as error:
            raise Refused(frames.BAD_REQUEST, str(error)) from None
        wanted, total = (round(1000 * spec.cpus), spec.memory, 1), self._held.total
        if not self._calls.slot.reserve_sandbox(wanted, (round(1000 * total.cpus), total.memory, total.count)):
            raise Refused(
                frames.CAPACITY, "the sandboxes here use all that they may together (--sandbox-total)", fatal=True
            )
        return self._calls.call("init", self._held.start, spec, request["run"])

    def _part(self, request: dict[str, Any]) -> dict[str, Any]:
        data = _bytes_of(request)
        if sum(map(len, self._parts)) + len(data) > LARGEST_DATA:
            self._parts.clear()
            raise Refused(frames.TOO_LARGE, f"more than {LARGEST_DATA:,} bytes for one call")
        self._parts.append(data)
        return {}

    def _pass_on(self, request: dict[str, Any]) -> Any:
        call = request["call"]
        data = b"".join([*self._parts, _bytes_of(request)])
        self._parts.clear()
        header: Header = {"do": call, **{name: request[name] for name in GUEST_CALLS[call]}}
        seconds = FILE_TIMEOUT
        if "timeout" in header:
            limit = self._session.limits.step_seconds
            most = max(limit - KILL_SECONDS, limit / 2)
            if not (math.isfinite(header["timeout"]) and header["timeout"] <= most):
                why = f"this server gives a program {most:g} s (of --step-timeout {limit:g})"
                raise Refused(frames.BAD_REQUEST, f"{call}: timeout={header['timeout']:g}: {why}")
            seconds = header["timeout"] + GRACE
        self.clean = call == "reset" or (self.clean and call == "ping")
        if call == "reset" and self._held.box.spec.writable_root:
            return self._calls.call("init", self._start_again)
        return self._calls.call("step", self._asked, header, data, seconds)

    def _start_again(self) -> dict[str, Any]:
        self._held.box.reset()
        return {"left": []}

    def _next(self) -> dict[str, Any]:
        header, data = self._held.box.channel.answer("read", timeout=FILE_TIMEOUT)
        self._reading = bool(header.get("more"))
        return self._read_on(header, data) if self._reading else header

    def _asked(self, header: Header, data: bytes, seconds: float) -> dict[str, Any]:
        answer, payload = self._held.box.channel.call(header, data, timeout=seconds)
        return self._read_on(answer, payload) if answer.get("more") else _with_data(answer, payload)

    def _read_on(self, header: Header, data: bytes) -> dict[str, Any]:
        """Parts of a file joined up to the size of an answer, and the guest's answer after them, if it has come."""
        parts, size = [data], len(data)
        while header.get("more") and size < PART:
            header, data = self._held.box.channel.answer("read", timeout=FILE_TIMEOUT)
            parts.append(data)
            size += len(data)
        self._reading = bool(header.get("more"))
        return _with_data({"more": True} if self._reading else {"more": True, "then": header}, b"".join(parts))


def _with_data(header: Header, data: bytes) -> dict[str, Any]:
    return {**header, "data": base64.b64encode(data).decode()} if data else header


def _bytes_of(request: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(request.get("data", ""), validate=True)
    except ValueError as error:
        raise Refused(frames.BAD_REQUEST, f"{request['call']}: data is not base64: {error}") from None
