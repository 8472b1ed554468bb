"""WebSocket frames (RFC 6455) over a blocking socket: text messages, pings and closes, no extensions.

A message takes one `recv` and one `send` where it fits, so that a step is two system calls.
"""

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

from agentgym.service.protocol.frames import BAD_FRAME, NORMAL_CLOSE, TOO_LARGE, Refused
from agentgym.service.server.slots import BYTES_IN, BYTES_OUT, READING, WAITING, WRITING, Slot

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
_CONTINUATION = 0
_WHOLE_TEXT = 128 | TEXT
_CHUNK = 1 << 16
_NO_MASK = bytes(4)
_MOST_ALIVE = 100_000.0  # seconds of silence; the kernel takes little more
_ASKED = 3  # times by the kernel before a machine counts as vanished


def encoded(opcode: int, payload: bytes, masked: bool = False) -> bytes:
    """One whole frame. Clients must mask; the mask is zero, so the payload stays as it is."""
    size, bit = len(payload), 128 if masked else 0
    if size < 126:
        head = bytes((128 | opcode, bit | size))
    elif size < 1 << 16:
        head = struct.pack("!BBH", 128 | opcode, bit | 126, size)
    else:
        head = struct.pack("!BBQ", 128 | opcode, bit | 127, size)
    return head + (_NO_MASK + payload if masked else payload)


def close_frame(code: int) -> bytes:
    return encoded(CLOSE, struct.pack("!H", code))


@dataclass(slots=True)
class Frames:
    """Parses frames. `limit`: bytes of a message; `masked`: the other side is a client, which must mask."""

    limit: int
    masked: bool = True
    buffer: bytearray = field(default_factory=bytearray)
    _opcode: int = 0
    _parts: bytearray = field(default_factory=bytearray)  # no list: a million fragments may have a byte each, or none

    def take(self, data: bytes) -> tuple[int, bytes] | None:
        """Add received bytes and return what `next` returns. One whole short message is not copied into the buffer."""
        size = len(data)
        if data[0] == _WHOLE_TEXT and 6 <= size <= self.limit and not (self.buffer or self._opcode):
            short = data[1] - 128 * self.masked
            start = 2 if short < 126 else 4
            after = start + 4 * self.masked
            if size - after == short < 126 or (short == 126 and size - after == int.from_bytes(data[2:4], "big")):
                return TEXT, unmasked(data[after:], data[start:after]) if self.masked else data[after:]
        self.buffer += data
        return self.next()

    def next(self) -> tuple[int, bytes] | None:
        """The next whole message or control frame, as opcode and payload; None until more bytes come."""
        while (frame := self._frame()) is not None:
            fin, opcode, payload = frame
            if opcode >= CLOSE:
                return opcode, payload
            if opcode == _CONTINUATION and not self._opcode:
                raise _bad("a continuation of no message")
            if opcode != _CONTINUATION:
                if self._opcode:
                    raise _bad("a new message within another")
                if fin:
                    return opcode, payload
                self._opcode = opcode
            self._parts += payload
            if fin:
                whole = self._opcode, bytes(self._parts)
                self._opcode = 0
                self._parts.clear()
                return whole
        return None

    def _frame(self) -> tuple[int, int, bytes] | None:
        buffer = self.buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        opcode, size, start = first & 15, second & 127, 2
        if first & 112 or opcode not in (_CONTINUATION, TEXT, CLOSE, PING, PONG):
            raise _bad(f"only text messages, without extensions, are taken; not a frame that begins with {first:#x}")
        if bool(second & 128) != self.masked:
            raise _bad("frames of clients are masked" if self.masked else "frames of servers are not masked")
        if opcode >= CLOSE and (size > 125 or not first & 128):
            raise _bad("a control frame is whole and has at most 125 bytes")
        if size > 125:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
        if opcode < CLOSE and len(self._parts) + size > self.limit:
            raise Refused(TOO_LARGE, f"a message has at most {self.limit:,} bytes", fatal=True)
        mask = start
        start += 4 * self.masked
        if len(buffer) < start + size:
            return None
        payload = bytes(buffer[start : start + size])
        if self.masked:
            payload = unmasked(payload, bytes(buffer[mask:start]))
        del buffer[: start + size]
        return first & 128, opcode, payload


def unmasked(payload: bytes, mask: bytes) -> bytes:
    """The payload without its mask, by one operation on integers."""
    if mask == _NO_MASK or not payload:
        return payload
    size = len(payload)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


def contains_close(data: bytes | bytearray) -> bool:
    """True if there is a close frame in these bytes, which begin with a frame; the last frame may be cut."""
    at = 0
    while at + 2 <= len(data):
        if data[at] & 15 == CLOSE:
            return True
        size, start = data[at + 1] & 127, at + 2
        if size > 125:
            start += 2 if size == 126 else 8
            size = int.from_bytes(data[at + 2 : start], "big")
        at = start + 4 * (data[at + 1] >> 7) + size
    return False


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Let the kernel end a connection whose other machine has been silent, or confirmed nothing, for this long.

    A machine that lost its power or network says nothing. Connections that a listening socket accepts inherit this.
    """
    seconds = min(seconds, _MOST_ALIVE)
    pause = max(1, round(seconds / (_ASKED + 1)))
    values = {"KEEPIDLE": pause, "KEEPINTVL": pause, "KEEPCNT": _ASKED, "USER_TIMEOUT": round(1000 * seconds)}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in values.items():
        if hasattr(socket, f"TCP_{name}"):  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def _bad(why: str) -> Refused:
    return Refused(BAD_FRAME, why, fatal=True)


class Connection:
    """A worker's end of a connection. The session's thread calls `receive`, `send` and `end`; any thread the rest."""

    def __init__(self, sock: socket.socket, slot: Slot, limit: int):
        sock.setblocking(True)
        self._socket = sock
        self._slot = slot
        self._frames = Frames(limit)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self.closed = False  # whether the client ended it in good order

    def receive(self) -> str | None:
        """The next text message; None once the connection is over. Answers pings. Raises a fatal `Refused`.

        A message that a close frame follows is dropped: its client no longer waits for the answer, which may take long.
        """
        frames = self._frames
        with self._reading:
            self._slot.enter(READING if frames.buffer else WAITING)
            message = frames.next() if frames.buffer else None
            while True:
                while message is None:
                    data = self._received()
                    if not data:
                        return None
                    message = frames.take(data)
                opcode, payload = message
                if opcode == TEXT:
                    if frames.buffer and contains_close(frames.buffer):
                        self._control(CLOSE, struct.pack("!H", NORMAL_CLOSE))
                        return None
                    try:
                        return payload.decode()
                    except UnicodeDecodeError:
                        raise _bad("a text message is UTF-8") from None
                if not self._control(opcode, payload):
                    return None
                message = frames.next()

    def _received(self) -> bytes:
        frames, words = self._frames, self._slot.words
        # Of a message that has begun, the time runs from its first byte; a ping that came in pieces was none.
        state = READING if frames.buffer or frames._opcode else WAITING
        if words[0] != state:
            self._slot.enter(state)
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            return b""
        words[BYTES_IN] += len(data)
        return data

    def _control(self, opcode: int, payload: bytes) -> bool:
        """Answer a ping or a close frame; returns False after a close frame."""
        if opcode == PING:
            self._write(encoded(PONG, payload))
        elif opcode == CLOSE:
            self.closed = True
            self._write(encoded(CLOSE, payload[:2]))
            self.shut(socket.SHUT_WR)
        return opcode != CLOSE

    def send(self, text: str) -> bool:
        """Send a text message; returns whether that succeeded."""
        data = encoded(TEXT, text.encode())
        if self._slot.words[0] != WRITING:  # which it is in since the call ended
            self._slot.enter(WRITING)
        return self._write(data)

    def end(self, last: bytes) -> None:
        self._slot.enter(WRITING)
        self._write(last)
        self.shut(socket.SHUT_WR)

    def _write(self, data: bytes) -> bool:
        try:
            with self._writing:
                self._socket.sendall(data)
        except OSError:
            return False
        self._slot.words[BYTES_OUT] += len(data)
        return True

    def _write_now(self, data: bytes) -> None:
        """Send a short frame if there is room for it now."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
            self._slot.words[BYTES_OUT] += sent
            if sent < len(data):  # the rest could come only in between the next frames
                self.shut(socket.SHUT_RDWR)
        except OSError:  # no room, or the client is gone
            return
        finally:
            self._writing.release()

    def shut(self, how: int) -> None:
        """Shut the connection down, which wakes threads that wait for it. From any thread."""
        with contextlib.suppress(OSError):  # it is over already
            self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def answer_pings(self) -> None:
        """Answer pings while the session's thread is in a call. From another thread; never blocks."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            frames, peek = self._frames, socket.MSG_PEEK | socket.MSG_DONTWAIT
            with contextlib.suppress(OSError):
                while len(frames.buffer) < _CHUNK and (data := self._socket.recv(_CHUNK, peek)):
                    if contains_close(frames.buffer + data):
                        break  # it stays in the socket, where the server looks for it when the client is gone
                    frames.buffer += self._socket.recv(len(data))
            while frames.buffer[:1] == bytes((128 | PING,)) and (message := frames.next()):
                self._write_now(encoded(PONG, message[1]))
        except Refused:  # the main thread meets it, too
            return
        finally:
            self._reading.release()
