"""OpenEnv's JSON-RPC on our server: tools over HTTP, and sessions whose client is the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from agentgym.service.openenv import handler
from agentgym.service.openenv.handler import OpenEnvHandler, error_frame, rpc_error, rpc_of, rpc_result
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


class Line:
    """The server as the client of a session. One message at a time; cancelling `ask` ends the session."""

    def __init__(self, sock: socket.socket, session: str):
        sock.setblocking(False)
        self.session = session
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
        self._socket.close()


def open_line(server: EnvServer, request: web.Request, env: str) -> Line:
    """A new session. Raises `Refused`."""
    session = server.sessions.reserve(env, NAME, server.owner_of(request) or "")
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        server.sessions.release(session)
        server.sessions.refused[CAPACITY] += 1
        raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
    server.sessions.begin(session, theirs.detach())
    return Line(ours, session.id)


@dataclass
class _Shared:
    line: Line
    owner: str | None
    attached: bool = False
    closing: bool = False


class McpRoutes:
    """The JSON-RPC of one environment, and its sessions that were made over HTTP."""

    def __init__(self, server: EnvServer, env: str):
        self._server = server
        self._env = env
        self._shared: dict[str, _Shared] = {}

    async def close(self, _: web.Application) -> None:
        for shared in self._shared.values():
            shared.line.close()
        self._shared.clear()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and check_handshake(request) is None:
            try:
                return await self._server.open_session(request, self._env, BARE_NAME)
            except Refused as refused:
                return await told(request, json.dumps(self._refused(None, refused)))
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST"])
        asked = rpc_of(await body_of(request))
        if "error" not in asked:
            try:
                asked = await self._rpc(request, asked)
            except Refused as refused:
                asked = self._refused(asked.get("id"), refused)
        return web.json_response(asked)

    async def _rpc(self, request: web.Request, asked: Json) -> Json:
        id, params = asked.get("id"), asked.get("params") or {}
        if asked["method"] == "openenv/session/create":
            return self._create(request, id)
        session_id = params.get("session_id")
        if session_id is None and asked["method"] != "openenv/session/close":
            with contextlib.closing(open_line(self._server, request, self._env)) as line:
                return await _through(line, asked)
        if not isinstance(session_id, str) or not session_id:
            return rpc_error(id, handler.INVALID_PARAMS, "Invalid params - 'session_id' is required, a text")
        shared = self._shared_of(request, session_id)
        if shared is None or shared.closing:
            return rpc_error(id, handler.INVALID_PARAMS, f"Unknown session_id: {session_id:.100}")
        if asked["method"] == "openenv/session/close":
            return self._end(id, session_id, shared)
        return await _through(shared.line, asked)

    def _shared_of(self, request: web.Request, session_id: str) -> _Shared | None:
        """The session of an id, if it is open and the request's token made it."""
        shared = self._shared.get(session_id)
        return shared if shared and not shared.line.closed and shared.owner == self._server.owner_of(request) else None

    def _create(self, request: web.Request, id: Any) -> Json:
        still_open = self._server.sessions.open
        for ended in [name for name, shared in self._shared.items() if shared.line.session not in still_open]:
            self._shared.pop(ended).line.close()
        session_id = str(uuid.uuid4())
        self._shared[session_id] = _Shared(open_line(self._server, request, self._env), self._server.owner_of(request))
        return rpc_result(id, {"session_id": session_id})

    def _end(self, id: Any, session_id: str, shared: _Shared) -> Json:
        if shared.attached:
            shared.closing = True
            return rpc_result(id, {"session_id": session_id, "closed": False, "closing": True})
        del self._shared[session_id]
        shared.line.close()
        return rpc_result(id, {"session_id": session_id, "closed": True})

    def _refused(self, id: Any, refused: Refused) -> Json:
        return rpc_error(id, handler.SERVER_ERROR, str(refused), counts(self._server))

    async def attached(self, request: web.Request) -> web.WebSocketResponse:
        """Attach a WebSocket to a session that was made over HTTP. The session outlives it."""
        session_id = request.query["session_id"]
        shared = self._shared_of(request, session_id)
        if shared is None or shared.attached:
            problem = "is not known here" if shared is None else "already has an attached WebSocket"
            return await told(request, error_frame("SESSION_ERROR", f"session {session_id:.100} {problem}"))
        limits = self._server.settings.limits
        # Without compression, which would inflate a message before its size is looked at.
        socket = web.WebSocketResponse(
            compress=False, max_msg_size=limits.message_bytes, receive_timeout=limits.idle_seconds
        )
        await socket.prepare(request)
        shared.attached = True
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the client left or was idle for too long
                await _relayed(socket, shared.line)
        finally:
            shared.attached = False
            if shared.closing or shared.line.closed:
                self._shared.pop(session_id, None)
                shared.line.close()
        await socket.close()
        return socket


async def told(request: web.Request, text: str) -> web.WebSocketResponse:
    """A WebSocket that only tells this: OpenEnv's clients read a message, and of an HTTP status they report only that."""
    socket = web.WebSocketResponse(compress=False, max_msg_size=REFUSED_BYTES)
    await socket.prepare(request)
    await socket.send_str(text)
    await socket.close()
    return socket


def counts(server: EnvServer) -> Json:
    return {"active_sessions": len(server.sessions.open), "max_sessions": server.sessions.most}


async def _relayed(socket: web.WebSocketResponse, line: Line) -> None:
    """Relay frames until one side ends. "close" only ends the connection, since the session was made over HTTP."""
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            continue
        with contextlib.suppress(ValueError):
            if len(message.data) < 100 and "close" in message.data and json.loads(message.data) == {"type": "close"}:
                return
        try:
            answer = await line.ask(message.data)
        except Refused as refused:
            answer = OpenEnvHandler.last_word(refused.code, str(refused))
        await socket.send_str(answer)
        if line.closed:
            return


async def _through(line: Line, asked: Json) -> Json:
    try:
        frame = json.loads(await line.ask(json.dumps({"type": "mcp", "data": asked})))
    except Refused as refused:
        return rpc_error(asked.get("id"), handler.SERVER_ERROR, f"{refused} ({refused.code})")
    if frame.get("type") == "mcp":
        return dict(frame["data"])
    return rpc_error(asked.get("id"), handler.SERVER_ERROR, str(frame.get("data", {}).get("message", "no answer")))
