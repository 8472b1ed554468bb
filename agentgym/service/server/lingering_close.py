"""Lingering close: the last message to a client whose worker cannot send it."""

import asyncio
import socket
from collections.abc import Callable

LINGER_SECONDS = 1.0


class LingeringClose:
    """Connections that stay open until their client has read the last message."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lingering: dict[int, Callable[[], None]] = {}

    def say(self, client: int, last: bytes | None) -> None:
        """Send the last frames, and close once the client has read them: unread input would reset the connection."""
        sock = socket.socket(fileno=client)
        sock.setblocking(False)
        try:
            if last is not None:
                sock.send(last)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return

        def stop() -> None:
            del self._lingering[client]
            timer.cancel()
            self._loop.remove_reader(client)
            sock.close()

        def discard() -> None:
            try:
                rest = sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                rest = b""
            if not rest:
                stop()

        timer = self._loop.call_later(LINGER_SECONDS, stop)
        self._lingering[client] = stop
        self._loop.add_reader(client, discard)

    def close(self) -> None:
        for stop in list(self._lingering.values()):
            stop()
