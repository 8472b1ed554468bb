"""Calls to the guest of a sandbox: frames over any stream, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from agentgym.sandbox.api import SandboxError

CHUNK = 1 << 16
WAKING = 10.0  # seconds that a thread has to leave a stream that is closed under it
LARGEST_FRAME = 64 << 20  # bytes; a guest that claims more is not ours any more

Header = dict[str, Any]


class Stream(Protocol):
    """Bytes to and from the guest's standard input and output.

    `close` may be called from another thread, and ends a `send` or `receive` that waits there.
    """

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of `data`. TimeoutError after `timeout` seconds, OSError if the other side is gone."""
        ...

    def receive(self, timeout: float) -> bytes:
        """At least one byte; none at the end of the stream. TimeoutError after `timeout` seconds, OSError as above."""
        ...

    def close(self) -> None:
        """End the stream: the guest sees the end of its standard input. May be called twice."""
        ...


class GuestRpc(Protocol):
    """Remote procedure calls to a guest: one at a time, each with its answers. A failure closes the channel."""

    alive: bool

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        """Send a call, whose answer, or answers, `answer` returns."""
        ...

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        """The next answer to `call`: its header and its bytes.

        Raises:
            SandboxError: the guest is gone, or has not answered within `timeout` seconds.
        """
        ...

    def close(self) -> None:
        """End it; calls then raise SandboxError. May be called twice, and from another thread."""
        ...


class SocketStream:
    """A stream over one end of a connected socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pid = os.getpid()
        self._in_use = threading.RLock()  # while a thread waits in the kernel for this socket

    def send(self, data: bytes, timeout: float) -> None:
        """See `Stream.send`."""
        with self._in_use:
            self._socket.settimeout(max(timeout, 0.001))
            self._socket.sendall(data)

    def receive(self, timeout: float) -> bytes:
        """See `Stream.receive`."""
        with self._in_use:
            self._socket.settimeout(max(timeout, 0.001))
            return self._socket.recv(CHUNK)

    def close(self) -> None:
        """End it. In a forked child this only lets go: the sandbox is the parent's."""
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


class Channel:
    """One call at a time over a stream. After a failure it is closed: what comes next could belong to the last call."""

    def __init__(self, stream: Stream, name: str, reason: Callable[[], str] | None = None) -> None:
        """`name` says whose it is; `reason` is asked, once the guest is gone, for what the back end knows about it."""
        self.name = name
        self.alive = True
        self._stream = stream
        self._reason = reason
        self._received = bytearray()

    def begin(self, data: bytes, *, timeout: float) -> None:
        """Send the guest what comes before the first frame."""
        self._guarded("begin", timeout, lambda until: self._stream.send(data, until - time.monotonic()))

    def call(self, header: Header, payload: bytes = b"", *, timeout: float) -> tuple[Header, bytes]:
        """Send one call and wait for its answer: its header and its bytes.

        Raises:
            SandboxError: the guest is gone, or has not answered within `timeout` seconds.
        """
        self.send(header, payload, timeout=timeout)
        return self.answer(header["do"], timeout=timeout)

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        """Send a call, whose answer, or answers, `answer` returns."""
        text = json.dumps(header).encode()
        frame = struct.pack(">II", len(text), len(payload)) + text + payload
        self._guarded(header["do"], timeout, lambda until: self._stream.send(frame, until - time.monotonic()))

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        """The next answer to `call`."""
        return self._guarded(call, timeout, self._frame)

    def close(self) -> None:
        """End the stream; calls then raise SandboxError. May be called twice."""
        self.alive = False
        self._stream.close()

    def _frame(self, until: float) -> tuple[Header, bytes]:
        head, body = struct.unpack(">II", self._take(8, until))
        if head + body > LARGEST_FRAME:
            raise OSError(f"a frame of {head + body} bytes")
        header = json.loads(self._take(head, until))
        return header, self._take(body, until)

    def _take(self, size: int, until: float) -> bytes:
        while len(self._received) < size:
            data = self._stream.receive(until - time.monotonic())
            if not data:
                raise EOFError("its guest has ended")
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _guarded(self, call: str, timeout: float, act: Callable[[float], Any]) -> Any:
        if not self.alive:
            raise SandboxError(f"sandbox {self.name} is closed: no {call!r} any more")
        try:
            return act(time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            raise SandboxError(f"sandbox {self.name} did not answer {call!r} within {timeout:.1f} s") from None
        except (OSError, EOFError, ValueError) as error:
            if not self.alive:
                raise SandboxError(f"sandbox {self.name} was closed during {call!r}") from error
            self.close()
            known = self._reason() if self._reason is not None else ""
            raise SandboxError(f"sandbox {self.name} failed in {call!r}: {error}{known and '; ' + known}") from error
        except BaseException:  # interrupted half way: the rest of the answer would be taken for the next call's
            self.close()
            raise
