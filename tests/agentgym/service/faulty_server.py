"""A double for faults: a server whose sessions are real (the handler and the environment are those of `agentgym serve`, here in one
thread), and whose connections drop, lie and stall as a test says. What works is tested against the real server."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from agentgym.core.env import Env
from agentgym.core.registration import EnvSpec
from agentgym.service.protocol.frames import RESUME_HEADER, ServiceLimits, error_frame
from agentgym.service.worker.protocol_handler import AgentgymHandler, SessionInfo


class _Calls:
    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class _Counting:
    """An environment that counts what is really run."""

    def __init__(self, env: Env, run: Counter[str]):
        self._env, self._run = env, run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        if name not in ("step", "reset"):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._run[name] += 1
            return found(*args, **kwargs)

        return counted


@dataclass
class FaultyServer:
    """What it does wrong, and what it saw.

    Attributes:
        spec: of the environment, served by its id.
        openings: what becomes of the next connections, in turn: "ok", a status such as "503", "mute" (no hello), "reset" (cut
            before the hello), "other" (a hello of another session), "nonsense" (a hello that is none), or the code of a
            fatal frame in place of the hello. "ok" once there are no more.
        messages: what becomes of the next messages, in turn: "ok", "before" (cut before it is run), "after" (run, and cut
            before the answer), "half" (cut in the middle of the answer), "mute" (no answer), "twice" (answered twice), or
            a text that is sent in place of the answer. "ok" once there are no more.
        load: what /ready tells.
        run: how many steps and resets were really run.
        closes: sessions that a client ended with a close frame or a call.
        opened: sessions.
    """

    spec: EnvSpec
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    openings: deque[str] = field(default_factory=deque)
    messages: deque[str] = field(default_factory=deque)
    load: dict[str, Any] = field(default_factory=lambda: {"ready": True, "sessions": 0, "max_sessions": 100})
    token: str = ""
    run: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    closes: int = 0
    resumes: int = 0
    port: int = 0
    sessions: dict[str, tuple[AgentgymHandler, str]] = field(default_factory=dict)
    _open: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.spec.id}"

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._checked])
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/envs", self._envs)
        app.router.add_get("/envs/{id}/tasks", self._tasks)
        app.router.add_get("/envs/{id}/session", self._session)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> Any:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": {"code": "UNAUTHORIZED", "message": "wrong token"}}, status=401)
        return await handler(request)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response(self.load, status=200 if self.load.get("ready") else 503)

    async def _envs(self, request: web.Request) -> web.Response:
        env: Any = self.spec.make()
        methods = [name for name in ("expert_action", "random_action") if hasattr(env, name)]
        return web.json_response({"envs": [{"id": self.spec.id, "tools": env.tools, "methods": methods}]})

    async def _tasks(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            tasks = self.spec.tasks(query["split"])
        except ValueError as error:
            return web.json_response({"error": {"code": "NOT_FOUND", "message": str(error)}}, status=404)
        page = [task.to_json() for task in tasks[int(query["start"]) : int(query["stop"])]]
        return web.json_response({"size": len(tasks), "name": tasks.name, "source": tasks.source, "tasks": page})

    async def _session(self, request: web.Request) -> Any:
        how = self.openings.popleft() if self.openings else "ok"
        if how.isdigit():
            return web.json_response({"error": {}}, status=int(how), headers={"Retry-After": "0.05"})
        resume = request.headers.get(RESUME_HEADER)
        if resume is not None and resume not in self.sessions:
            return web.json_response({"error": {"code": "RESUME_REFUSED"}}, status=409)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        self._open.append(request.transport)
        if how == "reset":
            return self._cut(request, ws)
        if how == "mute":
            await asyncio.sleep(60)
        if how == "nonsense":
            await ws.send_str('{"hello": "world"}')
            return ws
        if how not in ("ok", "other"):
            await ws.send_json(error_frame(how, "said by the double", fatal=True))
            await ws.close()
            return ws
        handler, name = self._handler(resume)
        token = secrets.token_hex(8)
        self.sessions[token] = handler, name
        hello = json.loads(handler.hello(token))
        await ws.send_str(json.dumps({**hello, "session": "another" if how == "other" else name}))
        await self._talk(request, ws, handler)
        return ws

    def _handler(self, resume: str | None) -> tuple[AgentgymHandler, str]:
        if resume is not None:
            self.resumes += 1
            return self.sessions.pop(resume)
        self.opened += 1
        env: Any = _Counting(self.spec.make(), self.run)
        info = SessionInfo(f"session-{self.opened}", self.spec.id, self.spec, self.limits)
        calls: Any = _Calls()
        return AgentgymHandler(env, calls, info), info.id

    async def _talk(self, request: web.Request, ws: web.WebSocketResponse, handler: AgentgymHandler) -> None:
        async for message in ws:
            if message.type is not WSMsgType.TEXT:
                continue
            how = self.messages.popleft() if self.messages else "ok"
            if how == "before":
                self._cut(request, ws)
                return
            answer = handler.answer(message.data)
            if how == "after":
                self._cut(request, ws)
                return
            if how == "half":
                transport: Any = request.transport
                transport.write(bytes([0x81, 126]) + len(answer).to_bytes(2, "big") + answer[:3].encode())
                await asyncio.sleep(0.05)
                self._cut(request, ws)
                return
            if how == "mute":
                continue
            await ws.send_str(answer if how in ("ok", "twice") else how)
            if how == "twice":
                await ws.send_str(answer)
            if handler.ended:
                self.closes += 1
                await ws.close()
                return
        self.closes += ws.close_code == 1000

    def cut_all(self) -> None:
        """Cut all connections, from any thread."""
        while self._open:
            transport = self._open.pop()
            transport._loop.call_soon_threadsafe(transport.abort)

    def _cut(self, request: web.Request, ws: web.WebSocketResponse) -> web.WebSocketResponse:
        transport: Any = request.transport
        transport.abort()
        return ws


@contextmanager
def running(*servers: FaultyServer) -> Iterator[None]:
    """Run them in a thread with a loop of its own, so that blocking clients can be tested as well."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start(server: FaultyServer) -> web.AppRunner:
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", server.port)
        await site.start()
        server.port = runner.addresses[0][1]
        return runner

    runners = [asyncio.run_coroutine_threadsafe(start(server), loop).result(30) for server in servers]
    try:
        yield
    finally:
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class CuttingProxy:
    """A double for a network that fails: passes bytes to a server, and cuts the connection after so many messages either way.

    Attributes:
        cuts: chunks of bytes until each next cut, in turn; no more cuts once there are none.
        made: how many cuts there were.
    """

    def __init__(self, port: int, cuts: Iterable[int]):
        self.target = port
        self.cuts = deque(cuts)
        self.left = self.cuts.popleft() if self.cuts else None
        self.made = 0
        self.port = 0

    async def pipe(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        both = (client_writer, server_writer)
        one = self._copy(client_reader, server_writer, both)
        other = self._copy(server_reader, client_writer, both)
        await asyncio.gather(one, other, return_exceptions=True)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, both: tuple[Any, ...]) -> None:
        while data := await source.read(1 << 16):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = self.cuts.popleft() if self.cuts else None
                    self.made += 1
                    break
            sink.write(data)
            await sink.drain()
        for writer in both:
            writer.transport.abort()


@contextmanager
def cutting(port: int, cuts: Iterable[int]) -> Iterator[CuttingProxy]:
    """A proxy before this port of 127.0.0.1, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = CuttingProxy(port, cuts)

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(proxy.pipe, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        return server

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
