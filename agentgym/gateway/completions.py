"""OpenAI's completions: a prompt, text or token ids, is continued. Answers are those of chat completions with their text alone."""

from __future__ import annotations

from typing import Any

from agentgym.gateway.calls import TEXT, ModelCall, Refused
from agentgym.gateway.chat import events as chat_events
from agentgym.gateway.chat import whole as chat_whole
from agentgym.gateway.episodes import Episode, Exchange
from agentgym.gateway.forms import MOST_ANSWERS, Body, Events, call_of

_DEFAULT_TOKENS = 16


def read(body: Body, episode: Episode) -> list[ModelCall]:
    given, full = body.get("prompt"), {"max_tokens": _DEFAULT_TOKENS, **body}
    prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(isinstance(id, int) and 0 <= id < 1 << 31 for id in prompt)
        if not (ids or isinstance(prompt, str)):
            raise Refused(400, "prompt is a text, a list of token ids, or a list of these")
    return [call_of(full, ("prompt",), [], MOST_ANSWERS, prompt=prompt) for prompt in prompts]


def whole(body: Body, exchange: Exchange) -> dict[str, Any]:
    return _text_alone(chat_whole(body, exchange))


def events(body: Body, exchange: Exchange, step: str, answer: int, block: int, *data: Any) -> Events:
    if (step == "delta" and data[0] == TEXT) or step in ("failed", "end"):
        for name, value in chat_events(body, exchange, step, answer, block, *data):
            yield name, _text_alone(value) if "choices" in value else value


def _text_alone(made: dict[str, Any]) -> dict[str, Any]:
    choices = []
    for choice in made["choices"]:
        said = choice.pop("message" if "message" in choice else "delta")
        choices.append({"logprobs": None, **choice, "text": said.get("content") or ""})
    return {**made, "id": made["id"].removeprefix("chat"), "object": "text_completion", "choices": choices}
