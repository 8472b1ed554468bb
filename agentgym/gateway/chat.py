"""OpenAI's chat completions, and the parts that its other protocols share with them."""

from __future__ import annotations

from typing import Any

from agentgym.gateway.calls import REASONING, ModelCall, Refused
from agentgym.gateway.episodes import Episode, Exchange
from agentgym.gateway.forms import MOST_ANSWERS, Body, Events, call_of, plain_message

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_DETAILS = (("prompt", "cached_tokens"), ("completion", "reasoning_tokens"))


def read(body: Body, episode: Episode) -> list[ModelCall]:
    if not body.get("messages") or "functions" in body:
        raise Refused(400, "messages is a list of at least one message, and functions are given as tools")
    if any(tool.get("type") == "custom" for tool in body.get("tools") or ()):
        raise Refused(400, "tools of the type 'custom' are known to the Responses API alone here: give functions")
    messages = [plain_message(each, f"messages[{place}]") for place, each in enumerate(body["messages"])]
    return [call_of(body, ("messages",), messages, MOST_ANSWERS)]


def whole(body: Body, exchange: Exchange) -> dict[str, Any]:
    choices = []
    for place, answer in enumerate(exchange.answers):
        content = answer.message["content"] or (None if answer.message.get("tool_calls") else "")
        message = {**answer.message, "content": content}
        choices.append({"index": place, "message": message, "finish_reason": answer.finish_reason, **answer.more})
    return {**_head(body, exchange, "chat.completion"), "choices": choices, "usage": _usage(body, exchange)}


def _head(body: Body, exchange: Exchange, kind: str) -> dict[str, Any]:
    made = {"id": f"chatcmpl-{exchange.id}", "object": kind, "created": int(exchange.began)}
    return {**made, "model": body.get("model")}


def _usage(body: Body, exchange: Exchange) -> dict[str, Any]:
    """Token counts; a prompt counts once, whose `n` answers come in a row."""
    answers = exchange.answers
    prompt = sum(answer.usage.get("prompt_tokens", 0) for answer in answers[:: body.get("n") or 1])
    written = sum(answer.usage.get("completion_tokens", 0) for answer in answers)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    for part, name in _DETAILS:
        if any(name in answer.usage for answer in answers):
            counts[f"{part}_tokens_details"] = {name: sum(answer.usage.get(name, 0) for answer in answers)}
    return counts


def error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def events(body: Body, exchange: Exchange, step: str, answer: int, block: int, *data: Any) -> Events:
    """Chunks: the first of each answer has its role, the last its finish reason."""
    made = _head(body, exchange, "chat.completion.chunk")

    def chunk(place: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> tuple[str, Any]:
        return "", {**made, "choices": [{"index": place, "delta": delta, "finish_reason": reason, **more}]}

    if step == "begin":
        count = len(exchange.asked or exchange.calls)
        yield from (chunk(place, {"role": "assistant", "content": ""}) for place in range(count))
    elif step == "delta":
        yield chunk(answer, {"reasoning_content" if data[0] == REASONING else "content": data[1]})
    elif step == "call":
        yield chunk(answer, {"tool_calls": [{"index": data[0], **data[1]}]})
    elif step == "failed":
        yield "", error(data[0])
    elif step == "end":
        yield from (chunk(n, {}, each.finish_reason, **each.more) for n, each in enumerate(exchange.answers))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", {**made, "choices": [], "usage": _usage(body, exchange)}
        yield "", "[DONE]"
