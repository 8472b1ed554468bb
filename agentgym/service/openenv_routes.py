"""OpenEnv's routes on our server: for the first environment at the root, and for each under its id.

A WebSocket at /ws is handed to a worker that speaks `openenv`, and the front has no more to do with it. What is asked over HTTP
becomes frames for a session that the front itself talks to: `POST /reset` and `/step` take one for a single request, `POST /mcp`
one that lasts from `openenv/session/create` to `openenv/session/close`, and `WS /ws?session_id=` is attached to such a one.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from agentgym.service import openenv_schemas as schemas
from agentgym.service.frames import Refused
from agentgym.service.handshake import check_handshake
from agentgym.service.line import Line
from agentgym.service.openenv import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    SERVER_ERROR,
    OpenEnvWire,
    error_frame,
    problem_of_rpc,
    rpc_error,
    rpc_result,
)
from agentgym.service.openenv_tasks import TaskRoutes, answer_422, answered, object_of

if TYPE_CHECKING:
    from agentgym.service.server import Front

Json = dict[str, Any]
WIRE = "openenv"


def add_routes(app: web.Application, front: Front) -> None:
    """Add OpenEnv's routes for every environment of a server."""
    envs = list(front.settings.envs)
    everywhere = [OpenEnvRoutes(front, envs[0], envs, "")]
    everywhere += [OpenEnvRoutes(front, env, [env], f"/{env}") for env in envs]
    for one in everywhere:
        app.router.add_routes(one.routes())

    async def end(_: web.Application) -> None:
        for one in everywhere:
            one.close()

    app.on_shutdown.append(end)


@dataclass
class _Shared:
    """A session that was made over HTTP."""

    line: Line
    owner: str | None
    attached: bool = False
    closing: bool = False


class OpenEnvRoutes:
    """OpenEnv's routes for one environment.

    Args:
        front: the server.
        env: the environment's id there.
        listed: ids of the environments whose tasks are told.
        prefix: what stands before each path.
    """

    def __init__(self, front: Front, env: str, listed: list[str], prefix: str):
        self.env = env
        self.prefix = prefix
        self._front = front
        self._spec = front.settings.envs[env]
        self._tasks = TaskRoutes(listed, front.ask_tasks)
        self._shared: dict[str, _Shared] = {}

    def routes(self) -> list[web.RouteDef]:
        """Routes to add to an application. /health at the root is the server's own."""
        tasks = self._tasks
        named: dict[str, tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = {
            "/ws": ("GET", self.socket),
            "/reset": ("POST", self.reset),
            "/step": ("POST", self.step),
            "/state": ("GET", self.state),
            "/metadata": ("GET", self.metadata),
            "/schema": ("GET", self.schema),
            "/openapi.json": ("GET", self.openapi),
            "/mcp": ("*", self.mcp),
            "/list_environments": ("GET", tasks.environments),
            "/{env_name:.+}/splits": ("GET", tasks.splits),
            "/{env_name:.+}/tasks": ("POST", tasks.list_tasks),
            "/{env_name:.+}/num_tasks": ("POST", tasks.num_tasks),
            "/{env_name:.+}/task": ("POST", tasks.task),
            "/{env_name:.+}/task_range": ("POST", tasks.task_range),
        }
        if self.prefix:
            named["/health"] = ("GET", self.health)
        return [web.route(method, self.prefix + path, handler) for path, (method, handler) in named.items()]

    def close(self) -> None:
        """End every session that was made over HTTP."""
        for shared in self._shared.values():
            shared.line.close()
        self._shared.clear()

    # ---- one request, one session

    async def reset(self, request: web.Request) -> web.Response:
        """`POST /reset`: the opening of an episode that nobody goes on with."""
        body = await object_of(request)
        with self._once(request) as line:
            return _http(await line.ask(json.dumps({"type": "reset", "data": body})))

    async def step(self, request: web.Request) -> web.Response:
        """`POST /step`: an episode of one step. What `reset` takes may stand beside the action, to say which task."""
        body = await object_of(request)
        action = body.pop("action", None)
        if not isinstance(action, dict):
            return answer_422("missing" if action is None else "dict_type", "action", action)
        with self._once(request) as line:
            begun = await line.ask(json.dumps({"type": "reset", "data": body}))
            if json.loads(begun).get("type") != "observation":
                return _http(begun)
            return _http(await line.ask(json.dumps({"type": "step", "data": action})))

    @contextlib.contextmanager
    def _once(self, request: web.Request) -> Iterator[Line]:
        line = self._front.open_line(request, self.env, WIRE)
        try:
            yield line
        finally:
            line.close()

    # ---- what there is to know

    async def state(self, _: web.Request) -> web.Response:
        """`GET /state`: of an environment that nobody has reset; sessions tell theirs over WebSockets."""
        return web.json_response(schemas.FRESH_STATE)

    async def health(self, _: web.Request) -> web.Response:
        """`GET /health`."""
        return web.json_response({"status": "healthy"})

    async def metadata(self, _: web.Request) -> web.Response:
        """`GET /metadata`."""
        return web.json_response(schemas.metadata_of(self._spec))

    async def schema(self, _: web.Request) -> web.Response:
        """`GET /schema`."""
        return web.json_response(schemas.SCHEMAS)

    async def openapi(self, _: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return web.json_response(schemas.openapi_of(f"OpenEnv interface of {self.env}", PATHS))

    # ---- MCP

    async def mcp(self, request: web.Request) -> web.StreamResponse:
        """`POST /mcp`, and `WS /mcp`, where a connection is a session."""
        if request.method == "GET" and check_handshake(request) is None:
            return await self._mcp_socket(request)
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST"])
        asked = _rpc_of(await request.text())
        return web.json_response(asked if "error" in asked else await self._rpc(request, asked))

    async def _rpc(self, request: web.Request, asked: Json) -> Json:
        id, params = asked.get("id"), asked.get("params") or {}
        if asked["method"] == "openenv/session/create":
            return self._create(request, id)
        session_id = params.get("session_id")
        if session_id is None and asked["method"] != "openenv/session/close":
            return await self._asked_once(request, asked)
        if not isinstance(session_id, str) or not session_id:
            return rpc_error(id, INVALID_PARAMS, "Invalid params - 'session_id' is required, a text")
        shared = self._shared_of(request, session_id)
        if shared is None or shared.closing:
            return rpc_error(id, INVALID_PARAMS, f"Unknown session_id: {session_id:.100}")
        if asked["method"] == "openenv/session/close":
            return self._end(id, session_id, shared)
        return await _through(shared.line, asked)

    def _shared_of(self, request: web.Request, session_id: str) -> _Shared | None:
        """A session that who asks has made himself, and that has not ended."""
        shared = self._shared.get(session_id)
        return shared if shared and not shared.line.closed and shared.owner == self._front.owner_of(request) else None

    def _create(self, request: web.Request, id: Any) -> Json:
        for ended in [name for name, shared in self._shared.items() if shared.line.over]:
            self._shared.pop(ended).line.close()
        session_id = str(uuid.uuid4())
        try:
            line = self._front.open_line(request, self.env, WIRE)
        except Refused as refused:
            return self._refused(id, refused)
        self._shared[session_id] = _Shared(line, self._front.owner_of(request))
        return rpc_result(id, {"session_id": session_id})

    def _end(self, id: Any, session_id: str, shared: _Shared) -> Json:
        if shared.attached:
            shared.closing = True
            return rpc_result(id, {"session_id": session_id, "closed": False, "closing": True})
        del self._shared[session_id]
        shared.line.close()
        return rpc_result(id, {"session_id": session_id, "closed": True})

    async def _asked_once(self, request: web.Request, asked: Json) -> Json:
        try:
            with self._once(request) as line:
                return await _through(line, asked)
        except Refused as refused:
            return self._refused(asked.get("id"), refused)

    def _refused(self, id: Any, refused: Refused) -> Json:
        return rpc_error(id, SERVER_ERROR, str(refused), self._counts())

    def _counts(self) -> Json:
        sessions = self._front.sessions
        return {"active_sessions": len(sessions.open), "max_sessions": sessions.most}

    async def _mcp_socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            with self._once(request) as line:
                async for message in socket:
                    if message.type is WSMsgType.TEXT:
                        asked = _rpc_of(message.data)
                        await socket.send_json(asked if "error" in asked else await _through(line, asked))
        except Refused as refused:
            await socket.send_json(self._refused(None, refused))
        await socket.close()
        return socket

    # ---- WebSockets

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`WS /ws`: a session of its own, or with `?session_id=` one that was made over HTTP."""
        if request.query.get("session_id"):
            return await self._attached(request)
        try:
            return await self._front.open_session(request, self.env, WIRE)
        except Refused as refused:
            # OpenEnv's clients want to be told by a frame; a status of HTTP they only report.
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.send_str(error_frame("CAPACITY_REACHED", str(refused), **self._counts()))
            await socket.close()
            return socket

    async def _attached(self, request: web.Request) -> web.WebSocketResponse:
        """Frames to and from a session that was made over HTTP, which goes on when they end."""
        socket = web.WebSocketResponse(max_msg_size=self._front.settings.limits.message_bytes)
        await socket.prepare(request)
        session_id = request.query["session_id"]
        shared = self._shared_of(request, session_id)
        if shared is None or shared.attached:
            problem = "is not known here" if shared is None else "already has an attached WebSocket"
            await socket.send_str(error_frame("SESSION_ERROR", f"session {session_id:.100} {problem}"))
            await socket.close()
            return socket
        shared.attached = True
        try:
            await _relayed(socket, shared.line)
        finally:
            shared.attached = False
            if shared.closing or shared.line.closed:
                self._shared.pop(session_id, None)
                shared.line.close()
        await socket.close()
        return socket


async def _relayed(socket: web.WebSocketResponse, line: Line) -> None:
    """Frames there and back until one side ends. "close" only ends the connection: the session was made by another."""
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            continue
        if _is_close(message.data):
            return
        try:
            answer = await line.ask(message.data)
        except Refused as refused:
            answer = OpenEnvWire.last_word(refused.code, str(refused))
        await socket.send_str(answer)
        if line.closed:
            return


def _is_close(text: str) -> bool:
    if len(text) > 100 or "close" not in text:
        return False
    try:
        found: bool = json.loads(text) == {"type": "close"}
    except ValueError:
        return False
    return found


def _rpc_of(text: str) -> Json:
    """The request that a text is, or the response that says what is wrong with it."""
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        return rpc_error(None, PARSE_ERROR, "Parse error")
    if problem := problem_of_rpc(asked):
        return rpc_error(None, INVALID_REQUEST, f"Invalid request: {problem}")
    found: Json = asked
    return found


async def _through(line: Line, asked: Json) -> Json:
    """The response that a session gives to a request."""
    try:
        frame = json.loads(await line.ask(json.dumps({"type": "mcp", "data": asked})))
    except Refused as refused:
        return rpc_error(asked.get("id"), SERVER_ERROR, f"{refused} ({refused.code})")
    if frame.get("type") == "mcp":
        response: Json = frame["data"]
        return response
    return rpc_error(asked.get("id"), SERVER_ERROR, str(frame.get("data", {}).get("message", "no answer")))


def _http(frame: str) -> web.Response:
    """A frame as the answer of an HTTP request."""
    told = json.loads(frame)
    data = told.get("data", {})
    if told.get("type") == "observation":
        return web.json_response(data)
    if data.get("code") == "VALIDATION_ERROR":
        return answered(422, data.get("errors", []))
    return answered(500, data.get("message", "no answer"))


PATHS: Mapping[str, Mapping[str, str]] = {
    "/reset": {"post": "begin an episode and show its opening"},
    "/step": {"post": "play an episode of one step"},
    "/state": {"get": "the state of an environment that was not reset"},
    "/health": {"get": "whether the server is well"},
    "/metadata": {"get": "name and description"},
    "/schema": {"get": "JSON schemas of actions, observations and states"},
    "/mcp": {"post": "JSON-RPC: tools/list, tools/call, openenv/session/create, openenv/session/close"},
    "/list_environments": {"get": "the names that the task routes take"},
    "/{env_name}/splits": {"get": "the splits of the tasks"},
    "/{env_name}/tasks": {"post": "tasks of a split"},
    "/{env_name}/num_tasks": {"post": "how many tasks a split has"},
    "/{env_name}/task": {"post": "one task"},
    "/{env_name}/task_range": {"post": "tasks from start up to stop"},
}
