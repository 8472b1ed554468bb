"""OpenAI's completions: a prompt, text or token ids, is continued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentgym.gateway import chat
from agentgym.gateway.calls import TEXT, ModelCall, Refused, settings_of

if TYPE_CHECKING:
    from agentgym.gateway.episodes import Episode, Exchange

PING, error = chat.PING, chat.error
_DEFAULT_TOKENS = 16


def read(body: Mapping[str, Any], episode: Episode) -> list[ModelCall]:
    settings = {"max_tokens": _DEFAULT_TOKENS, **settings_of(body, ("model", "prompt", "stream", "stream_options"))}
    return [ModelCall(str(body.get("model", "")), prompt=prompt, settings=settings) for prompt in _prompts(body)]


def _prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    given = body.get("prompt")
    prompts: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(isinstance(id, int) and 0 <= id < 1 << 31 for id in prompt)
        if not (ids or isinstance(prompt, str)):
            raise Refused(400, "prompt is a text, a list of token ids, or a list of these")
    return prompts


def whole(body: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    choices = [
        {
            "index": place,
            "text": each.message["content"],
            "finish_reason": each.finish_reason,
            "logprobs": None,
            **each.more,
        }
        for place, each in enumerate(exchange.answers)
    ]
    usage = chat.usage(exchange.answers, len(_prompts(body)))
    return {**chat.head(body, exchange, "text_completion"), "choices": choices, "usage": usage}


def events(
    body: Mapping[str, Any], exchange: Exchange, step: str, answer: int, block: int, *data: Any
) -> Iterator[tuple[str, Any]]:
    made = chat.head(body, exchange, "text_completion")

    def piece(place: int, text: str, reason: str | None, **more: Any) -> tuple[str, Any]:
        choice = {"index": place, "text": text, "finish_reason": reason, "logprobs": None, **more}
        return "", {**made, "choices": [choice]}

    if step == "delta" and data[0] == TEXT:
        yield piece(answer, data[1], None)
    elif step == "failed":
        yield "", error(data[0])
    elif step == "end":
        for place, each in enumerate(exchange.answers):
            yield piece(place, "", each.finish_reason, **each.more)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", {**made, "choices": [], "usage": chat.usage(exchange.answers, len(_prompts(body)))}
        yield "", "[DONE]"
