"""One connection to an OpenEnv server, and plain requests of it."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentgym.service.client.address import Address, Full, RemoteEnvError, SessionLost, Unavailable
from agentgym.service.client.connection import cut, get, open_websocket
from agentgym.service.client.lookup import fetch, why_not

Json = dict[str, Any]
MOST_BYTES = 100 << 20  # of one message, as OpenEnv's own client takes
CONNECT_SECONDS = 10.0


class Rejected(Exception):
    """The server refused a frame or an action; the session continues."""


class Connection:
    """One WebSocket. Each frame is answered by one frame."""

    def __init__(self, address: Address, ws: aiohttp.ClientWebSocketResponse):
        self._address = address
        [self._url] = address.servers
        self._ws = ws
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def to(cls, address: Address) -> "Connection":
        """Connect. Raises `Unavailable`."""
        [url] = address.servers
        headers, tls = given_token(address), address.tls()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                ws = await open_websocket(f"{url}/ws", headers, tls, max_msg_size=MOST_BYTES, heartbeat=20.0)
        except aiohttp.WSServerHandshakeError as error:
            wants = error.status in (401, 403)
            hint = "it wants a token, or another than this: token_file=" if wants else "is this an OpenEnv server?"
            raise Unavailable(f"openenv:{url}: {url}/ws answers with status {error.status}; {hint}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = why_not(error) if str(error) else f"no answer within {CONNECT_SECONDS:g} s"
            raise Unavailable(f"openenv:{url}: cannot be reached: {why}") from error
        return cls(address, ws)

    @property
    def alive(self) -> bool:
        """True if the connection is open and belongs to the running event loop."""
        return not self._ws.closed and self._loop is asyncio.get_running_loop()

    async def ask(self, frame: Json, timeout: float) -> Json:
        """The data of the frame that answers.

        Raises `Rejected`, `RemoteEnvError`, `Full` or `Unavailable` if the server has no session to give, `SessionLost`
        if the connection is over or no answer came in time.
        """
        if self._loop is not asyncio.get_running_loop():
            raise SessionLost(
                f"openenv:{self._url}: the episode began in another event loop: begin another in this one"
            )
        try:
            # A server that gives no session says so, and closes, before it is asked: its refusal is still to be read.
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._ws.send_str(json.dumps(frame))
            message = await self._ws.receive(timeout)
        except (ConnectionError, aiohttp.ClientError) as error:  # it closed while it was sent something
            raise self._lost(frame, str(error)) from error
        except TimeoutError:
            late = f"no answer to {frame['type']} within {timeout:g} s; the episode is lost: reset begins another"
            raise SessionLost(f"openenv:{self._url}: {late}, and timeout= allows more") from None
        if message.type is aiohttp.WSMsgType.TEXT:
            return self._data(message.data)
        if message.type is aiohttp.WSMsgType.ERROR:
            raise self._lost(frame, str(message.data))
        raise self._lost(frame, f"closed by the server, code {message.data}" if message.data else "closed")

    def _lost(self, frame: Json, why: str) -> SessionLost:
        lost = f"the connection ended during {frame['type']} ({why}), and the episode with it: reset begins another"
        return SessionLost(f"openenv:{self._url}: {lost}")

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
            headers = given_token(self._address)
            status, body = await get(self._address, self._url, path, 30.0, headers=headers)
            return json.loads(body) if status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"openenv:{self._url}: GET {path} failed: {error or 'no answer within 30 s'}") from error

    async def close(self) -> None:
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


def get_json(address: Address, path: str, body: Json | None = None) -> Any:
    """GET, or with a body POST, a path as JSON, without an event loop; None if there is no such route."""
    [url] = address.servers
    sent = None if body is None else json.dumps(body).encode()
    try:
        status, answer = fetch(address, url, path, given_token(address), sent, seconds=30.0)
        if status == 200:
            return json.loads(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"openenv:{url}: cannot be reached: {why_not(error)}") from error
    if status in (401, 403):
        raise Unavailable(f"openenv:{url}: it wants a token, or another than this: token_file=")
    if status < 400 or status in (408, 429) or (status >= 500 and status != 501):
        # It may well have such a thing: with other tasks instead, something else would be measured.
        raise Unavailable(f"openenv:{url}: {path} answers with status {status}")
    return None


def given_token(address: Address) -> dict[str, str]:
    """The headers of a request. Only a token that was given for this server goes there, not AGENTGYM_TOKEN."""
    return address.headers() if address.token_file is not None else {}


def checked_url(name: str) -> str:
    """The URL of a server without a trailing slash. Raises ValueError."""
    parts = urlsplit(name)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"bad address in 'openenv:{name}': write openenv:http://HOST:PORT")
    if parts.username or parts.password:
        raise ValueError(f"an address must not hold a secret: put the token of {parts.hostname} into token_file=")
    return name.rstrip("/")


def _problems(data: Mapping[str, Any]) -> str:
    errors = data.get("errors")
    found = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    return "; ".join(f"{'.'.join(map(str, error.get('loc', [])))}: {error.get('msg')}" for error in found)
