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
from agentgym.policies.completions import Passing, as_sent, read_completion, read_stream

if TYPE_CHECKING:
    import aiohttp

RETRIED_STATUS = frozenset({408, 409, 429})
_TOO_LONG = ("context_length_exceeded", "maximum context length")
_PATH = "/chat/completions"
_PATIENCE = 10  # times the retries, with an endpoint that is only busy
_SECRETS = frozenset({"key", "api_key", "api-key", "apikey", "token", "access_token"})


class ChatPolicy:
    """A model behind an OpenAI-compatible endpoint. One object may serve many episodes at a time.

    Statuses 408, 409, 429 and 5xx, broken connections, cut or malformed answers and silence are retried after a growing wait, or
    after what `Retry-After` asks for. All policies of an endpoint hold back the share of requests that it refuses with a 429; see
    `ConcurrencyLimiter`. As long as the endpoint answers others, a 429 uses up no retry, up to ten times as many requests.

    Args:
        base_url: up to and with the version, "http://localhost:8000/v1".
        api_key: sent as a bearer token; in no error and no record. None: OPENAI_API_KEY, if set. "": none.
        temperature, max_tokens, seed: of one answer; None leaves them to the endpoint.
        extra: more fields of the request.
        system: a system message for every request; stands before the environment's own, in the same message.
        send_reasoning: send the model's reasoning of earlier turns back; most endpoints ignore it, some refuse or need it.
        stream: read the answer as it is made; `timeout` then is the longest silence between two pieces of it.
        timeout: seconds for one request, from connecting to the last byte.
        retries: requests after the first, for each answer.
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
        # Stripped: a file's last newline is easily read with it.
        self._key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        if not (self._key.isascii() and (self._key.isprintable() or not self._key)):
            raise ValueError("the API key (OPENAI_API_KEY) has characters that no HTTP header can carry")
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._send_reasoning = send_reasoning
        self._system = system
        self._timeout = timeout
        self._retries = retries

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The model's answer. Raises EndEpisode("context") if it cannot read the whole conversation, EndpointError on failure."""
        sent = as_sent(list(messages), self._send_reasoning)
        if self._system is not None:
            own = sent.pop(0) if sent and sent[0].get("role") == "system" else None
            sent.insert(0, system(f"{self._system}\n\n{text_of(own)}" if own else self._system))
        body = {**self._fields, "messages": sent, **({"tools": list(tools)} if tools else {})}
        limiter, loop = endpoints.limiter_of(self.url), asyncio.get_running_loop()
        tries, counted, cause = 0, 0, ""
        answers = limiter.answers
        while True:
            self.calls.waited += await limiter.enter(again=tries > 0)
            if cause:
                self.calls.retries[cause] = self.calls.retries.get(cause, 0) + 1
            tries += 1
            started = loop.time()
            try:
                reply = await self._ask(body)
                limiter.answered()
                break
            except Passing as failure:
                cause = failure.cause
                # An endpoint that has too much to do, but answers others meanwhile, will come to this one.
                counted += not (failure.busy and limiter.answers > answers)
                answers = limiter.answers
                wait = self._wait_after(failure, tries, counted)
                if failure.busy:
                    limiter.refused(started, wait)
            finally:
                limiter.leave()
            started = loop.time()
            await asyncio.sleep(wait)
            self.calls.waited += loop.time() - started
        for name, count in reply.usage.items():
            self.calls.usage[name] = self.calls.usage.get(name, 0) + count
        return reply

    def _wait_after(self, failure: Passing, tries: int, counted: int) -> float:
        if counted > self._retries or tries > _PATIENCE * self._retries:
            raise EndpointError(f"{self.url}: {failure} ({tries} {'try' if tries == 1 else 'tries'})") from failure
        if failure.wait is not None and failure.wait > self._timeout:
            raise EndpointError(f"{self.url}: {failure}; it asks to wait {failure.wait:.0f} s") from failure
        return endpoints.backoff(max(counted, 1)) if failure.wait is None else failure.wait

    async def _ask(self, body: dict[str, Any]) -> Reply:
        import aiohttp

        session = await endpoints.session()
        streams = bool(body.get("stream"))
        # One timer a request is enough where the whole answer has a limit.
        limit = aiohttp.ClientTimeout(total=self._timeout)
        if streams:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        self.calls.requests += 1
        try:
            sent: dict[str, Any] = {"json": body, "headers": self._headers, "timeout": limit, "allow_redirects": False}
            async with session.post(self.url, **sent) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await read_stream(response.content.iter_any())
                content = await response.read()
                self._check_status(response, content)
                return read_completion(content)
        except Passing as error:
            raise Passing(self._told(str(error)), error.cause, error.wait) from error
        except TimeoutError as error:
            silence = "silent for" if streams else "no answer within"
            raise Passing(f"{silence} {self._timeout:g} s", "timeout") from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise EndpointError(f"{self.url}: {error!r}") from error
        except aiohttp.ClientPayloadError as error:
            raise Passing(f"the answer was cut: {error}", "cut") from error
        except aiohttp.ClientResponseError as error:  # no HTTP
            raise Passing(f"{type(error).__name__}: {self._told(str(error))[:200]}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Passing(f"{type(error).__name__}: {error}", "connection") from error

    def _check_status(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        status = response.status
        if status == 200:
            return
        text = self._told(content[:2000].decode(errors="replace"))
        if status in RETRIED_STATUS or status >= 500:
            wait = endpoints.retry_after(response.headers.get("Retry-After"))
            raise Passing(f"answered {status}: {text[:500]}", str(status), wait)
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


def url_of(base_url: str) -> str:
    """The URL of chat completions for a base URL. Raises ValueError if that is not http(s) with a host, or has a secret in it."""
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
