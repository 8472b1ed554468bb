"""The HTTP connections of a server: how many, which one is cut at the limit, and the time limit of a request.

A connection counts from before its TLS handshake until it ends or a session takes it over. At the limit, the
connection that has waited longest without a token is cut for a new one, so probes and clients with tokens always come
in.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter, OrderedDict
from typing import Any, TypeAlias

from aiohttp import web

# A machine has vanished if nothing comes for so much longer than a message may take; a slow one is told so before.
VANISHED_SECONDS = 2.0
_ASKED = 3  # times by the kernel before


Cuttable: TypeAlias = "HttpConnection | TlsArrival"


class HttpConnections:
    """The HTTP connections of a server."""

    def __init__(self, most: int, message_seconds: float):
        self.most = most
        self.cut: Counter[str] = Counter()
        self._seconds = message_seconds
        self._open: set[Cuttable] = set()
        # Those in which no request runs, the one that has waited longest first: without a token, and with one.
        self._strangers: OrderedDict[Cuttable, None] = OrderedDict()
        self._known: OrderedDict[Cuttable, None] = OrderedDict()
        # Since when a request is coming, the first that began first.
        self._coming: OrderedDict[Cuttable, float] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._looks: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def states(self) -> dict[str, int]:
        idle = len(self._strangers) + len(self._known)
        return {"busy": len(self._open) - idle, "token": len(self._known), "anonymous": len(self._strangers)}

    def opened(self, one: Cuttable) -> None:
        """A new connection; at the limit another is cut, or this one if a request runs in each."""
        if len(self._open) >= self.most:
            longest = next(iter(self._strangers or self._known), one)
            self._cut(longest, "capacity")
            if longest is one:
                return
        self._open.add(one)
        self._strangers[one] = None
        self._expect(one)

    def closed(self, one: Cuttable) -> None:
        """It is over, or a session has it."""
        self._open.discard(one)
        for waiting in (self._strangers, self._known, self._coming):
            waiting.pop(one, None)

    def heard(self, one: Cuttable) -> None:
        """The first bytes of a request have come."""
        if one in self._open and one not in self._coming:
            self._expect(one)

    def came(self, one: Cuttable) -> None:
        """The head of a request has come."""
        self._coming.pop(one, None)

    def began(self, one: Cuttable) -> None:
        """A request has come whole: it runs now, and is not cut."""
        self._strangers.pop(one, None)
        self._known.pop(one, None)

    def ended(self, one: Cuttable, known: bool) -> None:
        if one in self._open:
            self.began(one)
            (self._known if known else self._strangers)[one] = None

    def close(self) -> None:
        if self._looks is not None:
            self._looks.cancel()

    def _expect(self, one: Cuttable) -> None:
        self._coming[one] = self._loop.time()
        if self._looks is None:
            self._looks = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        now, self._looks = self._loop.time(), None
        while self._coming:
            one, since = next(iter(self._coming.items()))
            if now < since + self._seconds:
                self._looks = self._loop.call_at(since + self._seconds, self._look)
                return
            self._cut(one, "too slow")

    def _cut(self, one: Cuttable, why: str) -> None:
        self.cut[why] += 1
        self.closed(one)
        if one.transport is not None:
            one.transport.abort()


class HttpConnection(web.RequestHandler):
    """One connection, read by aiohttp. The server reports how far each request and its answer are."""

    def __init__(self, manager: Any, connections: HttpConnections, **settings: Any):
        super().__init__(manager, **settings)
        self._connections = connections
        self._asked = False  # a request is being read or answered
        self._had_token = False
        self._whole = True  # the last bytes end where a head does
        self._said_more = False  # than that request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._asked:
            self._said_more = True
        else:
            self._whole = data.endswith(b"\r\n\r\n")
            self._connections.heard(self)

    def connection_lost(self, error: BaseException | None) -> None:
        self._connections.closed(self)
        super().connection_lost(error)

    def came(self, has_body: bool) -> None:
        self._asked, self._had_token, self._said_more = True, False, not has_body and not self._whole
        self._connections.came(self)

    def body_came(self) -> None:
        self._said_more = False

    def began(self, has_token: bool) -> None:
        self._had_token = has_token
        self._connections.began(self)

    def ended(self) -> None:
        self._asked = False
        self._connections.ended(self, self._had_token)
        if self._said_more:
            self._said_more = False
            self._connections.heard(self)


class TlsArrival(asyncio.Protocol):
    """A connection during its TLS handshake; it counts and can be cut like any other, and then becomes one of HTTP."""

    def __init__(self, connections: HttpConnections, tls: ssl.SSLContext, make: Any, seconds: float):
        self.transport: asyncio.Transport | None = None
        self._connections = connections
        self._tls = tls
        self._make = make
        self._seconds = seconds
        self._early = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a TCP connection's is a Transport
        self._connections.opened(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early += data  # right behind the handshake, before its end is reported

    async def _shake_hands(self) -> None:
        loop, raw = asyncio.get_running_loop(), self.transport
        if raw is None:
            return
        encrypted = None
        with contextlib.suppress(OSError):  # no handshake, or none in time
            encrypted = await loop.start_tls(
                raw, self, self._tls, server_side=True, ssl_handshake_timeout=self._seconds
            )
        self._connections.closed(self)
        if encrypted is None:
            raw.abort()
            return
        http = self._make()
        encrypted.set_protocol(http)
        http.connection_made(encrypted)
        if self._early:
            http.data_received(bytes(self._early))


def notice_vanished(listening: socket.socket, seconds: float) -> None:
    """Let the kernel end accepted connections whose machine has been silent, or confirmed nothing, for this long.

    Otherwise a machine that lost its power or network holds its session for minutes to hours.
    """
    pause = max(1, round(seconds / (_ASKED + 1)))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit all of these
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKED)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
