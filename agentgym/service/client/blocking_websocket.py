"""A client's WebSocket for threads: text messages, one after another, each call with a deadline."""

import base64
import contextlib
import http.client
import io
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from agentgym.service.protocol.frames import NORMAL_CLOSE
from agentgym.service.worker.websocket import CLOSE, PING, PONG, TEXT, Frames, encoded, keep_alive

LARGEST_ANSWER = 128 << 20
_CHUNK = 1 << 16
_LARGEST_HEAD = 1 << 16
_CLOSE_SECONDS = 1.0
_WAKING = 10.0  # seconds that a thread has to leave a socket that is closed under it
VANISHED_SECONDS = 30.0  # after which a silent server's machine counts as gone


class HandshakeRefused(Exception):
    """The server refused the WebSocket handshake."""

    def __init__(self, status: int, why: str, code: str = ""):
        super().__init__(why)
        self.status, self.code = status, code


class BlockingWebSocket:
    """One connection. One thread uses it at a time; `close` may be called from any thread."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, until: float):
        self._pid = os.getpid()
        self._in_use = threading.RLock()  # while a thread waits in the kernel for this socket
        self._frames = Frames(LARGEST_ANSWER, masked=False)
        self._socket = dial(url, tls, until)
        try:
            self._shake_hands(url, headers, until)
        except BaseException:
            self._socket.close()
            raise

    def _shake_hands(self, url: str, headers: Mapping[str, str], until: float) -> None:
        parts = urlsplit(url)
        asked = {
            "Host": parts.netloc,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            **headers,
        }
        lines = [f"GET {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in asked.items()), "", ""]
        self._send("\r\n".join(lines).encode("latin-1"), until)
        received = bytearray()
        while b"\r\n\r\n" not in received:
            received += self._take(until)
            if len(received) > _LARGEST_HEAD:
                raise ConnectionError("the answer to the handshake is no HTTP")
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        first, _, fields = head.partition(b"\r\n")
        found = re.match(rb"HTTP/1\.\S* (\d+)", first)
        if found is None:
            raise ConnectionError(f"the answer to the handshake is no HTTP: {first!r:.60}")
        status, told = int(found[1]), http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
        if status != 101:
            size = told.get("Content-Length", "0")
            with contextlib.suppress(OSError):  # a part of the body is enough
                while size.isdigit() and len(body) < min(int(size), _LARGEST_HEAD):
                    body += self._take(until)
            raise HandshakeRefused(status, said_in(body) or f"it answered {status}", said_in(body, "code"))
        self._frames.buffer += body

    def send(self, text: str, until: float) -> None:
        """Send a message. OSError: the connection is over, or `until` has come (TimeoutError)."""
        self._send(encoded(TEXT, text.encode(), masked=True), until)

    def receive(self, until: float) -> str:
        while True:
            message = self._frames.next()
            if message is None:
                self._frames.buffer += self._take(until)
                continue
            opcode, payload = message
            if opcode == TEXT:
                return payload.decode()
            if opcode == PING:
                self._send(encoded(PONG, payload, masked=True), until)
            elif opcode == CLOSE:
                code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 0
                raise EOFError(f"the server has closed the connection ({code})")

    def _send(self, data: bytes, until: float) -> None:
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            self._socket.sendall(data)

    def _take(self, until: float) -> bytes:
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            data = self._socket.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("the server has left")
        return data

    def close(self, *, in_order: bool = True) -> None:
        """Close the connection and wake a waiting `receive`; `in_order` ends the session. Forks only close the file."""
        if os.getpid() != self._pid:  # the lock may be held for ever by a thread that is not here
            self._socket.close()
            return
        # TLS is not for two threads at a time: one that waits is only woken then.
        free = self._in_use.acquire(blocking=False)
        with contextlib.suppress(OSError, ValueError):  # it is over already
            if in_order and (free or not isinstance(self._socket, ssl.SSLSocket)):
                self._socket.settimeout(_CLOSE_SECONDS)
                self._socket.sendall(encoded(CLOSE, struct.pack("!H", NORMAL_CLOSE), masked=True))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits; close alone does not
        # A woken thread looks its descriptor up again before it returns: it must not be another file's by then.
        free = free or self._in_use.acquire(timeout=_WAKING)
        self._socket.close()
        if free:
            self._in_use.release()


def dial(url: str, tls: ssl.SSLContext | None, until: float) -> socket.socket:
    """Connect to the server of a URL. Raises OSError (TimeoutError included)."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    connected = socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.001))
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected, VANISHED_SECONDS)
        if secure:
            context = tls or ssl.create_default_context()
            return context.wrap_socket(connected, server_hostname=host)
    except BaseException:
        connected.close()
        raise
    return connected


def said_in(body: bytes, part: str = "message") -> str:
    """The message or the code in a refusal's body, {"error": {"message", "code"}}; "" if there is none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"][part])
    return ""
