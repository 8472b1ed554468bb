"""The WebSocket handshake, and a connection taken out of the HTTP server's hands."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.hosts import is_ours
from agentgym.service.protocol.frames import CAPACITY, Refused
from agentgym.service.server.relay import relayed

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def check_handshake(request: web.Request) -> str | None:
    """What is wrong with a request that should be a WebSocket handshake; None: it is one."""
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
    """What is wrong with where a request comes from; None: nothing. Browsers open WebSockets to anywhere, and to this machine.

    Args:
        request: any.
        known: whether it had to have a token, which no page of another site has.
        allowed: names that are ours, beside this machine's own.
    """
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


def has_said_more(request: web.Request) -> bool:
    """Whether something came right behind a handshake. aiohttp has taken that from the socket, so no worker would read it."""
    return bool(getattr(request.protocol, "_message_tail", b""))


async def hand_over(
    request: web.Request, subprotocol: str | None
) -> tuple[int, web.StreamResponse, asyncio.Event | None]:
    """Answer a handshake and take the connection.

    Args:
        request: a good handshake.
        subprotocol: the one that was chosen.

    Returns:
        A descriptor of the connection, owned by the caller; what the handler is to return; and for TLS an event that the
        handler awaits first, since the server relays such a connection until it is over.

    Raises:
        ConnectionError: the client has left.
        Refused: this process may open no more files. Nothing was answered yet.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    descriptor, relay = _ends(transport)
    try:
        response = await _answered(request, transport, subprotocol)
        over = None if relay is None else await relayed(transport, relay)
    except BaseException:
        os.close(descriptor)
        if relay is not None:
            relay.close()
        raise
    return descriptor, response, over


def _ends(transport: asyncio.Transport) -> tuple[int, socket.socket | None]:
    """A descriptor for a worker; and for TLS the other end of it, to be relayed to."""
    try:
        if transport.get_extra_info("ssl_object") is None:
            return os.dup(transport.get_extra_info("socket").fileno()), None
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
    return theirs.detach(), ours


async def _answered(request: web.Request, transport: asyncio.Transport, subprotocol: str | None) -> web.StreamResponse:
    transport.pause_reading()  # what comes after the handshake is the worker's to read
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
