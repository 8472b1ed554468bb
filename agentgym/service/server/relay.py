"""Bytes from one connection to another and back: how a worker, which knows no TLS, reaches a client that speaks it."""

from __future__ import annotations

import asyncio
import socket
from typing import cast


class _End(asyncio.Protocol):
    """One of the two connections: what comes goes to the other, no faster than that takes it."""

    def __init__(self, over: asyncio.Event) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> None:
        return None  # asyncio closes this one, and connection_lost the other

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # once what was written has gone out
        self._over.set()


async def relayed(client: asyncio.Transport, to: socket.socket) -> asyncio.Event:
    """Relay a connection whose handshake is done.

    Args:
        client: what is relayed, and is not read from now; its protocol hears nothing from here on.
        to: where; the caller closes it if this raises.

    Returns:
        An event for when the relay is over.

    Raises:
        ConnectionError: the client has left.
    """
    over = asyncio.Event()
    outer, inner = _End(over), _End(over)
    outer.other, inner.other = inner, outer
    outer.transport = client
    made, _ = await asyncio.get_running_loop().create_connection(lambda: inner, sock=to)
    if client.is_closing():  # meanwhile, and nobody would hear of it any more
        made.abort()
        raise ConnectionResetError("the client has left")
    client.set_protocol(outer)
    client.resume_reading()
    return over
