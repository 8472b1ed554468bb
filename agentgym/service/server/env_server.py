"""The environment server: HTTP routes, authentication, WebSocket handshakes. Sessions run in worker processes."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentgym.core.registration import EnvSpec
from agentgym.hosts import LOCAL_HOSTS
from agentgym.service.protocol.frames import (
    CAPACITY,
    NAME,
    RESUME_HEADER,
    SUBPROTOCOL,
    Refused,
    ServiceLimits,
    text_of_json,
)
from agentgym.service.protocol.sandbox_frames import SERVED
from agentgym.service.server import information, sandbox_routes
from agentgym.service.server.bodies import body_of
from agentgym.service.server.bounds import Bounds
from agentgym.service.server.events import Unauthorized
from agentgym.service.server.forks import Forks
from agentgym.service.server.handshake import check_handshake, from_elsewhere, hand_over, has_said_more
from agentgym.service.server.http_connections import (
    VANISHED_SECONDS,
    HttpConnection,
    HttpConnections,
    TlsArrival,
    notice_vanished,
)
from agentgym.service.server.local_session import Line
from agentgym.service.server.sessions import TOO_MANY, Sessions
from agentgym.service.server.task_listing import Listing
from agentgym.service.server.tokens import Token, Tokens
from agentgym.service.worker.handlers import handler_class


@dataclass(frozen=True)
class ServeSettings:
    """How environments are served.

    Attributes:
        envs: by the id that clients ask for; the first is OpenEnv's at the root.
        sandbox: None, or {"backend": name, "most": `sandbox.served.Most` by field, "total": `Total` by field}.
        port: 0 takes a free one.
        max_sessions_per_token: None: no limit.
        workers: processes that are forked in advance.
        sessions_per_worker: how many sessions may share a process, where their environment runs no programs in sandboxes.
        tokens: by name; a plain text has all scopes. None are needed only at an address of this machine.
        token_file: is read again when it changes.
        allowed_hosts: names besides this machine's own that a `Host` header may have where no token is asked for.
        bounds: of a session's process; of a shared one, times `sessions_per_worker`.
        drain_seconds: for sessions to end by themselves.
    """

    envs: Mapping[str, EnvSpec]
    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int = 256
    max_sessions_per_token: int | None = None
    workers: int = 2
    sessions_per_worker: int = 1
    tokens: Mapping[str, Token | str] = field(default_factory=dict, repr=False)
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    cert: str | None = None
    key: str | None = None
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    bounds: Bounds = field(default_factory=Bounds)
    drain_seconds: float = 30.0
    sandbox: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.envs and self.sandbox is None:
            raise ValueError("no environments and no sandboxes: there is nothing to serve")
        if self.host not in LOCAL_HOSTS and not self.tokens:
            raise ValueError(f"listening at {self.host} lets other machines in: that takes a token (--token-file)")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions is at least 1, not {self.max_sessions}")
        if self.sessions_per_worker < 1:
            raise ValueError(f"sessions_per_worker is at least 1, not {self.sessions_per_worker}")
        if self.workers < 0:
            raise ValueError(f"workers is at least 0, not {self.workers}")


RETRY_SECONDS = 1
SPARE_CONNECTIONS = 128  # that are no sessions, beside as many again as sessions there may be
ACCEPT_AT_ONCE, WAITING_CONNECTIONS = 16, 1024
TOKENS_SECONDS = 1.0  # between two looks at the token file
KEEPALIVE_SECONDS = 75.0  # that a connection may stay with no further request
_STATUS = {TOO_MANY: 429, "RESUME_REFUSED": 409}
_log = logging.getLogger("agentgym.service")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class EnvServer:
    """A running server; `serve` makes it."""

    def __init__(self, settings: ServeSettings):
        self.settings = settings
        per_token, per_worker = settings.max_sessions_per_token, settings.sessions_per_worker
        self.sessions = Sessions(settings.limits, settings.max_sessions, per_token, per_worker)
        self.served = served = dict(settings.envs)
        if settings.sandbox is not None:
            served[SERVED] = sandbox_routes.spec_of(settings.sandbox)
        self.forks = Forks(
            served, settings.limits, settings.bounds.times(per_worker), self.sessions.memory, self.sessions.died
        )
        self.listing = Listing(self.forks)
        self.port = settings.port
        self.tokens = Tokens(settings.tokens, settings.token_file)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        # Fewer than the files that this process may open: accept() without one left would be tried in a loop.
        most = 2 * settings.max_sessions + SPARE_CONNECTIONS
        self.unauthorized = Unauthorized()
        self.connections = HttpConnections(most, settings.limits.message_seconds)

    async def start(self) -> None:
        """Import the environments, then listen. On `ZygoteFailed` or `OSError` everything is closed again."""
        try:
            tls = self._tls()  # before anything is started that a wrong file would end
            await self.forks.start()
            self.sessions.start(self.forks, self.settings.workers)
            self._watching = asyncio.create_task(self._watch_tokens())
            app = web.Application(middlewares=[self._guard], client_max_size=self.settings.limits.message_bytes)
            self._add_routes(app)
            self._runner = web.AppRunner(app, shutdown_timeout=1.0)
            await self._runner.setup()
            await self._listen(tls)
        except BaseException:
            await self.close()
            raise

    async def _watch_tokens(self) -> None:
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            self.tokens.look()

    async def _listen(self, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        limits = self.settings.limits
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("set the runner up first")
        server = self._runner.server
        server.request_handler = _told_apart(server.request_handler)
        # Nothing is inflated before it is known who asks: see `bodies`.
        http: dict[str, Any] = {"access_log": None, "logger": _log, "auto_decompress": False}
        http |= {"loop": loop, "keepalive_timeout": KEEPALIVE_SECONDS}

        def made() -> asyncio.BaseProtocol:
            return HttpConnection(server, self.connections, **http)

        def arrived() -> asyncio.BaseProtocol:
            return made() if tls is None else TlsArrival(self.connections, tls, made, limits.message_seconds)

        self._server = await loop.create_server(arrived, self.settings.host, self.settings.port, backlog=ACCEPT_AT_ONCE)
        for listening in self._server.sockets:
            # asyncio has one number for both: how many wait in the kernel, and how many are taken before anything else runs.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(WAITING_CONNECTIONS)
                notice_vanished(same, limits.message_seconds + VANISHED_SECONDS)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http{'s' if self.settings.cert else ''}://{host}:{self.port}"

    async def drain(self) -> None:
        """Refuse new sessions and episodes, wait for running ones, then end the rest."""
        await self.sessions.drain(self.settings.drain_seconds)

    async def close(self) -> None:
        """End the server and all its processes at once."""
        self.sessions.draining = True
        if self._server is not None:
            self._server.close()
        self.connections.close()
        self.unauthorized.close()
        if self._watching is not None:
            self._watching.cancel()
        self.listing.close()
        await self.forks.close()
        await self.sessions.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        if self.settings.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.settings.cert, self.settings.key)
        return context

    def _add_routes(self, app: web.Application) -> None:
        information.add_routes(app, self)
        handler_class(NAME)  # imported now: once sessions come, there may be no file left to open
        app.router.add_get("/envs/{id:.+}/session", self._session, allow_head=False)
        information.add_last(app, self)
        if self.settings.sandbox is not None:
            sandbox_routes.add_routes(app, self)
        if self.settings.envs and importlib.util.find_spec("agentgym.service.openenv.routes") is not None:
            importlib.import_module("agentgym.service.openenv.routes").add_routes(app, self)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        open_to_all = request.path in information.OPEN_PATHS
        owner = None if open_to_all else self.owner_of(request)
        if not open_to_all and (refused := self._turned_away(request, owner)) is not None:
            return refused
        try:
            await self._taken(request, owner, and_body=not open_to_all)
            return await handler(request)
        except ConnectionError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            return web.Response()  # the client has left, as aiohttp finds when it sends this
        except TimeoutError:
            return refusal(408, "TOO_SLOW", "the request took too long to arrive, or to be answered")
        except RecursionError:
            return refusal(400, "BAD_REQUEST", "the request is nested too deeply")
        except Refused as refused:
            retry = {"Retry-After": str(RETRY_SECONDS)}
            status = _STATUS.get(refused.code, 503)
            return refusal(status, refused.code, str(refused), retry if status in (429, 503) else None)
        except web.HTTPException as error:
            if error.status < 400 or error.content_type == "application/json":
                raise
            return refusal(error.status, error.reason.upper().replace(" ", "_"), error.text or error.reason)

    def _turned_away(self, request: web.Request, owner: str | None) -> web.Response | None:
        if owner is None:
            self.unauthorized.add(request.remote, request.path, "Authorization" in request.headers)
            why = "this server wants a token: Authorization: Bearer TOKEN"
            return refusal(401, "UNAUTHORIZED", why, {"WWW-Authenticate": "Bearer"})
        wrong = from_elsewhere(request, bool(self.tokens), self.settings.allowed_hosts)
        wrong = wrong or self.tokens.why_not(owner, request.path)
        return refusal(403, "FORBIDDEN", wrong) if wrong else None

    async def _taken(self, request: web.Request, owner: str | None, and_body: bool) -> None:
        connection = request.protocol
        if request.can_read_body and and_body:
            async with asyncio.timeout(self.settings.limits.message_seconds):
                await body_of(request)
            if isinstance(connection, HttpConnection):
                connection.body_came()
        if isinstance(connection, HttpConnection):
            connection.began(bool(owner))

    def owner_of(self, request: web.Request) -> str | None:
        """The name of a request's token; "" if the server has no tokens; None if the token is wrong or missing."""
        return self.tokens.owner_of(request.headers.get("Authorization", ""))

    async def ask_tasks(self, question: dict[str, Any]) -> Any:
        """The answer of `task_catalogue.tell_tasks`. Raises 404 for an unknown split, `Refused` if tasks cannot be read."""
        try:
            return await self.listing.ask(question)
        except LookupError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        except (TimeoutError, OSError) as error:
            raise Refused(CAPACITY, f"tasks cannot be read now: {error or 'it takes too long'}") from None

    def env_id(self, request: web.Request) -> str:
        """The served environment in the request's path. Raises 404 if it is unknown."""
        id = request.match_info["id"]
        if id not in self.settings.envs:
            raise web.HTTPNotFound(
                text=f"no environment {id!r} here; there are {', '.join(self.settings.envs) or 'none'}"
            )
        return id

    async def _session(self, request: web.Request) -> web.StreamResponse:
        return await self.open_session(request, self.env_id(request), NAME)

    async def open_session(self, request: web.Request, env: str, protocol: str) -> web.StreamResponse:
        """Answer a WebSocket handshake with a session, new or resumed. Raises `Refused`; the guard answers it."""
        if wrong := check_handshake(request):
            headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            return refusal(426, "UPGRADE_REQUIRED", wrong, headers)
        if has_said_more(request):
            answer = refusal(400, "BAD_REQUEST", "a client waits for the answer to its handshake before it says more")
            answer.force_close()
            return answer
        offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        subprotocol = SUBPROTOCOL if protocol == NAME and SUBPROTOCOL in offered else None
        token = request.headers.get(RESUME_HEADER) or request.query.get("resume")
        owner = self.owner_of(request) or ""
        session = (
            self.sessions.claim(token, env, protocol, owner) if token else self.sessions.reserve(env, protocol, owner)
        )
        try:
            descriptor, response, over = await hand_over(request, subprotocol)
        except BaseException as error:
            if not token:
                self.sessions.release(session)
            if isinstance(error, Refused):
                self.sessions.refused[error.code] += 1
            raise
        if token:
            self.sessions.attach(session, descriptor)
        else:
            self.sessions.begin(session, descriptor)
        if over is not None:
            await over.wait()
            if request.protocol is not None:
                request.protocol.connection_lost(None)  # it hears of nothing since the relay took its place
        return response

    def open_line(self, request: web.Request, env: str, protocol: str) -> Line:
        """A new session with the server itself as its client. Raises as `open_session`."""
        session = self.sessions.reserve(env, protocol, self.owner_of(request) or "")
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self.sessions.release(session)
            self.sessions.refused[CAPACITY] += 1
            raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
        session.local = True
        self.sessions.begin(session, theirs.detach())
        return Line(ours)


def _is_own(record: logging.LogRecord) -> bool:
    """Malformed requests of clients are answered by 400 and not logged."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_log.addFilter(_is_own)


async def serve(settings: ServeSettings) -> EnvServer:
    """Start a server. Raises `ZygoteFailed` if environments cannot be imported, `OSError` for a bad address or TLS file."""
    server = EnvServer(settings)
    await server.start()
    return server


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An HTTP error response with a JSON body."""
    body = {"error": {"code": code, "message": message}}
    answer = web.json_response(body, status=status, headers=headers, dumps=text_of_json)
    if status in (429, 503):
        answer.force_close()  # where a balancer stands between, the next try is then led to another server
    return answer


def _told_apart(handle: BaseHandler) -> BaseHandler:
    """aiohttp repeats an unknown expectation in its answer, as text that may not be in one: it is refused here."""

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, HttpConnection):  # it is over
            return await handle(request)
        connection.came(request.can_read_body)
        try:
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                return refusal(417, "EXPECTATION_FAILED", "Expect can only be 100-continue")
            return await handle(request)
        finally:
            connection.ended()

    return handled
