"""Length-prefixed messages over pipes: eight bytes of length, big endian, then the content."""

from __future__ import annotations

import math
import os
import select
import time

LONGEST = 256 << 20  # bytes of one message
_PREFIX = 8


def send_message(fd: int, content: bytes, until: float = math.inf) -> None:
    """Write one message. The deadline holds if the descriptor is non-blocking.

    Args:
        until: deadline by `time.monotonic()`.

    Raises:
        TimeoutError: the deadline passed.
        BrokenPipeError: the other side has closed.
    """
    rest = memoryview(len(content).to_bytes(_PREFIX, "big") + content)
    while rest:
        _wait(fd, select.POLLOUT, until)
        rest = rest[os.write(fd, rest) :]


def receive_message(fd: int, until: float = math.inf, longest: int = LONGEST) -> bytes:
    """Read one message.

    Args:
        until: deadline by `time.monotonic()`.
        longest: bytes that a message may have.

    Raises:
        TimeoutError: the deadline passed.
        EOFError: the other side has closed.
        ValueError: the message is longer than `longest`.
    """
    size = int.from_bytes(_read(fd, _PREFIX, until), "big")
    if size > longest:
        raise ValueError(f"a message of {size} bytes was announced; {longest} is the limit")
    return _read(fd, size, until)


def _read(fd: int, size: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _wait(fd, select.POLLIN, until)
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _wait(fd: int, event: int, until: float) -> None:
    left = until - time.monotonic()
    poll = select.poll()
    poll.register(fd, event)
    if left <= 0 or not poll.poll(None if left == math.inf else left * 1000):
        raise TimeoutError
