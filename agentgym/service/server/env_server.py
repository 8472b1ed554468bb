"""The environment server: it listens, authenticates, and opens sessions, which run in worker processes."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentgym.core.registration import EnvSpec
from agentgym.service.protocol.frames import CAPACITY, NAME, RESUME_HEADER, RESUME_REFUSED, SUBPROTOCOL, Refused
from agentgym.service.protocol.sandbox_frames import SERVED
from agentgym.service.server.events import Unauthorized
from agentgym.service.server.http_connections import (
    VANISHED_SECONDS,
    ClientLeftError,
    HttpConnection,
    HttpConnections,
    TlsArrival,
    body_of,
    check_handshake,
    from_elsewhere,
    hand_over,
    refusal,
)
from agentgym.service.server.routes import OPEN_PATHS, add_routes
from agentgym.service.server.sessions import TOO_MANY, Sessions
from agentgym.service.server.settings import ServeSettings
from agentgym.service.server.task_catalogue import Listing
from agentgym.service.server.tokens import AccessTokens
from agentgym.service.worker.websocket import keep_alive

ACCEPT_AT_ONCE, WAITING_CONNECTIONS = 16, 1024
SPARE_CONNECTIONS = 128  # of HTTP, beside two for each session
WATCH_SECONDS = 0.25  # between two looks at the token file, late requests and what is to be logged
_STATUS = {TOO_MANY: 429, RESUME_REFUSED: 409}
_log = logging.getLogger("agentgym.service")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class EnvServer:
    """A running server; `serve` makes it. `served` are environments and sandboxes as the zygote knows them."""

    def __init__(self, settings: ServeSettings):
        self.settings = settings
        self.served = dict(settings.envs)
        if settings.sandbox is not None:
            self.served[SERVED] = sandbox_spec(settings.sandbox)
        self.sessions = Sessions(settings, self.served)
        self.forks = self.sessions.forks
        self.listing = Listing(self.forks)
        self.tokens = AccessTokens(settings.tokens, settings.token_file)
        self.unauthorized = Unauthorized()
        # Fewer than the files that this process may open: accept() without one left would be tried in a loop.
        most = 2 * settings.max_sessions + SPARE_CONNECTIONS
        self.connections = HttpConnections(most, settings.limits.message_seconds)
        self.port = settings.port
        self.runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Import the environments, then listen. On `ZygoteFailed` or `OSError` everything is closed again."""
        try:
            tls = None
            if self.settings.cert is not None:  # before anything is started that a wrong file would end
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(self.settings.cert, self.settings.key)
            await self.sessions.start()
            self._watching = asyncio.create_task(self._watch())
            app = web.Application(middlewares=[self._guard], client_max_size=self.settings.limits.message_bytes)
            add_routes(app, self)
            self.runner = web.AppRunner(app, shutdown_timeout=1.0)
            await self.runner.setup()
            await self._listen(cast("web.Server", self.runner.server), tls)
        except BaseException:
            await self.close()
            raise

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.tokens.look()
            self.connections.cut_late()
            self.unauthorized.say()

    async def _listen(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        server.request_handler = _told_apart(server.request_handler)

        def arrived() -> asyncio.BaseProtocol:
            http = HttpConnection(server, self.connections)
            return http if tls is None else TlsArrival(self.connections, tls, http)

        self._server = await loop.create_server(arrived, self.settings.host, self.settings.port, backlog=ACCEPT_AT_ONCE)
        for listening in self._server.sockets:
            # asyncio has one number for both: how many wait in the kernel, and how many are taken in one go.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(WAITING_CONNECTIONS)
                keep_alive(same, self.settings.limits.message_seconds + VANISHED_SECONDS)
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
        self.unauthorized.say(last=True)
        if self._watching is not None:
            self._watching.cancel()
        self.listing.close()
        await self.sessions.close()
        if self.runner is not None:
            await self.runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        open_to_all = request.path in OPEN_PATHS
        owner = None if open_to_all else self.owner_of(request)
        if not open_to_all and (refused := self._turned_away(request, owner)) is not None:
            return refused
        try:
            connection = request.protocol
            reads = request.can_read_body and not open_to_all
            if reads:
                async with asyncio.timeout(self.settings.limits.message_seconds):
                    await body_of(request)
            if isinstance(connection, HttpConnection):
                connection.began(bool(owner), after_body=reads)
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
            status = _STATUS.get(refused.code, 503)
            retry = {"Retry-After": "1"} if status in (429, 503) else None
            return refusal(status, refused.code, str(refused), retry)
        except web.HTTPException as error:
            if error.status < 400 or error.content_type == "application/json":
                raise
            return refusal(error.status, error.reason.upper().replace(" ", "_"), error.text or error.reason)

    def _turned_away(self, request: web.Request, owner: str | None) -> web.Response | None:
        if owner is None:
            self.unauthorized.add(request.remote, request.path, "Authorization" in request.headers)
            why = "this server wants a token: Authorization: Bearer TOKEN"
            return refusal(401, "UNAUTHORIZED", why, {"WWW-Authenticate": "Bearer"})
        wrong = from_elsewhere(request, bool(self.settings.tokens), self.settings.allowed_hosts)
        wrong = wrong or self.tokens.why_not(owner, request.path)
        return refusal(403, "FORBIDDEN", wrong) if wrong else None

    def owner_of(self, request: web.Request) -> str | None:
        """The name of a request's token; "" if the server has no tokens; None if the token is wrong or missing."""
        return self.tokens.owner_of(request.headers.get("Authorization", ""))

    async def ask_tasks(self, question: dict[str, Any]) -> Any:
        """The answer of `task_catalogue.tell_tasks`. Raises 404 for its errors, `Refused` if it gives no answer."""
        try:
            return await self.listing.ask(question)
        except LookupError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        except (TimeoutError, OSError) as error:
            what = "sandboxes" if "sandboxes" in question else "tasks"
            raise Refused(CAPACITY, f"{what} cannot be read now: {error or 'it takes too long'}") from None

    async def open_session(self, request: web.Request, env: str, protocol: str) -> web.StreamResponse:
        """Answer a WebSocket handshake with a session, new or resumed. Raises `Refused`; the guard answers it."""
        if wrong := check_handshake(request):
            headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            return refusal(426, "UPGRADE_REQUIRED", wrong, headers)
        if getattr(request.protocol, "_message_tail", b""):  # aiohttp has read it, so no worker would
            answer = refusal(400, "BAD_REQUEST", "a client waits for the answer to its handshake before it says more")
            answer.force_close()
            return answer
        offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        subprotocol = SUBPROTOCOL if protocol == NAME and SUBPROTOCOL in offered else None
        token = request.headers.get(RESUME_HEADER) or request.query.get("resume")
        owner = self.owner_of(request) or ""
        sessions = self.sessions
        session = sessions.claim(token, env, protocol, owner) if token else sessions.reserve(env, protocol, owner)
        try:
            descriptor, response, over = await hand_over(request, subprotocol)
        except BaseException as error:
            if not token:
                sessions.release(session)
            if isinstance(error, Refused):
                sessions.refused[error.code] += 1
            raise
        (sessions.attach if token else sessions.begin)(session, descriptor)
        if over is not None:
            await over.wait()
            if request.protocol is not None:
                request.protocol.connection_lost(None)  # the relay replaced it on the transport
        return response


# Malformed requests of clients are answered by 400 and not logged; nor are those of clients that have left.
_UNLOGGED = (HttpProcessingError, ClientLeftError)
_log.addFilter(lambda record: record.exc_info is None or not isinstance(record.exc_info[1], _UNLOGGED))


async def serve(settings: ServeSettings) -> EnvServer:
    """Start a server. Raises `ZygoteFailed` if an import fails, `OSError` for a bad address or TLS file."""
    server = EnvServer(settings)
    await server.start()
    return server


def sandbox_spec(settings: Mapping[str, Any]) -> EnvSpec:
    """The EnvSpec by which the zygote serves sandboxes; loading it imports what workers need."""
    return EnvSpec(id=SERVED, entry_point="agentgym.sandbox.served:told", kwargs=settings)


def _told_apart(handle: BaseHandler) -> BaseHandler:
    """The handler of all requests, which tells each connection when its request came and was answered."""

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, HttpConnection):  # it is over
            return await handle(request)
        connection.came(request.can_read_body)
        try:
            # aiohttp repeats an unknown expectation in its answer, as text that may not be in one.
            if request.headers.get("Expect", "100-continue").lower() != "100-continue":
                return refusal(417, "EXPECTATION_FAILED", "Expect can only be 100-continue")
            return await handle(request)
        finally:
            connection.ended()

    return handled
