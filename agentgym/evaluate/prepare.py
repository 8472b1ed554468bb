"""Checks of an evaluation before it starts: agents, environments, endpoints, prices."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from agentgym.core import registration
from agentgym.core.install import pip_install
from agentgym.core.registration import EnvSpec
from agentgym.core.usage_error import nearest, unmade
from agentgym.evaluate.agents import check_plays, located, policy_maker
from agentgym.evaluate.budget import Prices
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.run import model_of
from agentgym.policies.chat import url_of
from agentgym.rollout.episode import close_env

if TYPE_CHECKING:
    import aiohttp

_AT_ENDPOINTS = ("chat", "playing")
_ANYWHERE = "http://127.0.0.1:9/v1"


def check_agents(agents: Sequence[AgentSpec], serve_args: Sequence[str] = ()) -> None:
    """Raise ValueError if an agent cannot be made; endpoints are not contacted."""
    for agent in agents:
        folder = agent.settings.get("serve")
        if folder is not None:
            from agentgym.evaluate.serving import check_serving

            check_serving(folder, serve_args)
            agent = located(agent, _ANYWHERE)  # noqa: PLW2901 - where it will be is not known yet
        policy_maker(agent)


def check_envs(cells: Sequence[Cell]) -> list[str]:
    """Notes on tasks and sandboxes. Raises ValueError unless each environment can be made, has the split and suits its agents."""
    from agentgym.sandbox import SandboxError

    notes: list[str] = []
    by_env: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_env[cell.env.id].append(cell)
    for id, own in by_env.items():
        try:
            notes += dict.fromkeys(f"{id}: {note}" for note in _tried(own[0].env, own))
        except (ValueError, TypeError, ImportError, OSError, SandboxError) as error:
            # Most say which environment it is; those of other people's code need not.
            text = str(error) or type(error).__name__
            if isinstance(error, TypeError) and own[0].env.kwargs and id not in text:  # Python's own name no argument
                text = f"cannot be made with {dict(own[0].env.kwargs)}: {text}"
            raise ValueError(text if id in text else f"{id}: {text}") from error
        except Exception as error:
            raise ValueError(f"{id}: {unmade(error)}") from error
    return notes


def _tried(of: EnvSpec, cells: Sequence[Cell]) -> Iterator[str]:
    """Make an environment, and close it; notes on its tasks and its sandboxes."""
    from agentgym.sandbox import describe

    registered = ((known.entry_point, known.kwargs) for known in registration.registry.values())
    if (missing := of.missing()) and (of.entry_point, of.kwargs) in registered:
        raise ValueError(f"{of.id} needs {missing[0]}, which is not installed: {pip_install(missing[0])}")
    env = of.make()
    try:
        for cell in cells:
            check_plays(cell.agent, env)
        image = getattr(env.unwrapped, "sandbox_image", None)
        writable = getattr(env.unwrapped, "writable_root", False)
    finally:
        asyncio.run(close_env(env))
    yield from (f"tasks: {source}" for cell in cells if (source := cell.tasks().source))
    if image:
        yield f"sandbox: {describe(of.kwargs.get('sandbox'), image, writable)}"


async def check_endpoints(agents: Sequence[AgentSpec]) -> list[str]:
    """Raise ValueError if a chat endpoint does not answer or lacks a model; returns notes on those that are busy."""
    models: dict[str, list[str]] = defaultdict(list)
    for agent in agents:
        if agent.kind in _AT_ENDPOINTS and "serve" not in agent.settings:
            models[agent.settings["base_url"]].append(agent.settings["model"])
    found = await asyncio.gather(*(probe(url, names) for url, names in models.items()))
    return [note for note in found if note is not None]


def check_prices(agents: Sequence[AgentSpec], prices: Prices | None) -> None:
    """Raise ValueError if a cost limit cannot be enforced: every endpoint model and user agent needs a price."""
    for agent in agents:
        if agent.kind == "python" or (agent.kind in _AT_ENDPOINTS and "serve" not in agent.settings):
            if prices is None:
                raise ValueError("a cost limit needs a table of prices: --prices FILE")
            if prices.cost(model_of(agent), {}) is None:
                raise ValueError(f"a cost limit needs prices for all models: the table lacks {model_of(agent)!r}")


TRIES = 3
SECONDS = 20.0
_SHOWN = 8


async def probe(base_url: str, models: Sequence[str]) -> str | None:
    """Ask an endpoint for its models; one that lists none is asked for one token by each model instead.

    Returns why nothing is known of the endpoint, though it may work (it is busy), or None. Raises ValueError if nothing answers
    there, the key of OPENAI_API_KEY is refused, it is no chat endpoint, or it does not have a model.
    """
    import aiohttp

    key = os.environ.get("OPENAI_API_KEY", "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    chat = url_of(base_url)
    limit = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        for model in (None, *models):
            if model is None:
                status, body = await _answer(session, "GET", chat.replace("/chat/completions", "/models", 1))
                if status == 200 and (names := _names(body)):
                    _check_models(base_url, models, names)
                    return None
            else:
                asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
                status, body = await _answer(session, "POST", chat, asked)
            words = " ".join(body.decode(errors="replace").split())[:200] or "nothing"
            if model is not None and status in (404, 405):
                wrong = f"{base_url} is not a chat endpoint, or has no model {model!r}"
                raise ValueError(f"{wrong} (it answers {status}: {words}); base URLs usually end in /v1")
            if status in (401, 403):
                raise ValueError(f"{base_url} refuses the key, or needs one, in OPENAI_API_KEY ({status}: {words})")
            if status == 429 or status >= 500:
                return f"{base_url} answers {status}: {words}"
    return None


def _check_models(base_url: str, models: Sequence[str], names: Sequence[str]) -> None:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    for model in models:
        if model not in names:
            has = ", ".join(names[:_SHOWN]) + more
            raise ValueError(f"{base_url} has no model {model!r}{nearest(model, names)}; it has {has}")


async def _answer(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body, the key cut out of it, after some tries where an endpoint is busy."""
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
                what = f"nothing answers there ({error}): start the server, or correct the URL"
                raise ValueError(f"{url}: {what}") from error
        await asyncio.sleep(0.5 * attempt)
    raise RuntimeError("unreachable: the last try returns or raises")


def _names(body: bytes) -> list[str]:
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []
