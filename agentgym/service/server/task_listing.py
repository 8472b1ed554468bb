"""The server's side of the process that reads tasks; see `task_catalogue.py`."""

import asyncio
import json
import socket
from typing import Any

from agentgym.service.server.forks import Forks
from agentgym.storage.jsonl import line_of

SECONDS = 60.0
_LIMIT = 1 << 30  # bytes of a page: a thousand tasks


class Listing:
    """Asks for tasks, one question at a time. A process that takes too long is killed, and another started."""

    def __init__(self, forks: Forks):
        self._forks = forks
        self._key = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()

    async def ask(self, question: dict[str, Any]) -> Any:
        """The answer of `task_catalogue.tell_tasks`. Raises LookupError for its errors, or OSError."""
        async with self._asking:
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await self._answer(question)
            except BaseException:
                self.close()
                raise
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer["result"]

    async def rest(self) -> None:
        """End the process until the next question, to free its memory."""
        async with self._asking:
            if self._streams is not None:
                self._streams[1].close()  # the process waits for a question, and ends
                self._streams = None

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._streams is not None and self._streams[0].at_eof():  # it has died since, with the zygote maybe
            self.close()
        reader, writer = self._streams or await self._open()
        writer.write(line_of(question).encode())
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionError("the process that reads tasks died")
        found: dict[str, Any] = json.loads(line)
        return found

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._streams = await asyncio.open_connection(sock=ours, limit=_LIMIT)
            self._key = self._forks.fork("tasks", {}, [theirs.detach()])
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
            self._forks.kill(self._key)
