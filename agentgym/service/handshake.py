"""The WebSocket handshake, and a connection taken out of the HTTP server's hands."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.service.relay import relayed

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


def from_elsewhere(request: web.Request) -> bool:
    """Whether a web page of another site asks: browsers open WebSockets to anywhere, and to this machine."""
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.host


async def hand_over(
    request: web.Request, subprotocol: str | None
) -> tuple[int, web.StreamResponse, asyncio.Event | None]:
    """Answer a handshake and take the connection.

    Args:
        request: a good handshake.
        subprotocol: the one that was chosen.

    Returns:
        A descriptor of the connection, owned by the caller; what the handler is to return; and for TLS an event that the
        handler awaits first, since the front relays such a connection until it is over.

    Raises:
        ConnectionError: the client has left.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    secure = transport.get_extra_info("ssl_object") is not None
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
    if secure:
        descriptor, over = await relayed(transport)
        return descriptor, response, over
    return os.dup(transport.get_extra_info("socket").fileno()), response, None
