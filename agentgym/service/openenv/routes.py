"""OpenEnv's routes on our server: for the first environment at the root, and for each under its id.

HTTP requests become frames of a session that the server itself talks to, which /reset and /step take for one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from agentgym.service.openenv import handler, schemas
from agentgym.service.openenv.handler import OpenEnvHandler, error_frame, rpc_error, rpc_of, rpc_result
from agentgym.service.openenv.play import whole_number
from agentgym.service.protocol.frames import BAD_REQUEST, CAPACITY, NORMAL_CLOSE, WORKER_DIED, Refused
from agentgym.service.server.http_connections import body_of, check_handshake
from agentgym.service.worker.websocket import CLOSE, TEXT, Frames, encoded

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

Json = dict[str, Any]
NAME, BARE_NAME = "openenv", "openenv/mcp"
REFUSED_BYTES = 1 << 16  # that are read of a client that is refused
_CHUNK = 1 << 16
_LARGEST_ANSWER = 1 << 30
PATHS: Mapping[str, tuple[str, str]] = {
    "/reset": ("post", "begin an episode and show its opening"),
    "/step": ("post", "play an episode of one step"),
    "/state": ("get", "the state of an environment that was not reset"),
    "/health": ("get", "whether the server is well"),
    "/metadata": ("get", "name and description"),
    "/schema": ("get", "JSON schemas of actions, observations and states"),
    "/mcp": ("post", "JSON-RPC: tools/list, tools/call, openenv/session/create, openenv/session/close"),
    "/list_environments": ("get", "the names that the task routes take"),
    "/{env_name}/splits": ("get", "the splits of the tasks"),
    "/{env_name}/tasks": ("post", "tasks of a split"),
    "/{env_name}/num_tasks": ("post", "how many tasks a split has"),
    "/{env_name}/task": ("post", "one task"),
    "/{env_name}/task_range": ("post", "tasks from start up to stop"),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Line:
    """The server as the client of a session. One message at a time; cancelling `ask` ends the session."""

    def __init__(self, sock: socket.socket, session: str, owner: str):
        sock.setblocking(False)
        self.session = session
        self.owner = owner
        self.attached = False  # to a WebSocket, at whose end it is to close if `closing`
        self.closing = False
        self._socket = sock
        self._frames = Frames(_LARGEST_ANSWER, masked=False)
        self._asking = asyncio.Lock()
        self.closed = False

    async def ask(self, text: str) -> str:
        """The answer to a message. Raises a fatal `Refused` if the session ends without one."""
        async with self._asking:
            if self.closed:
                raise Refused(BAD_REQUEST, "the session has ended", fatal=True)
            try:
                # A session that has ended takes nothing more, but may have said why.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    frame = encoded(TEXT, text.encode(), masked=True)
                    await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                return await self._received()
            except OSError as error:
                self.close()
                raise Refused(WORKER_DIED, f"the session has ended: {error}", fatal=True) from None
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                if self.closed:
                    self._socket.close()

    async def _received(self) -> str:
        while (message := self._frames.next()) is None or message[0] != TEXT:
            data = b""
            if message is None:
                data = await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK)
                self._frames.buffer += data
            if not data and (message is None or message[0] == CLOSE):
                self.close()
                raise Refused(WORKER_DIED, "the session has ended without an answer", fatal=True)
        return message[1].decode()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):  # it is over already
            self._socket.send(encoded(CLOSE, NORMAL_CLOSE.to_bytes(2, "big"), masked=True))
        if not self._asking.locked():
            self._socket.close()
            return
        # The loop waits for this descriptor, which nobody else may get: `ask` wakes up and closes it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def open_line(server: EnvServer, request: web.Request, env: str) -> Line:
    """A new session. Raises `Refused`."""
    owner = server.owner_of(request) or ""
    session = server.sessions.reserve(env, NAME, owner)
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        server.sessions.release(session)
        server.sessions.refused[CAPACITY] += 1
        raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
    server.sessions.begin(session, theirs.detach())
    return Line(ours, session.id, owner)


def add_routes(app: web.Application, server: EnvServer) -> None:
    envs = list(server.settings.envs)
    for env, listed, prefix in [(envs[0], envs, ""), *((env, [env], f"/{env}") for env in envs)]:
        app.router.add_routes(OpenEnvRoutes(server, env, listed, prefix).routes(app))


class OpenEnvRoutes:
    """OpenEnv's routes for one environment; `listed` are those whose tasks are told."""

    def __init__(self, server: EnvServer, env: str, listed: list[str], prefix: str):
        self.env = env
        self.prefix = prefix
        self._server = server
        self._listed = listed
        self._shared: dict[str, Line] = {}  # sessions that were made over HTTP

    def routes(self, app: web.Application) -> list[web.RouteDef]:
        app.on_shutdown.append(self.close_made)
        handlers: dict[str, Handler] = {
            "/reset": self.reset,
            "/step": self.step,
            "/state": _telling(schemas.FRESH_STATE),  # of sessions it is told over WebSockets
            "/metadata": _telling(schemas.metadata_of(self._server.settings.envs[self.env])),
            "/schema": _telling(schemas.SCHEMAS),
            "/mcp": self.mcp,
            "/list_environments": _telling(self._listed),
            "/{env_name}/splits": self.splits,
            "/{env_name}/tasks": self.list_tasks,
            "/{env_name}/num_tasks": self.num_tasks,
            "/{env_name}/task": self.task,
            "/{env_name}/task_range": self.task_range,
        }
        if self.prefix:  # else it is the server's own
            handlers["/health"] = _telling({"status": "healthy"})
        openapi = schemas.openapi_of(f"OpenEnv interface of {self.env}", PATHS)
        routes = [web.get(f"{self.prefix}/ws", self.socket), web.get(f"{self.prefix}/openapi.json", _telling(openapi))]
        for path, answer in handlers.items():
            method = "*" if path == "/mcp" else PATHS[path][0]
            routes.append(web.route(method, self.prefix + path.replace("{env_name}", "{env_name:.+}"), answer))
        return routes

    async def reset(self, request: web.Request) -> web.Response:
        """`POST /reset`: the first observation of an episode, which ends at once."""
        body = await object_of(request)
        with contextlib.closing(open_line(self._server, request, self.env)) as line:
            return _http(await line.ask(json.dumps({"type": "reset", "data": body})))

    async def step(self, request: web.Request) -> web.Response:
        """`POST /step`: an episode of one step. Arguments of `reset` may stand beside the action."""
        body = await object_of(request)
        action = body.pop("action", None)
        if not isinstance(action, dict):
            raise invalid("missing" if action is None else "dict_type", "action", action)
        with contextlib.closing(open_line(self._server, request, self.env)) as line:
            begun = await line.ask(json.dumps({"type": "reset", "data": body}))
            if json.loads(begun).get("type") != "observation":
                return _http(begun)
            return _http(await line.ask(json.dumps({"type": "step", "data": action})))

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`WS /ws`: a new session, or with `?session_id=` one that was made over HTTP."""
        if request.query.get("session_id"):
            return await self._attached(request)
        try:
            return await self._server.open_session(request, self.env, NAME)
        except Refused as refused:
            return await told(request, error_frame("CAPACITY_REACHED", str(refused), **counts(self._server)))

    async def splits(self, request: web.Request) -> web.Response:
        names = await self._server.ask_tasks({"env": self._env(request)})
        return web.json_response([{"name": name, "type": name} for name in names])  # `SPLITS`: all are OpenEnv's too

    async def list_tasks(self, request: web.Request) -> web.Response:
        """The first of a split, up to `task_catalogue.PAGE`; `num_tasks` tells how many there are."""
        env, _, page = await self._asked(request, stop=None)
        return web.json_response({"tasks": page["tasks"], "env_name": env})

    async def num_tasks(self, request: web.Request) -> web.Response:
        _, _, page = await self._asked(request)
        return web.json_response({"num_tasks": page["size"]})

    async def task(self, request: web.Request) -> web.Response:
        env, body, page = await self._asked(request, "index")
        index = whole_number(body.get("index"))
        if index is None:
            raise invalid("int_type", "index", body.get("index"))
        if not 0 <= index < page["size"]:
            return answered(400, "Invalid task index")
        page = await self._server.ask_tasks({"env": env, "split": body["split"], "start": index, "stop": index + 1})
        return web.json_response({"task": page["tasks"][0]})

    async def task_range(self, request: web.Request) -> web.Response:
        """At most `task_catalogue.PAGE`, counted from `start`."""
        env, body, page = await self._asked(request, "start", "stop")
        ends = {name: whole_number(body.get(name)) for name in ("start", "stop")}
        for name, end in ends.items():
            if end is None and body.get(name) is not None:
                raise invalid("int_type", name, body.get(name))
        start, stop, _ = slice(ends["start"], ends["stop"]).indices(page["size"])
        page = await self._server.ask_tasks({"env": env, "split": body["split"], "start": start, "stop": stop})
        return web.json_response({"tasks": page["tasks"]})

    def _env(self, request: web.Request) -> str:
        name = request.match_info["env_name"]
        if found := [env for env in self._listed if env.lower() == name.lower()]:
            return found[0]
        raise _json_error(web.HTTPNotFound, f"unknown environment {name!r}")

    async def _asked(self, request: web.Request, *others: str, stop: int | None = 0) -> tuple[str, Json, Json]:
        """The environment that a request names, its body, and the tasks up to `stop` of the split that it names."""
        env = self._env(request)
        body = await object_of(request)
        split = body.get("split")
        if unknown := body.keys() - {"split", *others}:
            raise invalid("extra_forbidden", min(unknown), body)
        if not isinstance(split, str):
            raise invalid("string_type", "split", split)
        return env, body, await self._server.ask_tasks({"env": env, "split": split, "start": 0, "stop": stop})

    async def close_made(self, _: web.Application) -> None:
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()

    async def mcp(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and check_handshake(request) is None:
            try:
                return await self._server.open_session(request, self.env, BARE_NAME)
            except Refused as refused:
                return await told(request, json.dumps(self._rpc_refused(None, refused)))
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST"])
        asked = rpc_of(await body_of(request))
        if "error" not in asked:
            try:
                asked = await self._rpc(request, asked)
            except Refused as refused:
                asked = self._rpc_refused(asked.get("id"), refused)
        return web.json_response(asked)

    async def _rpc(self, request: web.Request, asked: Json) -> Json:
        id, params = asked.get("id"), asked.get("params") or {}
        if asked["method"] == "openenv/session/create":
            return self._create(request, id)
        session_id = params.get("session_id")
        if session_id is None and asked["method"] != "openenv/session/close":
            with contextlib.closing(open_line(self._server, request, self.env)) as line:
                return await _through(line, asked)
        if not isinstance(session_id, str) or not session_id:
            return rpc_error(id, handler.INVALID_PARAMS, "Invalid params - 'session_id' is required, a text")
        shared = self._shared_of(request, session_id)
        if shared is None or shared.closing:
            return rpc_error(id, handler.INVALID_PARAMS, f"Unknown session_id: {session_id:.100}")
        if asked["method"] == "openenv/session/close":
            return self._end(id, session_id, shared)
        return await _through(shared, asked)

    def _shared_of(self, request: web.Request, session_id: str) -> Line | None:
        """The session of an id, if it is open and the request's token made it."""
        shared = self._shared.get(session_id)
        return shared if shared and not shared.closed and shared.owner == self._server.owner_of(request) else None

    def _create(self, request: web.Request, id: Any) -> Json:
        still_open = self._server.sessions.open
        for ended in [name for name, shared in self._shared.items() if shared.session not in still_open]:
            self._shared.pop(ended).close()
        session_id = str(uuid.uuid4())
        self._shared[session_id] = open_line(self._server, request, self.env)
        return rpc_result(id, {"session_id": session_id})

    def _end(self, id: Any, session_id: str, shared: Line) -> Json:
        if shared.attached:
            shared.closing = True
            return rpc_result(id, {"session_id": session_id, "closed": False, "closing": True})
        del self._shared[session_id]
        shared.close()
        return rpc_result(id, {"session_id": session_id, "closed": True})

    def _rpc_refused(self, id: Any, refused: Refused) -> Json:
        return rpc_error(id, handler.SERVER_ERROR, str(refused), counts(self._server))

    async def _attached(self, request: web.Request) -> web.WebSocketResponse:
        """Attach a WebSocket to a session that was made over HTTP. The session outlives it."""
        session_id = request.query["session_id"]
        shared = self._shared_of(request, session_id)
        if shared is None or shared.attached:
            problem = "is not known here" if shared is None else "already has an attached WebSocket"
            return await told(request, error_frame("SESSION_ERROR", f"session {session_id:.100} {problem}"))
        limits = self._server.settings.limits
        # Without compression, which would inflate a message before its size is looked at.
        socket = web.WebSocketResponse(compress=False, max_msg_size=limits.message_bytes)
        await socket.prepare(request)
        shared.attached = True
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the client left or was idle for too long
                await _relayed(socket, shared, limits.idle_seconds)
        finally:
            shared.attached = False
            if shared.closing or shared.closed:
                self._shared.pop(session_id, None)
                shared.close()
        await socket.close()
        return socket


def _telling(value: Any) -> Handler:
    async def tell(_: web.Request) -> web.Response:
        return web.json_response(value)

    return tell


def _http(frame: str) -> web.Response:
    told = json.loads(frame)
    data = told.get("data", {})
    if told.get("type") == "observation":
        return web.json_response(data)
    if data.get("code") == "VALIDATION_ERROR":
        return answered(422, data.get("errors", []))
    return answered(500, data.get("message", "no answer"))


async def object_of(request: web.Request) -> Json:
    """The body of a request, an object; {} if it is empty. Raises 422 otherwise."""
    text = await body_of(request)  # not decoded as its header says: with some encodings that takes hours
    try:
        body = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid("json_invalid", "", str(error)) from error
    if not isinstance(body, dict):
        raise invalid("dict_type", "", body)
    return body


def invalid(kind: str, field: str, given: Any) -> web.HTTPException:
    """The error for a request with an invalid field, or body if `field` is ""."""
    loc = ["body", field] if field else ["body"]
    problem = {"type": kind, "loc": loc, "msg": kind.replace("_", " "), "input": given}
    return _json_error(web.HTTPUnprocessableEntity, [problem])


def answered(status: int, detail: Any) -> web.Response:
    """An error in OpenEnv's form."""
    return web.json_response({"detail": detail}, status=status)


def _json_error(kind: type[web.HTTPException], detail: Any) -> web.HTTPException:
    return kind(text=json.dumps({"detail": detail}), content_type="application/json")


async def told(request: web.Request, text: str) -> web.WebSocketResponse:
    """A WebSocket that only tells this: OpenEnv's clients read a message, and of an HTTP status they report only that."""
    socket = web.WebSocketResponse(compress=False, max_msg_size=REFUSED_BYTES)
    await socket.prepare(request)
    await socket.send_str(text)
    await socket.close()
    return socket


def counts(server: EnvServer) -> Json:
    return {"active_sessions": len(server.sessions.open), "max_sessions": server.sessions.most}


async def _relayed(socket: web.WebSocketResponse, line: Line, idle_seconds: float | None) -> None:
    """Relay frames until one side ends. "close" only ends the connection, since the session was made over HTTP."""
    frames: asyncio.Queue[str | None] = asyncio.Queue(1)
    reading = asyncio.create_task(_read(socket, frames))  # goes on during a call: reading is what answers pings
    try:
        while (frame := await asyncio.wait_for(frames.get(), idle_seconds)) is not None:
            with contextlib.suppress(ValueError):
                if len(frame) < 100 and "close" in frame and json.loads(frame) == {"type": "close"}:
                    return
            try:
                answer = await line.ask(frame)
            except Refused as refused:
                answer = OpenEnvHandler.last_word(refused.code, str(refused))
            await socket.send_str(answer)
            if line.closed:
                return
    finally:
        reading.cancel()
        await asyncio.wait({reading})  # closing the socket reads, too


async def _read(socket: web.WebSocketResponse, frames: asyncio.Queue[str | None]) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await frames.put(message.data)
    await frames.put(None)


async def _through(line: Line, asked: Json) -> Json:
    try:
        frame = json.loads(await line.ask(json.dumps({"type": "mcp", "data": asked})))
    except Refused as refused:
        return rpc_error(asked.get("id"), handler.SERVER_ERROR, f"{refused} ({refused.code})")
    if frame.get("type") == "mcp":
        return dict(frame["data"])
    return rpc_error(asked.get("id"), handler.SERVER_ERROR, str(frame.get("data", {}).get("message", "no answer")))
