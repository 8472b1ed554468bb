"""A policy that calls a model behind an OpenAI-compatible chat endpoint, with retries and token counts. It reads chat
completions, one JSON object or a stream of server-sent events, into a `Reply`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from agentgym.core.messages import Message, assistant, system, text_of
from agentgym.policies import endpoints
from agentgym.policies.base import EndEpisode, EndpointError, EndpointUsage, Reply

if TYPE_CHECKING:
    import aiohttp

RETRIED_STATUS = frozenset({408, 409, 429})
_TOO_LONG = ("context_length_exceeded", "maximum context length")
_PATH = "/chat/completions"
_PATIENCE = 10  # times the retries, with an endpoint that is only busy
REASONING = ("reasoning_content", "reasoning")
_LENGTH, _NEWER_LENGTH = "max_tokens", "max_completion_tokens"
_USE_NEWER = f"Use '{_NEWER_LENGTH}'".encode()  # in the words of OpenAI's reasoning models
_SECRETS = frozenset({"key", "api_key", "api-key", "apikey", "token", "access_token"})


class ChatPolicy:
    """A model behind an OpenAI-compatible endpoint. One object may serve many episodes at a time.

    Statuses 408, 409, 429 and 5xx, broken connections, cut or malformed answers and silence are retried after a growing wait, or
    after the time in `Retry-After`. All policies of an endpoint reduce their requests when it refuses many with a 429; see
    `ConcurrencyLimiter`. As long as the endpoint answers others, a 429 uses up no retry, up to ten times as many requests.

    Args:
        base_url: up to and with the version, "http://localhost:8000/v1".
        api_key: sent as a bearer token; in no error and no record. None: OPENAI_API_KEY, if set. "": none.
        temperature, max_tokens: of one answer; None leaves them to the endpoint. Models of OpenAI that know
            `max_completion_tokens` alone get that.
        seed: of a conversation's first answer; answer i has `seed + i`, or all turns would be sampled with the same draws.
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
        if not timeout > 0 or retries < 0:
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
        self.fields = {"model": model, **streaming, **given, **(extra or {})}
        self._seed = None if "seed" in (extra or {}) else seed
        # Stripped: a file's last newline is easily read with it.
        self._key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        if not (self._key.isascii() and (self._key.isprintable() or not self._key)):
            raise ValueError("the API key (OPENAI_API_KEY) has characters that no HTTP header can carry")
        self.headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._send_reasoning = send_reasoning
        self._system = system
        self._timeout = timeout
        self._retries = retries
        self._newer_length = False  # the endpoint knows the answer's limit by its newer name alone

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The model's answer. Raises EndEpisode("context") if it cannot read the whole conversation, EndpointError on failure."""
        sent = as_sent(list(messages), self._send_reasoning)
        if self._system is not None:
            own = sent.pop(0) if sent and sent[0].get("role") == "system" else None
            sent.insert(0, system(f"{self._system}\n\n{text_of(own)}" if own else self._system))
        body = {**self.fields, "messages": sent, **({"tools": list(tools)} if tools else {})}
        if self._seed is not None:
            body["seed"] = self._seed + sum(message.get("role") == "assistant" for message in sent)
        return reply_of(await self.complete(body))

    async def complete(
        self, body: dict[str, Any], told: Callable[[str, str], None] | None = None, path: str = _PATH
    ) -> dict[str, Any]:
        """The endpoint's answer to a request, as it writes those that are not streamed; of completions too. Raises as `act`.

        `told` gets "reasoning" or "text" and its next piece, of a stream; one that is cut after that is not tried again.
        """
        limiter, loop = endpoints.limiter_of(self.url), asyncio.get_running_loop()
        tries, counted, cause = 0, 0, ""
        heard: list[str] = []

        def tell(kind: str, text: str) -> None:
            heard.append(kind)
            if told is not None:
                told(kind, text)

        answers = limiter.answers
        while True:
            waited = await limiter.enter(again=tries > 0)  # `+= await` would lose what other episodes add meanwhile
            self.calls.waited += waited
            if cause:
                self.calls.retries[cause] = self.calls.retries.get(cause, 0) + 1
            tries += 1
            started = loop.time()
            try:
                record = await self._ask(body, tell, self.url.replace(_PATH, path))
                limiter.answered()
                break
            except Passing as failure:
                if heard and told is not None:
                    raise EndpointError(f"{self.url}: {failure}") from failure
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
        for name, count in token_counts(record.get("usage")).items():
            self.calls.usage[name] = self.calls.usage.get(name, 0) + count
        return record

    def _wait_after(self, failure: Passing, tries: int, counted: int) -> float:
        if counted > self._retries or tries > _PATIENCE * self._retries:
            raise EndpointError(f"{self.url}: {failure} ({tries} {'try' if tries == 1 else 'tries'})") from failure
        if failure.wait is not None and failure.wait > self._timeout:
            raise EndpointError(f"{self.url}: {failure}; it asks to wait {failure.wait:.0f} s") from failure
        return endpoints.backoff(max(counted, 1)) if failure.wait is None else failure.wait

    async def _ask(self, body: dict[str, Any], tell: Callable[[str, str], None], url: str) -> dict[str, Any]:
        import aiohttp

        session = await endpoints.session()
        streams = bool(body.get("stream"))
        if self._newer_length and _LENGTH in body:
            body = {_NEWER_LENGTH if name == _LENGTH else name: value for name, value in body.items()}
        # One timer a request is enough where the whole answer has a limit.
        limit = aiohttp.ClientTimeout(total=self._timeout)
        if streams:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        self.calls.requests += 1
        try:
            sent: dict[str, Any] = {"json": body, "headers": self.headers, "timeout": limit, "allow_redirects": False}
            async with session.post(url, **sent) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await read_stream(response.content.iter_any(), tell)
                content = await response.read()
                if response.status == 400 and _LENGTH in body and _USE_NEWER in content:
                    self._newer_length = True
                    return await self._ask(body, tell, url)
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


# ---- completions


class Passing(Exception):
    """A failure that is retried.

    Attributes:
        cause: "timeout", "connection", "cut" (a body or stream that ended early), "garbage" (not a chat completion), or the number
            of an endpoint's error.
        wait: seconds that the server asked for.
        busy: True if the server is overloaded.
    """

    def __init__(self, what: str, cause: str = "garbage", wait: float | None = None):
        super().__init__(what)
        self.cause, self.wait = cause, wait
        self.busy = cause == "429" or wait is not None


def read_completion(body: bytes) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(body)
        _raise_error_of(record)
        choice = record["choices"][0]
        if "text" in choice:  # of completions
            choice["message"] = {"role": "assistant", "content": choice["text"]}
        reply_of(record)
        return record
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        shown = body[:200].decode(errors="replace")
        raise Passing(f"no chat completion ({error!r}): {shown!r}") from error


def reply_of(record: Mapping[str, Any]) -> Reply:
    choice = record["choices"][0]
    return _reply(choice["message"], record.get("usage"), choice.get("finish_reason"))


async def read_stream(chunks: AsyncIterator[bytes], tell: Callable[[str, str], None]) -> dict[str, Any]:
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    record: dict[str, Any] = {"choices": [whole]}
    async for data in _events(chunks):
        if data.strip() == "[DONE]":
            break
        try:
            part = json.loads(data)
            _raise_error_of(part)
            record |= {name: part[name] for name in ("usage", "prompt_token_ids") if part.get(name)}
            for choice in part["choices"][:1]:  # the last chunk may have the usage alone
                delta = choice.get("delta") or {"content": choice.get("text")}
                _grow(message, calls, delta)
                _gather(whole, choice)
                thought = next(
                    (delta[name] for name in REASONING if delta.get(name)), None
                )  # some send it by both names
                for kind, text in (("reasoning", thought), ("text", delta.get("content"))):
                    if text:
                        tell(kind, text)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Passing(f"no chunk of a chat completion ({error!r}): {data[:200]!r}") from error
    else:
        if whole.get("finish_reason") is None:
            raise Passing("the stream ended before the answer did", "cut")
    if not whole:
        raise Passing("the stream has no answer in it")
    whole["message"] = {**message, "tool_calls": [calls[number] for number in sorted(calls)]}
    return record


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event: its `data:` lines, up to the empty line that ends it. One that was cut is left out."""
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode(errors="replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def _grow(message: Message, calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    """Add a chunk to a message and to its tool calls by their numbers."""
    for name in ("content", *REASONING):
        if delta.get(name) or delta.get(name) == "":
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or ():
        place = part.get("index")
        # Where calls are not numbered, one with a name begins and one without goes on.
        number = place if isinstance(place, int) else len(calls) - (0 if part["function"].get("name") else 1)
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(max(number, 0), empty)
        call["id"] = call["id"] or part.get("id") or ""
        call["type"] = part.get("type") or call["type"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _gather(whole: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Add a chunk's finish reason, and its tokens if vLLM was asked for them."""
    told = ("finish_reason", "stop_reason", "prompt_token_ids")
    whole |= {name: choice[name] for name in told if choice.get(name) is not None}
    whole.setdefault("token_ids", []).extend(choice.get("token_ids") or ())
    for name, values in (choice.get("logprobs") or {}).items():
        whole.setdefault("logprobs", {}).setdefault(name, []).extend(values or ())


def _raise_error_of(record: Any) -> None:
    """Raise the error in a body: routers answer 200 with the error of the endpoint behind them."""
    if isinstance(record, Mapping) and record.get("error") and not record.get("choices"):
        error = record["error"]
        code = error.get("code") if isinstance(error, Mapping) else None
        raise Passing(f"answered an error: {str(error)[:500]}", str(code) if isinstance(code, int) else "garbage")


def _reply(given: Mapping[str, Any], usage: Any, finish_reason: Any) -> Reply:
    message: Message = {"role": "assistant", "content": given.get("content")}
    if given.get("tool_calls"):
        message["tool_calls"] = [_checked_call(call) for call in given["tool_calls"]]
    message |= {name: given[name] for name in REASONING if given.get(name)}
    reason = finish_reason if isinstance(finish_reason, str) else None
    return Reply(assistant(message), usage=token_counts(usage), finish_reason=reason)


def _checked_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["name"], str):
        raise TypeError(f"the name of a tool call is {function['name']!r}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function = {**function, "arguments": json.dumps({} if arguments is None else arguments, ensure_ascii=False)}
    return {**call, "function": dict(function)}


def token_counts(given: Any) -> dict[str, int]:
    """An endpoint's token counts by the names of `Reply.usage`; missing ones are left out."""
    if not isinstance(given, Mapping):
        return {}
    details = {name: given.get(f"{name}_tokens_details") for name in ("prompt", "completion")}
    prompt, completion = (each if isinstance(each, Mapping) else {} for each in details.values())
    found = {
        "prompt_tokens": given.get("prompt_tokens"),
        "completion_tokens": given.get("completion_tokens"),
        "cached_tokens": prompt.get("cached_tokens", given.get("prompt_cache_hit_tokens")),
        "reasoning_tokens": completion.get("reasoning_tokens"),
    }
    found["total"] = given.get("total_tokens")
    counts = {name: n for name, n in found.items() if isinstance(n, int) and not isinstance(n, bool) and n >= 0}
    total = counts.pop("total", 0)
    if {
        "prompt_tokens",
        "completion_tokens",
    } <= counts.keys():  # to some, as xAI and Gemini, reasoning is no part of these
        counts["completion_tokens"] = max(counts["completion_tokens"], total - counts["prompt_tokens"])
    return counts


def as_sent(messages: list[Message], send_reasoning: bool) -> list[Message]:
    """Messages in the form that endpoints accept: without reasoning unless asked for, and without null tool calls."""
    found = []
    for message in messages:
        sent = message
        if message.get("role") == "assistant":
            sent = {name: value for name, value in message.items() if send_reasoning or name not in REASONING}
            if sent.get("content") is None and not sent.get("tool_calls"):
                sent["content"] = ""
        found.append(sent)
    return found
