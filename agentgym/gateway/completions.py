"""OpenAI's completions: a prompt, text or token ids, is continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentgym.gateway.calls import TEXT, ModelCall, Refused
from agentgym.gateway.chat import error, head, usage
from agentgym.gateway.forms import DONE, PING, Body, Events, call_of

if TYPE_CHECKING:
    from agentgym.gateway.episodes import Episode, Exchange

ping = PING
_DEFAULT_TOKENS = 16


def read(body: Body, episode: Episode) -> list[ModelCall]:
    full = {"max_tokens": _DEFAULT_TOKENS, **body}
    return [call_of(full, ("prompt",), [], prompt=prompt) for prompt in _prompts(body)]


def _prompts(body: Body) -> list[Any]:
    given = body.get("prompt")
    prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(isinstance(id, int) and 0 <= id < 1 << 31 for id in prompt)
        if not (ids or isinstance(prompt, str)):
            raise Refused(400, "prompt is a text, a list of token ids, or a list of these")
    return prompts


def whole(body: Body, exchange: Exchange) -> dict[str, Any]:
    choices = []
    for place, answer in enumerate(exchange.answers):
        said = {"index": place, "text": answer.message["content"], "finish_reason": answer.finish_reason}
        choices.append({**said, "logprobs": None, **answer.more})
    used = usage(exchange.answers, len(_prompts(body)))
    return {**head(body, exchange, "text_completion"), "choices": choices, "usage": used}


def events(body: Body, exchange: Exchange, step: str, answer: int, block: int, *data: Any) -> Events:
    made = head(body, exchange, "text_completion")
    empty = {"text": "", "finish_reason": None, "logprobs": None}
    if step == "delta" and data[0] == TEXT:
        yield "", {**made, "choices": [{"index": answer, **empty, "text": data[1]}]}
    elif step == "failed":
        yield "", error(data[0])
    elif step == "end":
        for place, each in enumerate(exchange.answers):
            choice = {"index": place, **empty, "finish_reason": each.finish_reason, **each.more}
            yield "", {**made, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", {**made, "choices": [], "usage": usage(exchange.answers, len(_prompts(body)))}
        yield "", DONE
