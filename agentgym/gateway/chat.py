"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentgym.gateway.calls import REASONING, ModelAnswer, ModelCall, Refused, plain_message, settings_of
from agentgym.gateway.streams import DONE

if TYPE_CHECKING:
    from agentgym.gateway.episodes import Episode, Exchange

PING = b": ping\n\n"
_APART = ("model", "messages", "tools", "stream", "stream_options")
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_DETAILS = (("prompt", "cached_tokens"), ("completion", "reasoning_tokens"))


def read(body: Mapping[str, Any], episode: Episode) -> list[ModelCall]:
    if "functions" in body or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused(400, "messages is a list of at least one message, and functions are given as tools")
    messages = [plain_message(each, f"messages[{place}]") for place, each in enumerate(body["messages"])]
    tools = body.get("tools") or []
    if any(not isinstance(tool["function"]["name"], str) for tool in tools):
        raise Refused(400, "tools is a list of functions")
    return [ModelCall(str(body.get("model", "")), messages, tools=tools, settings=settings_of(body, _APART))]


def whole(body: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    choices = []
    for place, answer in enumerate(exchange.answers):
        content = answer.message["content"] or (None if answer.message.get("tool_calls") else "")
        message = {**answer.message, "content": content}
        choices.append({"index": place, "message": message, "finish_reason": answer.finish_reason, **answer.more})
    return {**head(body, exchange, "chat.completion"), "choices": choices, "usage": usage(exchange.answers)}


def head(body: Mapping[str, Any], exchange: Exchange, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{exchange.id}", "object": kind, "created": int(exchange.began), "model": body.get("model")}


def usage(answers: Sequence[ModelAnswer], prompts: int = 1) -> dict[str, Any]:
    """Token counts of the answers to so many prompts, which come in order."""
    prompt = sum(answer.usage.get("prompt_tokens", 0) for answer in answers[:: len(answers) // prompts])
    written = sum(answer.usage.get("completion_tokens", 0) for answer in answers)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    for part, name in _DETAILS:
        if any(name in answer.usage for answer in answers):
            counts[f"{part}_tokens_details"] = {name: sum(answer.usage.get(name, 0) for answer in answers)}
    return counts


def error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def events(
    body: Mapping[str, Any], exchange: Exchange, step: str, answer: int, block: int, *data: Any
) -> Iterator[tuple[str, Any]]:
    """Chunks: the first of each answer has its role, the last its finish reason."""
    chunk = head(body, exchange, "chat.completion.chunk")

    def piece(place: int, delta: dict[str, Any], reason: str | None = None) -> tuple[str, Any]:
        return "", {**chunk, "choices": [{"index": place, "delta": delta, "finish_reason": reason}]}

    if step == "begin":
        yield from (
            piece(place, {"role": "assistant", "content": ""}) for place in range(len(exchange.asked or exchange.calls))
        )
    elif step == "delta":
        yield piece(answer, {"reasoning_content" if data[0] == REASONING else "content": data[1]})
    elif step == "call":
        yield piece(answer, {"tool_calls": [{"index": data[0], **data[1]}]})
    elif step == "failed":
        yield "", error(data[0])
    elif step == "end":
        for place, each in enumerate(exchange.answers):
            last = piece(place, {}, each.finish_reason)
            last[1]["choices"][0] |= each.more
            yield last
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", {**chunk, "choices": [], "usage": usage(exchange.answers)}
        yield "", DONE
