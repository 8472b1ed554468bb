"""The standard streams of a container, over the connection that attaching to it leaves open."""

from __future__ import annotations

import time
from typing import Any

from agentgym.sandbox.guest.channel import SocketStream

STDERR = 2
HEADER = 8  # bytes before each piece: which stream, three zeros, its length big endian
KEPT = 2000  # bytes of stderr


class Demultiplexer:
    """Takes apart what the Docker Engine sends: pieces of stdout and stderr, each with a header, cut anywhere.

    Attributes:
        stderr: the end of what came on stderr.
    """

    def __init__(self) -> None:
        self.stderr = b""
        self._header = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Take frames of the stream; returns their bytes of stdout."""
        out, position = [], 0
        while position < len(data):
            if self._left == 0:
                part = data[position : position + HEADER - len(self._header)]
                self._header += part
                position += len(part)
                if len(self._header) == HEADER:
                    self._stream = self._header[0]
                    self._left = int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            piece = data[position : position + self._left]
            position += len(piece)
            self._left -= len(piece)
            if self._stream == STDERR:
                self.stderr = (self.stderr + piece)[-KEPT:]
            else:
                out.append(piece)
        return b"".join(out)


class AttachedStream:
    """A `Stream` over what the SDK's `attach_socket` returned: bytes sent are the container's stdin, received its stdout."""

    def __init__(self, attached: Any) -> None:
        self.demultiplexer = Demultiplexer()
        self._attached = attached
        # Over a Unix socket and plain TCP it is a file object around the socket, else the socket itself.
        self._stream = SocketStream(getattr(attached, "_sock", attached))

    def send(self, data: bytes, timeout: float) -> None:
        """Send all; TimeoutError after `timeout` seconds, OSError if the engine is gone."""
        self._stream.send(data, timeout)

    def receive(self, timeout: float) -> bytes:
        """At least one byte of stdout; none at the end."""
        until = time.monotonic() + timeout
        while True:
            data = self._stream.receive(until - time.monotonic())
            out = self.demultiplexer.feed(data)
            if out or not data:
                return out

    def close(self) -> None:
        """End the container's stdin. In a forked child it only lets go, as the sandbox is the parent's."""
        try:
            self._stream.close()
        finally:
            # The SDK hangs the response on the file object; each holds the connection open.
            getattr(self._attached, "_response", self._attached).close()
