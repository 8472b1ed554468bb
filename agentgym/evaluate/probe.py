"""A probe of each endpoint before anything is played."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentgym.core.usage_error import nearest
from agentgym.policies.chat import url_of

if TYPE_CHECKING:
    import aiohttp

TRIES = 3
SECONDS = 20.0
_SHOWN = 8


async def probe(base_url: str, models: Sequence[str], api_key: str | None = None) -> str | None:
    """Ask an endpoint for its models; one that lists none is asked for one token by each model instead.

    Args:
        base_url: as for `ChatPolicy`.
        models: that will be asked for.
        api_key: None: the environment variable OPENAI_API_KEY, if set.

    Returns:
        Why nothing is known of the endpoint, though it may work (it is busy); None where all is well.

    Raises:
        ValueError: nothing answers there, the key is refused, it is no chat endpoint, or it does not have a model; in one
            line, with the models that it has.
    """
    import aiohttp

    key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    chat = url_of(base_url)
    listing = chat.replace("/chat/completions", "/models", 1)
    limit = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        status, body = await _answer(session, "GET", listing)
        names = _names(body) if status == 200 else None
        if names:
            for model in models:
                if model not in names:
                    raise ValueError(f"{base_url} has no model {model!r}{nearest(model, names)}; it has {_list(names)}")
            return None
        if (unknown := _judged(base_url, status, body)) is not None:
            return unknown
        for model in models:
            words = [{"role": "user", "content": "Hi"}]
            body_sent = {"model": model, "messages": words, "max_tokens": 1}
            status, body = await _answer(session, "POST", chat, body_sent)
            if status in (404, 405):
                raise ValueError(
                    f"{base_url} is no chat endpoint, or has no model {model!r} (it answers {status}: {_words(body)}); base"
                    " URLs mostly end in /v1"
                )
            if (unknown := _judged(base_url, status, body)) is not None:
                return unknown
    return None


def _judged(base_url: str, status: int, body: bytes) -> str | None:
    """The verdict of a status alone; None to ask on.

    Raises:
        ValueError: the key is refused.
    """
    if status in (401, 403):
        raise ValueError(f"{base_url} refuses the key, or needs one, in OPENAI_API_KEY ({status}: {_words(body)})")
    if status == 429 or status >= 500:
        return f"{base_url} answers {status}: {_words(body)}"
    return None


async def _answer(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body, the key cut out of it, after some tries where an endpoint is busy.

    Raises:
        ValueError: nothing answers.
    """
    import aiohttp

    key = session.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    for attempt in range(1, TRIES + 1):
        try:
            async with session.request(method, url, json=body) as response:
                # Some servers repeat the key that they refuse.
                content = (await response.read()).replace(key, b"[the key]") if key else await response.read()
                if attempt == TRIES or not (response.status == 429 or response.status >= 500):
                    return response.status, content
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ValueError(f"{url}: not a URL: {error}") from error
        except TimeoutError as error:
            raise ValueError(f"{url}: no answer within {SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if attempt == TRIES:
                raise ValueError(
                    f"{url}: nothing answers there ({error}): start the server, or correct the URL"
                ) from error
        await asyncio.sleep(0.5 * attempt)
    raise RuntimeError("unreachable: the last try returns or raises")


def _names(body: bytes) -> list[str] | None:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _words(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:200] or "nothing"
