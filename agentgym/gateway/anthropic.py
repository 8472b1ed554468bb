"""Anthropic's messages."""

from __future__ import annotations

import json
from typing import Any

from agentgym.core.messages import Message
from agentgym.gateway.calls import REASONING, TEXT, ModelCall, Refused
from agentgym.gateway.episodes import Episode, Exchange
from agentgym.gateway.forms import Body, Events, call_of, plain_message, tool_call

_APART = ["messages", "system", "container", "mcp_servers", "betas", "cache_control", "context_management"]
_APART += ["output_config", "inference_geo", "speed", "diagnostics"]
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Body, episode: Episode) -> list[ModelCall]:
    messages = [plain_message({"role": "system", "content": body["system"]}, "system")] if body.get("system") else []
    for place, message in enumerate(body["messages"]):
        messages += _messages(message, f"messages.{place}", episode)
    call = call_of(body, _APART, messages)
    config = body.get("output_config") or {}
    if form := config.get("format"):
        schema = {"name": "answer", "schema": form["schema"]}
        call.settings["response_format"] = {"type": form["type"], form["type"]: schema}
    if effort := config.get("effort"):
        call.settings["reasoning_effort"] = effort
    if messages and messages[-1]["role"] == "assistant":  # the answer is a message of its own, not the rest of this one
        call.changed.append("prefill")
    return [call]


def _messages(given: Any, where: str, episode: Episode) -> list[Message]:
    """A message as chat messages: results of tools come first, each as its own."""
    if not isinstance(given.get("content"), list):
        return [plain_message(given, where)]
    found: list[Message] = []
    message: Message = {"role": given["role"], "content": [], "reasoning_content": "", "tool_calls": []}
    for block in given["content"]:
        if block["type"] == "tool_result":
            result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content") or ""}
            found.append(plain_message(result, where))
        elif block["type"] == "tool_use":
            arguments = episode.arguments_of(block["id"], block["input"])
            message["tool_calls"].append(tool_call(block["id"], block["name"], arguments))
        elif block["type"] == "thinking":
            message["reasoning_content"] += block["thinking"]
        else:
            message["content"].append(block)
    if message["content"] or message["role"] == "assistant":
        found.append(plain_message(message, where))
    return found


def _begun(body: Body, exchange: Exchange) -> dict[str, Any]:
    made = {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "model": body.get("model")}
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    return {**made, **empty, "usage": {"input_tokens": 0, "output_tokens": 0}}


def whole(body: Body, exchange: Exchange) -> dict[str, Any]:
    (answer,) = exchange.answers
    told, content = dict(answer.parts()), []
    if told[REASONING]:
        content.append({"type": "thinking", "thinking": told[REASONING], "signature": exchange.id})
    if told[TEXT]:
        content.append({"type": "text", "text": told[TEXT]})
    content += [_used(call) for call in answer.message.get("tool_calls") or ()]
    usual = "tool_use" if answer.message.get("tool_calls") else "end_turn"
    reason = "stop_sequence" if answer.stop is not None else _REASONS.get(answer.finish_reason, usual)
    cached, written = answer.usage.get("cached_tokens", 0), answer.usage.get("completion_tokens", 0)
    usage = {"input_tokens": answer.usage.get("prompt_tokens", 0) - cached, "cache_read_input_tokens": cached}
    made = {"content": content, "stop_reason": reason, "stop_sequence": answer.stop}
    return {**_begun(body, exchange), **made, "usage": {**usage, "output_tokens": written}}


def _used(call: Body) -> dict[str, Any]:
    """A tool call as a block. Arguments that are no JSON object, which it cannot carry, come under a name of their own."""
    said = call["function"]["arguments"]
    try:
        value = json.loads(said)
    except ValueError:
        value = None
    given = value if isinstance(value, dict) else {"arguments": said}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def events(body: Body, exchange: Exchange, step: str, answer: int, block: int, *data: Any) -> Events:
    def start(content: Any) -> tuple[str, Any]:
        return "content_block_start", {"index": block, "content_block": content}

    def delta(kind: str, **more: str) -> tuple[str, Any]:
        return "content_block_delta", {"index": block, "delta": {"type": kind, **more}}

    thinks = data[:1] == (REASONING,)
    if step == "begin":
        yield "message_start", {"message": _begun(body, exchange)}
    elif step == "ping":
        yield "ping", {}
    elif step == "open":
        yield start({"type": "thinking", "thinking": "", "signature": ""} if thinks else {"type": "text", "text": ""})
    elif step == "delta":
        yield delta("thinking_delta", thinking=data[1]) if thinks else delta("text_delta", text=data[1])
    elif step == "close":
        if thinks:
            yield delta("signature_delta", signature=exchange.id)
        yield "content_block_stop", {"index": block}
    elif step == "call":
        used = _used(data[1])
        yield start({**used, "input": {}})
        yield delta("input_json_delta", partial_json=json.dumps(used["input"]))
        yield "content_block_stop", {"index": block}
    elif step == "failed":
        yield "error", error(data[0])
    elif step == "end":
        message = whole(body, exchange)
        reason = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"delta": reason, "usage": message["usage"]}
        yield "message_stop", {}
