"""One connection to an OpenEnv server, and plain requests of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentgym.policies import endpoints
from agentgym.service.client.address import Full, RemoteEnvError, SessionLost, Unavailable
from agentgym.service.client.connection import cut, open_websocket

Json = dict[str, Any]
MOST_BYTES = 100 << 20  # of one message, as OpenEnv's own client takes
CONNECT_SECONDS = 10.0


class Rejected(Exception):
    """The server refused a frame or an action; the session goes on."""


class Connection:
    """One WebSocket. Each frame is answered by one frame."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, ws: aiohttp.ClientWebSocketResponse
    ):
        self._url = url
        self._headers = headers
        self._tls = tls
        self._ws = ws
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def to(cls, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> Connection:
        """Connect. Raises `Unavailable`."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                ws = await open_websocket(f"{url}/ws", headers, tls, max_msg_size=MOST_BYTES, heartbeat=20.0)
        except aiohttp.WSServerHandshakeError as error:
            wants = error.status in (401, 403)
            hint = "it wants a token, or another than this: token_file=" if wants else "is this an OpenEnv server?"
            raise Unavailable(f"openenv:{url}: {url}/ws answers with status {error.status}; {hint}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = _why(error) or f"no answer within {CONNECT_SECONDS:g} s"
            raise Unavailable(f"openenv:{url}: cannot be reached: {why}") from error
        return cls(url, headers, tls, ws)

    @property
    def alive(self) -> bool:
        """True if the connection is open and belongs to the running event loop."""
        return not self._ws.closed and self._loop is asyncio.get_running_loop()

    async def ask(self, frame: Json, timeout: float) -> Json:
        """The data of the frame that answers.

        Raises:
            Rejected: the server refuses the frame.
            RemoteEnvError: the environment raised.
            Unavailable: the server has no session to give, now (Full) or at all.
            SessionLost: the connection is over, or no answer came in time.
        """
        if self._loop is not asyncio.get_running_loop():
            raise SessionLost(
                f"openenv:{self._url}: the episode began in another event loop: begin another in this one"
            )
        try:
            # A server that gives no session says so, and closes, before it is asked: that is then what there is to read.
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._ws.send_str(json.dumps(frame))
            message = await self._ws.receive(timeout)
        except (ConnectionError, aiohttp.ClientError) as error:  # it closed while it was sent something
            raise SessionLost(
                f"openenv:{self._url}: the connection ended during {frame['type']} ({error}), and the episode with it: reset"
                " begins another"
            ) from error
        except TimeoutError:
            raise SessionLost(
                f"openenv:{self._url}: no answer to {frame['type']} within {timeout:g} s; the episode is lost: reset begins"
                " another, and timeout= allows more"
            ) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise SessionLost(
                f"openenv:{self._url}: the connection ended during {frame['type']} ({_ending(message)}), and the episode with"
                " it: reset begins another"
            )
        return self._data(message.data)

    def _data(self, text: str) -> Json:
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError) as error:
            raise SessionLost(f"openenv:{self._url}: no OpenEnv frame: {text[:200]!r}") from error
        if kind != "error":
            return dict(data)
        code, told = data.get("code"), str(data.get("message"))
        if code == "VALIDATION_ERROR":
            raise Rejected(_problems(data) or told)
        if code in ("INVALID_JSON", "UNKNOWN_TYPE"):
            raise Rejected(f"{told} ({code})")
        if code == "EXECUTION_ERROR":
            raise RemoteEnvError(f"openenv:{self._url}: the environment failed: {told}")
        if code in ("CAPACITY_REACHED", "FACTORY_ERROR"):
            raise (Full if code == "CAPACITY_REACHED" else Unavailable)(f"openenv:{self._url}: {told} ({code})")
        raise SessionLost(f"openenv:{self._url}: {told} ({code}); the episode is lost: reset begins another")

    async def get(self, path: str) -> Any:
        """GET a path as JSON; None if there is no such route. Raises `Unavailable`."""
        try:
            http, timeout, tls = await endpoints.session(), aiohttp.ClientTimeout(total=30.0), self._tls or True
            async with http.get(f"{self._url}{path}", headers=self._headers, timeout=timeout, ssl=tls) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unavailable(f"openenv:{self._url}: GET {path} failed: {error or 'no answer within 30 s'}") from error

    async def close(self) -> None:
        """End the session in good order."""
        if self._loop is not asyncio.get_running_loop():
            await self.drop()
            return
        with contextlib.suppress(ConnectionError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._ws.send_str('{"type": "close"}')
                await self._ws.close()

    async def drop(self) -> None:
        """Drop the connection in any state; one of another event loop is cut."""
        cut(self._ws)
        if self._loop is asyncio.get_running_loop() or self._loop.is_closed():
            self._ws._response.close()  # or it would want its loop when it is forgotten


class Asker:
    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None):
        self._url = url
        self._headers = dict(headers)
        self._tls = tls

    def get(self, path: str, body: Json | None = None) -> Any:
        """GET, or with a body POST, a path as JSON, without an event loop; None if there is no such route. Raises `Unavailable`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30.0, context=self._tls) as response:
                return json.loads(response.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise Unavailable(
                    f"openenv:{self._url}: it wants a token, or another than this: token_file="
                ) from error
            if error.code in (408, 429) or (error.code >= 500 and error.code != 501):
                # It may well have such a thing: with other tasks instead, something else would be measured.
                raise Unavailable(f"openenv:{self._url}: {path} answers with status {error.code}") from error
            return None
        except (OSError, ValueError) as error:
            raise Unavailable(f"openenv:{self._url}: cannot be reached: {_why(error)}") from error


def checked_url(name: str) -> str:
    """The URL of a server without a trailing slash. Raises ValueError."""
    parts = urlsplit(name)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"bad address in 'openenv:{name}': write openenv:http://HOST:PORT")
    if parts.username or parts.password:
        raise ValueError(f"an address must not hold a secret: put the token of {parts.hostname} into token_file=")
    return name.rstrip("/")


def _why(error: BaseException) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    hint = ": ca_file= names one to trust" if "CERTIFICATE_VERIFY_FAILED" in str(reason) else ""
    hint = ": it speaks no TLS there, write http://" if "WRONG_VERSION_NUMBER" in str(reason) else hint
    return f"{reason}{hint}"


def _problems(data: Mapping[str, Any]) -> str:
    errors = data.get("errors")
    found = errors if isinstance(errors, list) else []
    return "; ".join(
        f"{'.'.join(map(str, error.get('loc', [])))}: {error.get('msg')}"
        for error in found
        if isinstance(error, Mapping)
    )


def _ending(message: aiohttp.WSMessage) -> str:
    if message.type is aiohttp.WSMsgType.ERROR:
        return str(message.data)
    return f"closed by the server, code {message.data}" if message.data else "closed"
