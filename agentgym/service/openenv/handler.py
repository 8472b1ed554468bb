"""OpenEnv's wire protocol, version 0.10, for one session: a frame in, at most one frame out."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from agentgym.service.openenv.play import Invalid, Json, Play, UnknownTool, answer_of
from agentgym.service.protocol.frames import BAD_FRAME, BAD_REQUEST, CAPACITY, ENV_ERROR, UNKNOWN_CALL, Refused, decoded
from agentgym.service.worker.protocol_handler import CallRunner, ProtocolHandler, SessionInfo
from agentgym.storage.jsonl import finite, line_of, plain

if TYPE_CHECKING:
    from agentgym.core.env import Env

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR, SERVER_ERROR = -32602, -32603, -32000
_FRAMES = {
    "reset": {"type", "data"},
    "step": {"type", "data"},
    "mcp": {"type", "data"},
    "state": {"type"},
    "close": {"type"},
}
_DRAINING = "the server is ending: open a session at another (DRAINING)"
_LAST_WORDS = {CAPACITY: "CAPACITY_REACHED", ENV_ERROR: "FACTORY_ERROR"}
_RPC_KEYS = {"jsonrpc", "method", "params", "id"}


class OpenEnvHandler(ProtocolHandler):
    """Answers the frames of one client. Any error becomes an error frame; the session continues."""

    def __init__(self, env: Env, calls: CallRunner, session: SessionInfo):
        super().__init__(env, calls, session)
        self.play = Play(env, calls.call)
        self._count_error = calls.slot.count_error

    def answer(self, text: str) -> str | None:
        """The frame that answers a frame; None after "close", which ends the session."""
        try:
            frame = decoded(text)
        except (ValueError, RecursionError) as error:
            self._count_error(BAD_FRAME)
            return error_frame("INVALID_JSON", f"Invalid JSON: {error}")
        try:
            if (said := _plain_step(frame)) is not None:
                return self._step_plainly(said)
            return self._answered(frame)
        except Invalid as error:
            self._count_error(BAD_REQUEST)
            try:
                return error_frame("VALIDATION_ERROR", f"Invalid message: {error}", errors=error.errors)
            except RecursionError:  # the input could just be read
                return error_frame("VALIDATION_ERROR", f"Invalid message: {error}", errors=[])
        except Refused:  # there is no memory left
            raise
        except Exception as error:  # the environment's own error: it is reported, and the session continues
            return error_frame("EXECUTION_ERROR", _said(error))

    @staticmethod
    def last_word(code: str, message: str) -> str:
        """The last message before the server closes: the next call of OpenEnv's client raises it."""
        return error_frame(_LAST_WORDS.get(code, "SESSION_ERROR"), f"{message} ({code})")

    def _answered(self, frame: Any) -> str | None:
        if not isinstance(frame, dict):
            raise Invalid("model_type", (), "Input should be a valid dictionary", frame)
        kind = frame.get("type", "")
        if not isinstance(kind, str) or kind not in _FRAMES:
            self._count_error(UNKNOWN_CALL)
            return error_frame("UNKNOWN_TYPE", f"Unknown message type: {kind!s:.200}")
        if extra := frame.keys() - _FRAMES[kind]:
            raise Invalid("extra_forbidden", (min(extra),), "Extra inputs are not permitted", frame[min(extra)])
        if kind == "step":
            return _written({"type": "observation", "data": self.play.step(_data(frame))})
        if kind == "reset":
            if self.draining:
                self.ended = True
                return error_frame("SESSION_ERROR", _DRAINING)
            data = self.play.reset(_data(frame) if "data" in frame else {})
            return _written({"type": "observation", "data": data})
        if kind == "state":
            return _written({"type": "state", "data": self.play.state()})
        if kind == "mcp":
            return _written({"type": "mcp", "data": self.rpc(_data(frame))})
        self.ended = True
        return None

    def _step_plainly(self, said: str) -> str:
        """As `_answered`, for a step with a text action: a fast path."""
        messages, reward, done, metadata = self.play.stepped(said)
        if metadata or not math.isfinite(reward):
            return _written({"type": "observation", "data": answer_of({"messages": messages}, reward, done, metadata)})
        observation = f'{{"messages": {_written(messages)}, "metadata": {{}}}}'
        data = f'{{"observation": {observation}, "reward": {reward!r}, "done": {"true" if done else "false"}}}'
        return f'{{"type": "observation", "data": {data}}}'

    def rpc(self, request: Json) -> Json:
        if problem := _problem_of_rpc(request):
            return rpc_error(None, INVALID_REQUEST, f"Invalid request: {problem}")
        id, method, params = request.get("id"), request["method"], request.get("params") or {}
        if method == "tools/list":
            return rpc_result(id, {"tools": self.play.tools("inputSchema")})
        if method == "openenv/session/create":
            return rpc_result(id, {"session_id": self._session.id})
        if method == "openenv/session/close":
            told = params.get("session_id")
            if told == self._session.id:
                return rpc_error(id, INVALID_REQUEST, "this session ends with its WebSocket, not by a call")
            return rpc_error(id, INVALID_PARAMS, f"Unknown session_id: {told!s:.100}")
        if method != "tools/call":
            return rpc_error(id, METHOD_NOT_FOUND, f"Method not found: {method:.100}")
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not name:
            return rpc_error(id, INVALID_PARAMS, "Missing 'name' in params")
        if not isinstance(arguments, dict | None):
            return rpc_error(id, INVALID_PARAMS, "'arguments' must be an object")
        if self.draining and self.play.state()["episode_id"] is None:  # the call would begin one
            self.ended = True
            return rpc_error(id, SERVER_ERROR, _DRAINING)
        try:
            return rpc_result(id, self.play.call_tool(name, arguments or {}))
        except UnknownTool as error:
            return rpc_error(id, INVALID_PARAMS, str(error))
        except Refused:
            raise
        except Exception as error:  # the environment's own error: it is reported, and the session continues
            return rpc_error(id, INTERNAL_ERROR, _said(error))


class BareMcpHandler(OpenEnvHandler):
    """Answers JSON-RPC requests that stand in no frame."""

    def answer(self, text: str) -> str:
        asked = rpc_of(text)
        return _written(asked if "error" in asked else self.rpc(asked))

    @staticmethod
    def last_word(code: str, message: str) -> str:
        return json.dumps(rpc_error(None, SERVER_ERROR, f"{message} ({code})"))


def error_frame(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def rpc_of(text: str | bytes) -> Json:
    """The JSON-RPC request in a text, or an error response."""
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        return rpc_error(None, PARSE_ERROR, "Parse error")
    problem = _problem_of_rpc(asked)
    return rpc_error(None, INVALID_REQUEST, f"Invalid request: {problem}") if problem else dict(asked)


def _problem_of_rpc(request: Any) -> str | None:
    if not isinstance(request, dict):
        return "a request is an object"
    if extra := request.keys() - _RPC_KEYS:
        return f"there is no field {min(extra)!r:.100}"
    if request.get("jsonrpc") != "2.0":
        return 'jsonrpc must be "2.0"'
    if not isinstance(request.get("method"), str):
        return "method must be text"
    if not isinstance(request.get("params", {}), dict):
        return "params must be an object"
    if not isinstance(request.get("id"), str | int | None) or isinstance(request.get("id"), bool):
        return "id must be text or a whole number"
    return None


def rpc_result(id: Any, result: Any) -> Json:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def rpc_error(id: Any, code: int, message: str, data: Any = None) -> Json:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message, "data": data}}


def _plain_step(frame: Any) -> str | None:
    """The text of a step frame with nothing else, as most are; None: it must be parsed in full."""
    if type(frame) is dict and len(frame) == 2 and frame.get("type") == "step":
        data = frame.get("data")
        if type(data) is dict and len(data) == 1:
            message = data.get("message")
            return message if type(message) is str else None
    return None


def _data(frame: Json) -> Json:
    if "data" not in frame:
        raise Invalid("missing", ("data",), "Field required", frame)
    data = frame["data"]
    if not isinstance(data, dict):
        raise Invalid("dict_type", ("data",), "Input should be a valid dictionary", data)
    return data


def _written(frame: Any) -> str:
    """A frame, or a part of one, as ASCII JSON: half of a surrogate pair is an escape, NaN and infinities are null."""
    try:
        return _encode(frame)
    except (TypeError, ValueError, RecursionError):  # a NaN, a key that is no text, or a value within itself
        return json.dumps(finite(json.loads(line_of(frame))), allow_nan=False)


# Made once: json.dumps with settings makes an encoder for each value.
_encode = json.JSONEncoder(allow_nan=False, check_circular=False, default=plain).encode


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
