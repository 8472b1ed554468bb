"""The environment server: listening, authentication and error responses. Sessions run in worker processes."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentgym.service.protocol.frames import Refused
from agentgym.service.server.bodies import body_of
from agentgym.service.server.handshake import from_elsewhere
from agentgym.service.server.http_connections import VANISHED_SECONDS, HttpConnection, TlsArrival, notice_vanished
from agentgym.service.server.routes import OPEN_PATHS, add_routes
from agentgym.service.server.session_server import SessionServer, refusal
from agentgym.service.server.sessions import TOO_MANY
from agentgym.service.server.settings import ServeSettings

RETRY_SECONDS = 1
ACCEPT_AT_ONCE, WAITING_CONNECTIONS = 16, 1024
TOKENS_SECONDS = 1.0  # between two looks at the token file
KEEPALIVE_SECONDS = 75.0  # that a connection may stay with no further request
_STATUS = {TOO_MANY: 429, "RESUME_REFUSED": 409}
_log = logging.getLogger("agentgym.service")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BaseHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class EnvServer(SessionServer):
    """A running server; `serve` makes it."""

    def __init__(self, settings: ServeSettings):
        super().__init__(settings)
        self.port = settings.port
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Import the environments, then listen. On `ZygoteFailed` or `OSError` everything is closed again."""
        try:
            tls = self._tls()  # before anything is started that a wrong file would end
            await self.sessions.start()
            self._watching = asyncio.create_task(self._watch_tokens())
            app = web.Application(middlewares=[self._guard], client_max_size=self.settings.limits.message_bytes)
            add_routes(app, self)
            self._runner = web.AppRunner(app, shutdown_timeout=1.0)
            await self._runner.setup()
            await self._listen(cast("web.Server", self._runner.server), tls)
        except BaseException:
            await self.close()
            raise

    async def _watch_tokens(self) -> None:
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            self.tokens.look()

    async def _listen(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        limits = self.settings.limits
        server.request_handler = _told_apart(server.request_handler)

        def made() -> asyncio.BaseProtocol:
            # Nothing is inflated before the token is checked: see `bodies`.
            return HttpConnection(
                server,
                self.connections,
                loop=loop,
                access_log=None,
                logger=_log,
                auto_decompress=False,
                keepalive_timeout=KEEPALIVE_SECONDS,
            )

        def arrived() -> asyncio.BaseProtocol:
            return made() if tls is None else TlsArrival(self.connections, tls, made, limits.message_seconds)

        self._server = await loop.create_server(arrived, self.settings.host, self.settings.port, backlog=ACCEPT_AT_ONCE)
        for listening in self._server.sockets:
            # asyncio has one number for both: how many wait in the kernel, and how many are taken in one go.
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
        await self.sessions.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        if self.settings.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.settings.cert, self.settings.key)
        return context

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        open_to_all = request.path in OPEN_PATHS
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
            status = _STATUS.get(refused.code, 503)
            retry = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
            return refusal(status, refused.code, str(refused), retry)
        except web.HTTPException as error:
            if error.status < 400 or error.content_type == "application/json":
                raise
            return refusal(error.status, error.reason.upper().replace(" ", "_"), error.text or error.reason)

    def _turned_away(self, request: web.Request, owner: str | None) -> web.Response | None:
        """The response to a request that is not allowed; None: it is allowed."""
        if owner is None:
            self.unauthorized.add(request.remote, request.path, "Authorization" in request.headers)
            why = "this server wants a token: Authorization: Bearer TOKEN"
            return refusal(401, "UNAUTHORIZED", why, {"WWW-Authenticate": "Bearer"})
        wrong = from_elsewhere(request, bool(self.tokens), self.settings.allowed_hosts)
        wrong = wrong or self.tokens.why_not(owner, request.path)
        return refusal(403, "FORBIDDEN", wrong) if wrong else None

    async def _taken(self, request: web.Request, owner: str | None, and_body: bool) -> None:
        """Read the rest of a request for its handler, and update its connection."""
        connection = request.protocol
        if request.can_read_body and and_body:
            async with asyncio.timeout(self.settings.limits.message_seconds):
                await body_of(request)
            if isinstance(connection, HttpConnection):
                connection.body_came()
        if isinstance(connection, HttpConnection):
            connection.began(bool(owner))


# Malformed requests of clients are answered by 400 and not logged.
_log.addFilter(lambda record: record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError))


async def serve(settings: ServeSettings) -> EnvServer:
    """Start a server. Raises `ZygoteFailed` if an import fails, `OSError` for a bad address or TLS file."""
    server = EnvServer(settings)
    await server.start()
    return server


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
