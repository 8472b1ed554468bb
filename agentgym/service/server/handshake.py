"""The WebSocket handshake, and the hand-over of its connection to a worker. TLS connections are relayed."""

import asyncio
import base64
import binascii
import hashlib
import os
import socket
from collections.abc import Collection
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.hosts import is_ours
from agentgym.service.protocol.frames import CAPACITY, Refused

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


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
        raise ConnectionResetError("the client has left")
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
        over = None if relay is None else await relayed(transport, relay)
    except BaseException:
        os.close(descriptor)
        if relay is not None:
            relay.close()
        raise
    return descriptor, response, over


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
        raise ConnectionResetError("the client has left")
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
        raise ConnectionResetError("the client has left")
    client.set_protocol(outer)
    client.resume_reading()
    return over
