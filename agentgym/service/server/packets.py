"""JSON messages with file descriptors over a SOCK_SEQPACKET socket, without blocking."""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_MESSAGE = 1 << 16


class Packets:
    def __init__(
        self, sock: socket.socket, heard: Callable[[dict[str, Any], list[int]], None], ended: Callable[[], object]
    ):
        sock.setblocking(False)
        self._socket = sock
        self._heard = heard
        self._ended = ended
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock, self._read)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, now or as soon as there is room. The descriptors are closed here once it is sent."""
        self._waiting.append((json.dumps(message).encode(), list(fds)))
        self._write()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._write()

    def _write(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                if self._open:
                    socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError:  # the other side is gone; its end is read next
                pass
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        if self._open:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        # A bounded number, so that a storm of deaths does not hold the loop.
        for _ in range(64):
            try:
                data, fds, _flags, _address = socket.recv_fds(self._socket, _MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                self._ended()
                return
            self._heard(json.loads(data), fds)
            if not self._open:
                return
