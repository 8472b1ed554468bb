"""JSON over one shared aiohttp session, with errors that say which server and how long."""

import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from agent_train.engine.base import EngineError

ATTEMPTS = 3


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


def open_client(key: str = "") -> aiohttp.ClientSession:
    """A session without a limit of connections that brings a key. It drops an idle connection before vLLM does, after 5 s."""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3), headers=headers)


async def post(
    client: aiohttp.ClientSession,
    base_url: str,
    path: str,
    body: Mapping[str, Any] | None,
    seconds: float,
    what: str,
    *,
    attempts: int = ATTEMPTS,
    method: str = "POST",
) -> Any:
    """Send and return the JSON answer, None where it is no JSON.

    A server can close a connection just as it is used again, so a broken one is retried: `attempts=1` for what may not be sent twice.
    Refused if the server refuses (4xx), ServerFailed if it fails (5xx) or there is no connection after a few attempts, EngineError
    without an answer in `seconds`.
    """
    url = base_url + path
    timeout = aiohttp.ClientTimeout(total=None if seconds == math.inf else seconds, ceil_threshold=math.inf)
    for attempt in range(1, attempts + 1):
        try:
            async with client.request(method, url, json=body, timeout=timeout) as response:
                if response.status == 200:
                    said = await response.read()
                    return json.loads(said) if said and response.content_type == "application/json" else None
                raise await _failure(response, what)
        except TimeoutError as error:
            raise EngineError(f"{what}: {url} did not answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            if attempt == attempts or isinstance(error, aiohttp.ClientConnectorError):
                raise ServerFailed(f"{what}: {url}: {type(error).__name__}: {error}") from error
    raise AssertionError("the last attempt returns or raises")


async def events(
    client: aiohttp.ClientSession, base_url: str, path: str, body: Mapping[str, Any], what: str
) -> AsyncIterator[Any]:
    """Send, and yield the JSON of each server-sent event until "[DONE]". Nothing limits its time; other errors as of `post`."""
    url, begun = base_url + path, False
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with client.post(url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as response:
                if response.status != 200:
                    raise await _failure(response, what)
                async for line in response.content:
                    if (data := line.removeprefix(b"data:").strip()) == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        begun = True
                        yield json.loads(data)
            raise ServerFailed(f"{what}: {url} ended its answer before its end")
        except aiohttp.ClientError as error:
            if begun or attempt == ATTEMPTS or isinstance(error, aiohttp.ClientConnectorError):
                raise ServerFailed(f"{what}: {url}: {type(error).__name__}: {error}") from error


async def _failure(response: aiohttp.ClientResponse, what: str) -> Refused | ServerFailed:
    text = (await response.text())[:500]
    failure = Refused if 400 <= response.status < 500 else ServerFailed
    return failure(f"{what}: {response.url} answered {response.status}: {text}", response.status)


async def healthy(client: aiohttp.ClientSession, base_url: str, seconds: float = 2.0) -> bool:
    """True if GET /health answers 200 in time."""
    return await get(client, base_url + "/health", seconds) is not None


async def get(client: aiohttp.ClientSession, url: str, seconds: float) -> str | None:
    """The text of an answer with status 200 in time, else None."""
    try:
        async with client.get(url, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            return await response.text() if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError):
        return None
