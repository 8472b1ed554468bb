"""Policies: what answers the messages of an environment."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentgym.messages import Action, Message, assistant
from agentgym.trajectory import Tokens

if TYPE_CHECKING:
    import aiohttp

    from agentgym.core import Env

    Caller = Callable[..., Awaitable[Any]]

RETRIED_STATUS = frozenset({408, 409, 429})
_KEPT_FIELDS = ("tool_calls", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class Reply:
    """One answer: the assistant message, the exact tokens where the policy knows them, and what the endpoint counted.

    Attributes:
        usage: tokens by the endpoint's count: prompt_tokens, completion_tokens, and cached_tokens and reasoning_tokens, which
            are parts of the two, where it tells them.
    """

    message: Message
    tokens: Tokens | None = None
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class Calls:
    """What an episode asked of an endpoint, over all its tries, those of turns that failed included.

    Attributes:
        requests: HTTP requests that were sent.
        retries: requests that were sent again, by cause: an HTTP status ("429"), "timeout", "connection", "cut" (a body
            that ended early), "garbage" (no chat completion).
        usage: tokens, summed over all answers; see `Reply.usage`.
        waited: seconds between tries.
    """

    requests: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0


@runtime_checkable
class Policy(Protocol):
    """What answers an environment. One object serves one episode at a time."""

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Answer the whole conversation so far, given the env's tool schemas.

        Raises:
            EndEpisode: there is no way to go on, through nobody's fault.
        """
        ...


class EndEpisode(Exception):
    """A policy cannot go on, through nobody's fault: the loop truncates the episode with this reason ("context")."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class EndpointError(RuntimeError):
    """A chat endpoint refused a request, or kept failing. The message carries the server's own words."""


class ScriptedPolicy:
    """Answers from a script: a list of texts or messages in turn, or a function of the conversation.

    A list that runs out ends the episode with "script".
    """

    def __init__(self, script: Sequence[Action] | Callable[[Sequence[Message]], Action]):
        self._answer = script if callable(script) else None
        self._script = iter(()) if callable(script) else iter(script)

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The script's next answer."""
        if self._answer is not None:
            return Reply(assistant(self._answer(messages)))
        for action in self._script:
            return Reply(assistant(action))
        raise EndEpisode("script")


class ExpertPolicy:
    """Plays an environment's own expert, with a share of random actions.

    Args:
        env: has `expert_action()`, and `random_action(rng)` if there are mistakes. None: the one that `run_episode` runs.
        mistakes: the chance, 0 to 1, that an action is random instead.
        rng: what decides, and what random actions draw from.

    Raises:
        ValueError: `mistakes` is no chance.
        TypeError: the environment has no expert.
    """

    def __init__(self, env: Env | None = None, mistakes: float = 0.0, rng: random.Random | None = None):
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes is a chance from 0 to 1, not {mistakes!r}")
        self._mistakes = mistakes
        self._rng = rng or random.Random(0)
        self._expert = self._random = _nowhere
        self._call: Caller = _call_here
        if env is not None:
            self.attach(env, _call_here)

    def attach(self, env: Env, call: Caller) -> None:
        """Play in this environment; `call` runs its methods where they may run."""
        self._expert = _method(env, "expert_action")
        self._random = _method(env, "random_action") if self._mistakes else _nowhere
        self._call = call

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The expert's action in the environment's present state, or a random one."""
        if self._mistakes and self._rng.random() < self._mistakes:
            return Reply(assistant(await self._call(self._random, self._rng)))
        return Reply(assistant(await self._call(self._expert)))


class RandomPolicy:
    """Plays random legal actions of an environment that has `random_action(rng)`; arguments as in `ExpertPolicy`.

    Raises:
        TypeError: it has not.
    """

    def __init__(self, env: Env | None = None, rng: random.Random | None = None):
        self._rng = rng or random.Random(0)
        self._random = _nowhere
        self._call: Caller = _call_here
        if env is not None:
            self.attach(env, _call_here)

    def attach(self, env: Env, call: Caller) -> None:
        """Play in this environment; `call` runs its methods where they may run."""
        self._random = _method(env, "random_action")
        self._call = call

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """A random legal action in the environment's present state."""
        return Reply(assistant(await self._call(self._random, self._rng)))


async def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _nowhere(*args: Any) -> Action:
    raise RuntimeError("this policy plays in no environment yet: pass env=, or run it by run_episode")


def _method(env: Env, name: str) -> Callable[..., Action]:
    method = getattr(env.unwrapped, name, None)
    if method is None:
        raise TypeError(
            f"{type(env.unwrapped).__name__} has no {name}(): this policy needs an environment that defines it"
        )
    return method


class ChatPolicy:
    """A model behind an OpenAI-compatible endpoint. One object may serve many episodes at a time.

    Connections are shared by all policies of an event loop and closed with it. Statuses 408, 409, 429 and 5xx, refused or
    broken connections, cut bodies and silence are retried after a growing wait, or after what `Retry-After` asks for.

    Args:
        model: the model's name at the endpoint.
        base_url: up to and with the version, "http://localhost:8000/v1".
        api_key: sent as a bearer token. None: the environment variable OPENAI_API_KEY, if set. "": none.
        temperature: None leaves it to the endpoint, as for all sampling settings.
        max_tokens: of one answer.
        seed: of sampling.
        extra: more fields of the request.
        timeout: seconds for one request, from connecting to the last byte.
        retries: requests after the first.

    Raises:
        ValueError: `base_url` is no http(s) URL.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        retries: int = 5,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        settings = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.model = model
        self.url = base_url.rstrip("/") + "/chat/completions"
        self._fields = {"model": model, **{k: v for k, v in settings.items() if v is not None}, **(extra or {})}
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout
        self._retries = retries

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The model's answer.

        Raises:
            EndEpisode: "context": the conversation is longer than the model can read.
            EndpointError: the endpoint refused the request, or failed on every try.
        """
        body = {**self._fields, "messages": list(messages), **({"tools": list(tools)} if tools else {})}
        for attempt in range(self._retries + 1):
            try:
                return _reply_of(await self._post(body))
            except _Transient as failure:
                if attempt == self._retries:
                    message = f"{self.url}: {failure} ({attempt + 1} tries)"
                    raise EndpointError(message) from failure
                if failure.wait is not None and failure.wait > self._timeout:
                    raise EndpointError(f"{self.url}: {failure}; it asks to wait {failure.wait:.0f} s") from failure
                backoff = min(0.5 * 2**attempt, 30.0) * random.uniform(0.5, 1.0)
                await asyncio.sleep(backoff if failure.wait is None else failure.wait)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _post(self, body: dict[str, Any]) -> str:
        import aiohttp

        session = await _session()
        limit = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with session.post(self.url, json=body, headers=self._headers, timeout=limit) as response:
                text = await response.text()
                status, wait = response.status, _retry_after(response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise _Transient(f"no answer within {self._timeout:g} s") from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointError(f"{self.url}: {error!r}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if status in RETRIED_STATUS or status >= 500:
            raise _Transient(f"answered {status}: {text[:500]}", wait)
        if status == 400 and any(sign in text for sign in _TOO_LONG):
            raise EndEpisode("context")
        if status != 200:
            raise EndpointError(f"{self.url}: answered {status}: {text[:500]}")
        return text


_TOO_LONG = ("context_length_exceeded", "maximum context length")
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, Any]]
_sessions = weakref.WeakKeyDictionary()


class _Transient(Exception):
    """A failure worth another try, after `wait` seconds if the server said so."""

    def __init__(self, what: str, wait: float | None = None):
        super().__init__(what)
        self.wait = wait


async def _session() -> aiohttp.ClientSession:
    """This event loop's session. It lives in an async generator, which the loop closes when it shuts down."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        life = _session_life()
        _sessions[loop] = (await anext(life), life)
    return _sessions[loop][0]


async def _session_life() -> AsyncGenerator[aiohttp.ClientSession, None]:
    import aiohttp

    # The loop that runs the episodes bounds how many requests are open, so the pool does not.
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    try:
        yield session
    finally:
        await session.close()


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _reply_of(text: str) -> Reply:
    try:
        record = json.loads(text)
        given = record["choices"][0]["message"]
        message = {"role": "assistant", "content": given.get("content")}
        message |= {name: given[name] for name in _KEPT_FIELDS if given.get(name)}
        usage = {k: v for k, v in (record.get("usage") or {}).items() if isinstance(v, int)}
        return Reply(assistant(message), usage=usage)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Transient(f"no chat completion ({error!r}): {text[:200]!r}") from error
