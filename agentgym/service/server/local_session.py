"""A session with the server itself as its client, for plain HTTP requests."""

import asyncio
import contextlib
import socket

from agentgym.service.protocol.frames import BAD_REQUEST, NORMAL_CLOSE, WORKER_DIED, Refused
from agentgym.service.worker.websocket import CLOSE, TEXT, Frames, close_frame, encoded

_CHUNK = 1 << 16


class Line:
    """The client's end of such a session. One message at a time; cancelling `ask` ends the session."""

    def __init__(self, sock: socket.socket, limit: int = 1 << 30):
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames(limit, masked=False)
        self._asking = asyncio.Lock()
        self.closed = False

    @property
    def over(self) -> bool:
        """True if the session has ended; `ask` still returns its last message."""
        if self.closed or self._asking.locked():
            return self.closed
        try:
            # Unasked input is the last message, or the end.
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def ask(self, text: str) -> str:
        """The answer to a message. Raises a fatal `Refused` if the session ends without one."""
        async with self._asking:
            if self.closed:
                raise Refused(BAD_REQUEST, "the session has ended", fatal=True)
            try:
                # A session that has ended takes nothing more, but may have said why.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(self._socket, encoded(TEXT, text.encode()))
                return await self._received()
            except OSError as error:
                self.close()
                raise Refused(WORKER_DIED, f"the session has ended: {error}", fatal=True) from None
            except asyncio.CancelledError:
                self.close()
                raise

    async def _received(self) -> str:
        while True:
            message = self._frames.next()
            if message is not None and message[0] == TEXT:
                return message[1].decode()
            if message is None:
                data = await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK)
                self._frames.buffer += data
                if data:
                    continue
            if message is None or message[0] == CLOSE:
                self.close()
                raise Refused(WORKER_DIED, "the session has ended without an answer", fatal=True)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):  # it is over already
            self._socket.send(close_frame(NORMAL_CLOSE))
        self._socket.close()
