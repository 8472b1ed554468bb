"""Calls to the guest of a sandbox: frames over a socket, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from agentgym.sandbox.api import SandboxError

CHUNK = 1 << 16
WAKING = 10.0  # seconds that a thread has to leave a stream that is closed under it
LARGEST_FRAME = 64 << 20  # bytes; a guest that claims more is not ours any more

Header = dict[str, Any]


class GuestRpc:
    """Remote procedure calls to a guest, one at a time. A failure closes it: later bytes could answer the failed call.

    `name` is the sandbox's, for errors. Calls after `close`, which any thread may call twice, raise SandboxError.
    """

    failures: tuple[type[Exception], ...] = (OSError, EOFError, ValueError)

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True

    def call(self, header: Header, payload: bytes = b"", *, timeout: float) -> tuple[Header, bytes]:
        """Send a call and wait for its answer: header and bytes. SandboxError if the guest is gone or late."""
        self.send(header, payload, timeout=timeout)
        return self.answer(header["do"], timeout=timeout)

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        raise NotImplementedError

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def failed(self, what: str, error: Exception) -> SandboxError:
        return SandboxError(f"{what}: {error}")

    def guarded(self, call: str, timeout: float, act: Callable[[float], Any]) -> Any:
        """Run a part of a call, given its deadline by `time.monotonic`."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.name} is closed: cannot call {call!r}")
        try:
            return act(time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            raise SandboxError(f"sandbox {self.name} did not answer {call!r} within {timeout:.1f} s") from None
        except SandboxError:
            raise
        except self.failures as error:
            if not self.alive:
                raise SandboxError(f"sandbox {self.name} was closed during {call!r}") from error
            self.close()
            raise self.failed(f"sandbox {self.name} failed in {call!r}", error) from error
        except BaseException:  # interrupted half way
            self.close()
            raise


class SocketStream:
    """Bytes to and from the guest over a connected socket. `close` from another thread ends a waiting `send` or `receive`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pid = os.getpid()
        self._in_use = threading.RLock()  # while a thread waits in the kernel for this socket

    def send(self, data: bytes, until: float) -> None:
        """Send all of `data`. TimeoutError after `until`, OSError if the other side is gone."""
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            self._socket.sendall(data)

    def receive(self, until: float) -> bytes:
        """At least one byte; none at the end. Raises as `send`."""
        with self._in_use:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            return self._socket.recv(CHUNK)

    def close(self) -> None:
        """End the stream. In a forked child this only lets go: the sandbox is the parent's."""
        if os.getpid() != self._pid:  # the lock may be held for ever by a thread that is not here
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # the other side has closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits; close alone does not
        # A woken thread looks its descriptor up again before it returns: were the number another file's by then, it would
        # wait for that one.
        free = self._in_use.acquire(timeout=WAKING)
        try:
            self._socket.close()
        finally:
            if free:
                self._in_use.release()


class Channel(GuestRpc):
    """Calls over a stream. `reason` says what the back end knows about a lost guest."""

    def __init__(self, stream: SocketStream, name: str, reason: Callable[[], str] = lambda: "") -> None:
        super().__init__(name)
        self._stream = stream
        self._reason = reason
        self._received = bytearray()

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        text = json.dumps(header).encode()
        frame = struct.pack(">II", len(text), len(payload)) + text + payload
        self.guarded(header["do"], timeout, lambda until: self._stream.send(frame, until))

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        return self.guarded(call, timeout, self._frame)

    def close(self) -> None:
        self.alive = False
        self._stream.close()

    def failed(self, what: str, error: Exception) -> SandboxError:
        known = self._reason()
        return SandboxError(f"{what}: {error}{known and '; ' + known}")

    def _frame(self, until: float) -> tuple[Header, bytes]:
        head, body = struct.unpack(">II", self._take(8, until))
        if head + body > LARGEST_FRAME:
            raise OSError(f"a frame of {head + body} bytes")
        header = json.loads(self._take(head, until))
        return header, self._take(body, until)

    def _take(self, size: int, until: float) -> bytes:
        while len(self._received) < size:
            data = self._stream.receive(until)
            if not data:
                raise EOFError("its guest has ended")
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data
