"""The HTTP connections of a server: their limits, request bodies, and the hand-over to a worker as a WebSocket."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import logging
import os
import select
import socket
import ssl
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.hosts import is_ours
from agentgym.service.protocol.frames import CAPACITY, Refused, text_of_json

# A machine has vanished if nothing comes for so much longer than a message may take; a slow one is told so before.
VANISHED_SECONDS = 2.0
KEEPALIVE_SECONDS = 75.0  # that a connection may stay with no further request
_log = logging.getLogger("agentgym.service")
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Where a body is kept with its request: by a key of aiohttp's, which older releases do not have.
_BODY: Any = getattr(web, "RequestKey", lambda name, _: name)("agentgym.body", bytes)

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

Cuttable: TypeAlias = "HttpConnection | TlsArrival"


class ClientLeftError(ConnectionResetError): ...


class HttpConnections:
    """A connection counts from before its TLS handshake until it ends or a session takes it over.

    At the limit, the one that has waited longest without a token is cut for a new one, so probes and clients with
    tokens always come in.
    """

    def __init__(self, most: int, message_seconds: float):
        self.most = most
        self.message_seconds = message_seconds
        self.cut: Counter[str] = Counter()
        self._open: set[Cuttable] = set()
        # Those in which no request runs, the one that has waited longest first: without a token, and with one.
        self.strangers: OrderedDict[Cuttable, None] = OrderedDict()
        self.known: OrderedDict[Cuttable, None] = OrderedDict()
        # Since when the head of a request is coming, the first that began first.
        self.coming: OrderedDict[Cuttable, float] = OrderedDict()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._open)

    def states(self) -> dict[str, int]:
        idle = len(self.strangers) + len(self.known)
        return {"busy": len(self._open) - idle, "token": len(self.known), "anonymous": len(self.strangers)}

    def opened(self, one: Cuttable) -> None:
        """A new connection; at the limit another is cut, or this one if a request runs in each."""
        if len(self._open) >= self.most:
            longest = next(iter(self.strangers or self.known), one)
            self._cut(longest, "capacity")
            if longest is one:
                return
        self._open.add(one)
        self.strangers[one] = None
        self.heard(one)

    def closed(self, one: Cuttable) -> None:
        """It is over, or a session has it."""
        self._open.discard(one)
        for waiting in (self.strangers, self.known, self.coming):
            waiting.pop(one, None)

    def heard(self, one: Cuttable) -> None:
        """The first bytes of a request have come."""
        if one in self._open:
            self.coming.setdefault(one, self._loop.time())

    def began(self, one: Cuttable) -> None:
        """A request has come whole: it runs now, and is not cut."""
        self.strangers.pop(one, None)
        self.known.pop(one, None)

    def ended(self, one: Cuttable, known: bool) -> None:
        if one in self._open:
            self.began(one)
            (self.known if known else self.strangers)[one] = None

    def cut_late(self) -> None:
        begun_before = self._loop.time() - self.message_seconds
        while self.coming and next(iter(self.coming.values())) < begun_before:
            self._cut(next(iter(self.coming)), "too slow")

    def _cut(self, one: Cuttable, why: str) -> None:
        self.cut[why] += 1
        self.closed(one)
        if one.transport is not None:
            one.transport.abort()


class HttpConnection(web.RequestHandler):
    """One connection, read by aiohttp. The server reports how far each request and its answer are."""

    def __init__(self, manager: web.Server, connections: HttpConnections):
        # Nothing is inflated before the token is checked: see `body_of`.
        settings: Any = {"access_log": None, "logger": _log, "auto_decompress": False}
        loop = asyncio.get_running_loop()
        super().__init__(manager, loop=loop, keepalive_timeout=KEEPALIVE_SECONDS, **settings)
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
        self._connections.coming.pop(self, None)

    def began(self, has_token: bool, after_body: bool) -> None:
        self._had_token = has_token
        self._said_more = self._said_more and not after_body  # what came was the body
        self._connections.began(self)

    def ended(self) -> None:
        self._asked = False
        self._connections.ended(self, self._had_token)
        if self._said_more:
            self._said_more = False
            self._connections.heard(self)


class TlsArrival(asyncio.Protocol):
    """A connection during its TLS handshake; it counts and can be cut like any other, and then becomes one of HTTP."""

    def __init__(self, connections: HttpConnections, tls: ssl.SSLContext, http: HttpConnection):
        self.transport: asyncio.Transport | None = None
        self._connections = connections
        self._tls = tls
        self._http = http
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a TCP connection's is a Transport
        self._connections.opened(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data  # right behind the handshake, before its end is reported

    async def _shake_hands(self, raw: Any) -> None:
        seconds, encrypted = self._connections.message_seconds, None
        with contextlib.suppress(OSError):  # no handshake, or none in time
            encrypted = await asyncio.get_running_loop().start_tls(
                raw, self, self._tls, server_side=True, ssl_handshake_timeout=seconds
            )
        self._connections.closed(self)
        if encrypted is None:
            raw.abort()
            return
        encrypted.set_protocol(self._http)
        self._http.connection_made(encrypted)
        if self._early:
            self._http.data_received(bytes(self._early))


async def body_of(request: web.Request) -> bytes:
    """The body of a request, inflated if `Content-Encoding` is gzip or deflate. Raises HTTP 400, 413 or 415."""
    body: bytes | None = request.get(_BODY)
    if body is not None:
        return body
    body = await request.read()
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if body and encoding != "identity":
        if encoding not in _WINDOWS:
            why = f"Content-Encoding can be gzip, deflate or none, not {encoding!r:.50}"
            raise web.HTTPUnsupportedMediaType(text=why)
        most = request.client_max_size
        try:
            body = await asyncio.to_thread(inflated, body, encoding, most)
        except (zlib.error, EOFError):
            raise web.HTTPBadRequest(text=f"the body is not {encoding}, as its Content-Encoding says") from None
        if body is None:
            raise web.HTTPRequestEntityTooLarge(most, text=f"the body inflates to more than {most:,} bytes")
    request[_BODY] = body
    return body


def inflated(body: bytes, encoding: str, most: int) -> bytes | None:
    """The inflated body; None if it has more than `most` bytes. Raises `zlib.error` or `EOFError`."""
    # Some clients send deflate without the header that the standard wants.
    raw = encoding == "deflate" and body[0] & 15 != 8
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if raw else _WINDOWS[encoding])
    found = inflate.decompress(body, most + 1)
    if len(found) > most:
        return None
    if not inflate.eof:
        raise EOFError
    return found


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"error": {"code": code, "message": message}}
    answer = web.json_response(body, status=status, headers=headers, dumps=text_of_json)
    if status in (429, 503):
        answer.force_close()  # where a balancer stands between, the next try is then led to another server
    return answer


def check_handshake(request: web.Request) -> str | None:
    """The error in a WebSocket handshake; None: it is good."""
    headers = request.headers
    asked = "upgrade" in headers.get("Connection", "").lower() and headers.get("Upgrade", "").lower() == "websocket"
    if request.method != "GET" or not asked:
        return "this is the address of a WebSocket: connect to it as one"
    if headers.get("Sec-WebSocket-Version") != "13":
        return "WebSocket version 13 is spoken here"
    try:
        key = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    return None if len(key) == 16 else "Sec-WebSocket-Key is 16 bytes in base64"


def from_elsewhere(request: web.Request, known: bool, allowed: Collection[str] = ()) -> str | None:
    """The error in a request's Host and Origin: a browser may send other sites' requests. None: they are good."""
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    if not known and host is not None and not is_ours(host, allowed):
        return f"this server is not named {host!r:.100}: ask it as localhost, or start it with --allow-host"
    if origin is None:  # no browser, or one that only reads
        return None
    try:
        page = urlsplit(origin).netloc
    except ValueError:
        page = ""
    return None if page and page == request.host else "pages of other sites may not ask"


async def hand_over(
    request: web.Request, subprotocol: str | None
) -> tuple[int, web.StreamResponse, asyncio.Event | None]:
    """Answer a handshake and detach its connection from aiohttp: a descriptor for a worker, and what to wait for."""
    transport = request.transport
    if transport is None:
        raise ClientLeftError("the client has left in its handshake")
    relay = None
    try:
        if transport.get_extra_info("ssl_object") is None:
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
        else:
            relay, theirs = socket.socketpair()
            descriptor = theirs.detach()
    except OSError as error:
        raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
    try:
        response = await _answered(request, transport, subprotocol)
        if relay is None and _has_left(descriptor):
            raise ClientLeftError("the client has left in its handshake")
        over = None if relay is None else await relayed(transport, relay)
    except BaseException:
        os.close(descriptor)
        if relay is not None:
            relay.close()
        raise
    return descriptor, response, over


def _has_left(descriptor: int) -> bool:
    """True if the other side has closed the connection, which nobody reads now."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


async def _answered(request: web.Request, transport: asyncio.Transport, subprotocol: str | None) -> web.StreamResponse:
    transport.pause_reading()  # the worker reads what follows the handshake
    accept = base64.b64encode(hashlib.sha1(request.headers["Sec-WebSocket-Key"].encode() + _GUID).digest()).decode()
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept}
    if subprotocol is not None:
        headers["Sec-WebSocket-Protocol"] = subprotocol
    response = web.StreamResponse(status=101, headers=headers)
    response.force_close()
    await response.prepare(request)
    if request.transport is None:
        raise ClientLeftError("the client has left in its handshake")
    return response


class _End(asyncio.Protocol):
    """One of two connections: received bytes go to the other, with back-pressure."""

    transport: asyncio.Transport
    other: "_End"

    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:  # also after an end of file
        self.other.transport.close()  # once it has sent all
        self._over.set()


async def relayed(client: asyncio.Transport, to: socket.socket) -> asyncio.Event:
    """Relay a connection after its handshake; returns an event for the end. Raises ConnectionError."""
    over = asyncio.Event()
    outer, inner = _End(over), _End(over)
    outer.other, inner.other = inner, outer
    outer.transport = client
    made, _ = await asyncio.get_running_loop().create_connection(lambda: inner, sock=to)
    if client.is_closing():  # its end would no longer be reported
        made.abort()
        raise ClientLeftError("the client has left in its handshake")
    client.set_protocol(outer)
    client.resume_reading()
    return over
