"""JSON over one shared aiohttp session, with errors that say which server and how long."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from agent_train.engine.base import EngineError

ATTEMPTS = 3


class ServerFailed(EngineError):
    """The server answered with status 5xx, closed the connection or cannot be reached: it may be dead."""


def open_client() -> aiohttp.ClientSession:
    """A session without a limit of connections. It drops an idle connection before vLLM does, after 5 s."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3))


async def post(
    client: aiohttp.ClientSession,
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
    ValueError if the server refuses (4xx), ServerFailed if it fails (5xx) or there is no connection after a few attempts, EngineError
    without an answer in `seconds`.
    """
    url = base_url + path
    timeout = aiohttp.ClientTimeout(total=seconds)
    for attempt in range(1, attempts + 1):
        try:
            async with client.post(url, json=body, timeout=timeout) as response:
                if response.status == 200:
                    return await response.json() if response.content_type == "application/json" else None
                text = (await response.text())[:500]
                failure = ValueError if 400 <= response.status < 500 else ServerFailed
                raise failure(f"{what}: {url} answered {response.status}: {text}")
        except TimeoutError as error:
            raise EngineError(f"{what}: {url} did not answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            if attempt == attempts or isinstance(error, aiohttp.ClientConnectorError):
                raise ServerFailed(f"{what}: {url}: {type(error).__name__}: {error}") from error
    raise AssertionError("the last attempt returns or raises")


async def healthy(client: aiohttp.ClientSession, base_url: str, seconds: float = 2.0) -> bool:
    """True if GET /health answers 200 in time."""
    try:
        async with client.get(base_url + "/health", timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            return response.status == 200
    except (TimeoutError, aiohttp.ClientError):
        return False
