"""Models behind other endpoints: the backend of an evaluation, and those that requests are passed on to."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from agentgym.core.messages import assistant
from agentgym.core.trajectory import Tokens
from agentgym.gateway.calls import ModelAnswer, ModelCall, Refused, Told
from agentgym.policies import endpoints
from agentgym.policies.base import EndEpisode, EndpointError
from agentgym.policies.chat import ChatPolicy, as_sent, reply_of, url_of

UNTOLD = -1  # the weight version of tokens from an endpoint that does not tell it
_CHAT, _COMPLETIONS = "/chat/completions", "/completions"
_TOO_LONG = "the prompt is too long: it exceeds the model's maximum context length"  # in the words of both makers
_START_SECONDS = 30.0
# An answer may take as long as it likes while it sends.
_PASSED_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=600.0)


class Upstream:
    """A model behind an OpenAI-compatible endpoint, asked as by `ChatPolicy`. vLLM's tells the exact tokens. `start` it first.

    `defaults` are settings of calls that do not have their own.
    """

    honours: Collection[str] | None = None  # all

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        defaults: Mapping[str, Any] | None = None,
    ):
        self._policy = ChatPolicy(model or "", base_url, api_key, timeout=timeout, retries=retries)
        self._defaults = dict(defaults or {})
        self._asked = model
        self.models: Sequence[str] = ()
        self.exact = False

    async def start(self) -> None:
        """Ask which models it serves. EndpointError: it does not answer, or does not serve this model."""
        url = self._policy.url.replace(_CHAT, "/models")
        try:
            listed = await self._ask("GET", url)
            cards = {str(card["id"]): card for card in listed["data"]}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            raise EndpointError(f"{url}: no list of models: {str(error) or repr(error)}") from error
        name = self._asked or next(iter(cards), "")
        if name not in cards:
            there = f"there are {', '.join(cards)}" if cards else "there is none"
            raise EndpointError(f"{self._policy.url.replace(_CHAT, '')} serves no model {name!r}; {there}")
        self.models, self.exact = [name], cards[name].get("owned_by") == "vllm"

    async def answer(self, call: ModelCall, episode: str, told: Told) -> ModelAnswer:
        chats = call.prompt is None
        asked: dict[str, Any] = {"prompt": call.prompt}
        if chats:
            asked = {"messages": as_sent(call.messages, self.exact), **({"tools": call.tools} if call.tools else {})}
        body = {"model": self.models[0], **self._defaults, **call.used, **asked}
        if self.exact:
            body |= {"logprobs": True if chats else call.used.get("logprobs") or 0, "return_token_ids": True}
        if call.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            path = _CHAT if chats else _COMPLETIONS
            record = await self._policy.complete(body, told if call.streams else None, path)
        except EndEpisode as full:
            raise Refused(400, _TOO_LONG, "context_length_exceeded") from full
        except EndpointError as error:
            status = 400 if error.status in (400, 404, 413, 415, 422) else 502
            why = str(error).replace(self._policy.url, "the engine")
            raise Refused(status, why, "engine", error.status) from error
        reply, choice = reply_of(record), record["choices"][0]
        message = {**assistant(""), **{name: value for name, value in reply.message.items() if value}}
        if message.get("tool_calls"):  # some servers leave out the ids
            message["tool_calls"] = [
                {**each, "id": each.get("id") or f"call_{secrets.token_hex(12)}"} for each in message["tool_calls"]
            ]
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
        stop = choice.get("stop_reason")
        wanted = call.used.get("logprobs")  # 0 asks for them, too
        more = {} if wanted is None or wanted is False else {"logprobs": choice.get("logprobs")}
        reason = reply.finish_reason or "stop"
        stopped = stop if isinstance(stop, str) else None  # else the id of a token
        return ModelAnswer(message, _tokens(record, reason), reply.usage, reason, stopped, more)

    async def count(self, call: ModelCall) -> int:
        if not self.exact:
            raise Refused(400, "the engine does not count tokens")
        body = {"model": self.models[0], "messages": as_sent(call.messages, True), "tools": call.tools or None}
        url = self._policy.url.replace(f"/v1{_CHAT}", _CHAT).replace(_CHAT, "/tokenize")
        try:
            counted = await self._ask("POST", url, json=body)
            return int(counted["count"])
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise Refused(502, f"the engine does not count: {type(error).__name__}", "engine") from error

    async def _ask(self, method: str, url: str, **more: Any) -> Any:
        session, limit = await endpoints.session(), aiohttp.ClientTimeout(total=_START_SECONDS)
        async with session.request(method, url, headers=self._policy.headers, timeout=limit, **more) as response:
            response.raise_for_status()
            return await response.json()


def _tokens(record: dict[str, Any], reason: str) -> Tokens | None:
    choice = record["choices"][0]
    prompt = record.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids, told = choice.get("token_ids"), choice.get("logprobs") or {}
    logprobs = told.get("token_logprobs") or [each["logprob"] for each in told.get("content") or ()]
    if not prompt or not ids or len(logprobs) != len(ids):
        return None
    return Tokens(prompt, ids, logprobs, [UNTOLD] * len(ids), reason)


class Passed:
    """Another endpoint: requests and answers are passed on unchanged."""

    @classmethod
    def named(cls, text: str) -> tuple[str, Passed]:
        """The model's name and its endpoint of `NAME=URL`, or `NAME=URL,VARIABLE` of the API key. Raises ValueError."""
        name, _, place = text.partition("=")
        url, _, variable = place.partition(",")
        if variable and variable not in os.environ:
            raise ValueError(f"{text}: the variable {variable} is not set")
        return name, cls(url, os.environ.get(variable, ""))

    def __init__(self, base_url: str, api_key: str = ""):
        self._url = url_of(base_url).replace(f"/v1{_CHAT}", _CHAT)
        self._key = api_key

    async def forward(self, request: web.BaseRequest, path: str, raw: bytes) -> tuple[int, web.StreamResponse]:
        """Send the answer on; returns its status and the answer. One that breaks off is cut for the client, too."""
        names = ("Content-Type", "anthropic-version", "anthropic-beta")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        headers |= {"Authorization": f"Bearer {self._key}", "x-api-key": self._key} if self._key else {}
        url, session, response = self._url.replace(_CHAT, path), await endpoints.session(), None
        try:
            async with session.post(url, data=raw, headers=headers, timeout=_PASSED_LIMIT) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return answer.status, response
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is not None and response.prepared:
                if request.transport is not None:
                    request.transport.abort()
                return response.status, response
            why = f"the endpoint of this model does not answer: {type(error).__name__}"
            raise Refused(502, why, "engine") from error
