"""JSON over HTTP/1.1, with errors that say which server and how long. A request takes a third of aiohttp's CPU time."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from agent_train.engine.base import EngineError

ATTEMPTS = 3
IDLE_SECONDS = 3.0  # vLLM closes an idle connection after 5


class Refused(ValueError):
    """The server answered with a status 4xx."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class ServerFailed(EngineError):
    """The server answered with a status 5xx, closed the connection or cannot be reached (status 0): it may be dead."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class UnreachableError(ConnectionError):
    """No connection could be made."""


class Client:
    """Brings a key, and keeps connections open, without a limit of their number, for one request at a time each."""

    def __init__(self, key: str = ""):
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._idle: dict[str, list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open, self._idle = set(), {}

    async def request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> tuple[int, str, bytes]:
        """The answer's status, type and body. Raises OSError if there is no connection, or it ends before a whole answer."""
        at = urlsplit(url)
        data = b"" if body is None else json.dumps(body).encode()
        path = (at.path or "/") + (f"?{at.query}" if at.query else "")
        head = f"{method} {path} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(data)}\r\n{self._key}"
        head += "Content-Type: application/json\r\n\r\n" if data else "\r\n"
        reader, writer = await self._connection(f"{at.scheme}://{at.netloc}")
        kept = False
        try:
            writer.write(head.encode() + data)
            status, headers = await _head(reader)
            said, whole = await _body(reader, status, headers)
            kept = whole and headers.get("connection", "").lower() != "close"
        except EOFError as error:
            raise ConnectionError("the server disconnected before its answer was whole") from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(f"what it answers is not HTTP: {error}") from error
        finally:
            if kept:
                self._idle.setdefault(f"{at.scheme}://{at.netloc}", []).append((time.monotonic(), reader, writer))
            else:
                self._open.discard(writer)
                writer.transport.abort()
        return status, headers.get("content-type", "").partition(";")[0], said

    async def _connection(self, server: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        idle = self._idle.get(server, [])
        while idle:
            since, reader, writer = idle.pop()
            if time.monotonic() < since + IDLE_SECONDS and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            self._open.discard(writer)
            writer.transport.abort()
        at = urlsplit(server)
        secure = at.scheme == "https"
        port = at.port or (443 if secure else 80)
        try:
            reader, writer = await asyncio.open_connection(at.hostname, port, ssl=secure or None)
        except OSError as error:
            raise UnreachableError(str(error)) from error
        self._open.add(writer)
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in small letters, of the next answer that is not 1xx."""
    while True:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(first[:100])
        status, pairs = int(rest[:3]), (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        if status >= 200:
            return status, headers


async def _body(reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """The body, and whether another answer may follow it."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return b"".join(parts), True
    if "content-length" in headers or status in (204, 304):
        return await reader.readexactly(int(headers.get("content-length", 0))), True
    return await reader.read(), False


def open_client(key: str = "") -> Client:
    return Client(key)


async def post(
    client: Client,
    base_url: str,
    path: str,
    body: Mapping[str, Any] | None,
    seconds: float,
    what: str,
    *,
    attempts: int = ATTEMPTS,
) -> Any:
    """POST and return the JSON answer.

    A server can close a connection just as it is used again, so a broken one is retried: `attempts=1` for what may not be sent twice.
    Refused if the server refuses (4xx), ServerFailed if it fails (5xx) or there is no connection after a few attempts, EngineError
    without an answer in `seconds`.
    """
    return await _send(client, "POST", base_url + path, body, seconds, what, attempts)


async def ask(client: Client, base_url: str, path: str, seconds: float, what: str) -> Any:
    """GET and return the JSON answer, None where it is no JSON. Raises as `post`."""
    return await _send(client, "GET", base_url + path, None, seconds, what, ATTEMPTS)


async def _send(
    client: Client, method: str, url: str, body: Mapping[str, Any] | None, seconds: float, what: str, attempts: int
) -> Any:
    for attempt in range(1, attempts + 1):
        try:
            async with asyncio.timeout(seconds):
                status, kind, said = await client.request(method, url, body)
        except TimeoutError as error:
            raise EngineError(f"{what}: {url} did not answer within {seconds:g} s") from error
        except OSError as error:
            if attempt == attempts or isinstance(error, UnreachableError):
                raise ServerFailed(f"{what}: {url}: {type(error).__name__}: {error}") from error
            continue
        if status == 200:
            return json.loads(said) if said and kind == "application/json" else None
        failure = Refused if 400 <= status < 500 else ServerFailed
        raise failure(f"{what}: {url} answered {status}: {said.decode(errors='replace')[:500]}", status)
    raise AssertionError("the last attempt returns or raises")


async def healthy(client: Client, base_url: str, seconds: float = 2.0) -> bool:
    """True if GET /health answers 200 in time."""
    return await get(client, base_url + "/health", seconds) is not None


async def get(client: Client, url: str, seconds: float) -> str | None:
    """The text of an answer with status 200 in time, else None."""
    try:
        async with asyncio.timeout(seconds):
            status, _, said = await client.request("GET", url)
    except OSError:  # TimeoutError is one
        return None
    return said.decode(errors="replace") if status == 200 else None
