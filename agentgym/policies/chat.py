"""A policy that asks a model behind an OpenAI-compatible chat endpoint, with retries and token counts."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from agentgym.core.messages import Message, system, text_of
from agentgym.policies import endpoints
from agentgym.policies.base import EndEpisode, EndpointError, EndpointUsage, Reply
from agentgym.policies.completions import NoCompletion, as_sent, read_completion, read_stream

if TYPE_CHECKING:
    import aiohttp

RETRIED_STATUS = frozenset({408, 409, 429})
_TOO_LONG = ("context_length_exceeded", "maximum context length")
_PATH = "/chat/completions"
_PATIENCE = 10  # times the retries, with an endpoint that is only busy
_SECRETS = frozenset({"key", "api_key", "api-key", "apikey", "token", "access_token"})


class ChatPolicy:
    """A model behind an OpenAI-compatible endpoint. One object may serve many episodes at a time.

    Connections are shared by all policies of an event loop and closed with it. Statuses 408, 409, 429 and 5xx, refused or
    broken connections, cut bodies, nonsense and silence are retried after a growing wait, or after what `Retry-After` asks
    for. All policies of an endpoint hold back the share of requests that it refuses with a 429; see `ConcurrencyLimiter`.
    As long as the endpoint answers others meanwhile, a 429 uses up no retry, up to ten times as many requests.

    Args:
        model: the model's name at the endpoint.
        base_url: up to and with the version, "http://localhost:8000/v1".
        api_key: sent as a bearer token. None: the environment variable OPENAI_API_KEY, if set. "": none. It is sent and
            nothing else: no error and no record has it.
        temperature: None leaves it to the endpoint, as for all sampling settings.
        max_tokens: of one answer.
        seed: of sampling.
        extra: more fields of the request.
        system: text of a system message that every request begins with. Where the environment has one of its own, this text
            stands before that in the same message, since many models take one only.
        send_reasoning: whether the endpoint gets its own reasoning of earlier turns back. Most ignore it, and some refuse
            it; some that reason between tool calls need it. It is in the reply's message in any case.
        stream: read the answer as it is made; `timeout` then is the longest silence between two pieces of it.
        timeout: seconds for one request, from connecting to the last byte.
        retries: requests after the first, for each answer.

    Attributes:
        calls: what all answers together took.

    Raises:
        ValueError: `base_url` is no http(s) URL, or has a secret in it; the key can be in no header; a setting is below its least.
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
        system: str | None = None,
        send_reasoning: bool = False,
        stream: bool = False,
        timeout: float = 120.0,
        retries: int = 5,
    ):
        if timeout <= 0 or retries < 0:
            raise ValueError(f"timeout must be positive and retries at least 0, not {timeout} and {retries}")
        for name, value, least in (("temperature", temperature, 0), ("max_tokens", max_tokens, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        settings = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.model = model
        self.url = url_of(base_url)
        self.calls = EndpointUsage()
        given = {k: v for k, v in settings.items() if v is not None}
        self._fields = {"model": model, **streaming, **given, **(extra or {})}
        self._key = _key(os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key)
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._send_reasoning = send_reasoning
        self._system = system
        self._timeout = timeout
        self._retries = retries

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The model's answer.

        Raises:
            EndEpisode: "context": the conversation is longer than the model can read.
            EndpointError: the endpoint refused the request, or failed on every try.
        """
        sent = as_sent(list(messages), self._send_reasoning)
        if self._system is not None:
            sent = _begun_by(self._system, sent)
        body = {**self._fields, "messages": sent, **({"tools": list(tools)} if tools else {})}
        gate = endpoints.gate_of(self.url)
        tries, counted, cause = 0, 0, ""
        answers = gate.answers
        while True:
            self.calls.waited += await gate.enter(again=tries > 0)
            if cause:
                self.calls.retries[cause] = self.calls.retries.get(cause, 0) + 1
            tries += 1
            started = asyncio.get_running_loop().time()
            try:
                reply = await self._ask(body)
                gate.answered()
                break
            except _Passing as failure:
                cause, busy = failure.cause, failure.busy
                # An endpoint that has too much to do, but answers others meanwhile, will come to this one.
                counted += not (busy and gate.answers > answers)
                answers = gate.answers
                wait = self._wait_after(failure, tries, counted)
                if busy:
                    gate.refused(started, wait)
            finally:
                gate.leave()
            await self._sleep(wait)
        for name, count in reply.usage.items():
            self.calls.usage[name] = self.calls.usage.get(name, 0) + count
        return reply

    def _wait_after(self, failure: _Passing, tries: int, counted: int) -> float:
        """Seconds until the next try.

        Args:
            tries: requests so far.
            counted: those of them that count as retries.

        Raises:
            EndpointError: there is none.
        """
        if counted > self._retries or tries > _PATIENCE * self._retries:
            raise EndpointError(f"{self.url}: {failure} ({tries} {'try' if tries == 1 else 'tries'})") from failure
        if failure.wait is not None and failure.wait > self._timeout:
            raise EndpointError(f"{self.url}: {failure}; it asks to wait {failure.wait:.0f} s") from failure
        return endpoints.backoff(max(counted, 1)) if failure.wait is None else failure.wait

    async def _sleep(self, seconds: float) -> None:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        self.calls.waited += asyncio.get_running_loop().time() - started

    async def _ask(self, body: dict[str, Any]) -> Reply:
        """One request.

        Raises:
            _Passing: a failure worth another try.
        """
        import aiohttp

        session = await endpoints.session()
        streams = bool(body.get("stream"))
        # One timer a request is enough where the whole answer has a limit.
        within = {"sock_connect": self._timeout, "sock_read": self._timeout} if streams else {"total": self._timeout}
        limit = aiohttp.ClientTimeout(**{"total": None, **within})
        self.calls.requests += 1
        try:
            async with session.post(
                self.url, json=body, headers=self._headers, timeout=limit, allow_redirects=False
            ) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await read_stream(response.content.iter_any())
                content = await response.read()
                self._check_status(response, content)
                return read_completion(content)
        except NoCompletion as error:
            raise _Passing(self._told(str(error)), error.cause, busy=error.cause == "429") from error
        except TimeoutError as error:
            silence = "silent for" if streams else "no answer within"
            raise _Passing(f"{silence} {self._timeout:g} s", "timeout") from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointError(f"{self.url}: {error!r}") from error
        except aiohttp.ClientPayloadError as error:
            raise _Passing(f"the answer was cut: {error}", "cut") from error
        except aiohttp.ClientResponseError as error:  # no HTTP
            raise _Passing(f"{type(error).__name__}: {self._told(str(error))[:200]}", "garbage") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Passing(f"{type(error).__name__}: {error}", "connection") from error

    def _check_status(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        status = response.status
        if status == 200:
            return
        text = self._told(content[:2000].decode(errors="replace"))
        if status in RETRIED_STATUS or status >= 500:
            wait = endpoints.retry_after(response.headers.get("Retry-After"))
            busy = status == 429 or wait is not None
            raise _Passing(f"answered {status}: {text[:500]}", str(status), wait, busy)
        if status == 400 and any(sign in text for sign in _TOO_LONG):
            raise EndEpisode("context")
        hint = ""
        if 300 <= status < 400:
            hint = f" (it has moved to {response.headers.get('Location', 'an unknown place')})"
        elif status == 404 and not re.search(r"/v\d", self.url):
            hint = " (a base_url usually ends in /v1)"
        elif status == 401 and not self._key:
            hint = " (no key was sent: OPENAI_API_KEY is not set)"
        raise EndpointError(f"{self.url}: answered {status}: {text[:500]}{hint}", status)

    def _told(self, text: str) -> str:
        """The server's error text without the key, which some servers repeat."""
        return text.replace(self._key, "[the key]") if self._key else text


class _Passing(Exception):
    """A failure that is retried.

    Attributes:
        cause: as `EndpointUsage.retries` counts it.
        wait: seconds, if the server said so.
        busy: whether the endpoint has too much to do, which all its policies should know.
    """

    def __init__(self, what: str, cause: str, wait: float | None = None, busy: bool = False):
        super().__init__(what)
        self.cause, self.wait, self.busy = cause, wait, busy


def _begun_by(text: str, messages: list[Message]) -> list[Message]:
    first = messages[0] if messages and messages[0].get("role") == "system" else None
    own = f"\n\n{text_of(first)}" if first else ""
    return [system(f"{text}{own}"), *(messages[1:] if first else messages)]


def url_of(base_url: str) -> str:
    """The URL of chat completions for a base URL, with or without its last part.

    Raises:
        ValueError: no http(s) URL with a host, or one with a secret in it.
    """
    if not base_url.startswith(("http://", "https://")):
        meant = f": did you mean http://{base_url}?" if re.match(r"[\w.-]+(:\d+)?(/|$)", base_url) else ""
        raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}{meant}")
    try:
        parts = urlsplit(base_url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, no IPv6 address
        has_host = False
    if not has_host:
        raise ValueError(f"base_url has no host and port that can be: {base_url!r}")
    if parts.username or parts.password or _SECRETS & {name.lower() for name in parse_qs(parts.query)}:
        raise ValueError(f"base_url of {parts.hostname} has a password or key in it: put the key in OPENAI_API_KEY")
    path = parts.path.rstrip("/").removesuffix(_PATH) + _PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _key(given: str) -> str:
    key = given.strip()  # a file's last newline is easily read with it
    if not (key.isascii() and (key.isprintable() or not key)):
        raise ValueError("the API key (OPENAI_API_KEY) has characters that no HTTP header can carry")
    return key
