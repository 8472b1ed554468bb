"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentgym.core.messages import Message, text_of
from agentgym.gateway.calls import (
    REASONING,
    ModelAnswer,
    ModelCall,
    Refused,
    function_tool,
    plain_message,
    settings_of,
    tool_call,
)

if TYPE_CHECKING:
    from agentgym.gateway.episodes import Episode, Exchange

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_APART = ["model", "messages", "system", "tools", "tool_choice", "stream", "container", "mcp_servers", "betas"]
_APART += ["cache_control", "context_management", "output_config", "inference_geo", "speed", "diagnostics"]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


# ---- requests


def read(body: Mapping[str, Any], episode: Episode) -> list[ModelCall]:
    messages: list[Message] = []
    if system := body.get("system"):
        messages.append(plain_message({"role": "system", "content": _parts(system, "system")}, "system"))
    for place, message in enumerate(body["messages"]):
        messages += _messages(message, f"messages.{place}", episode)
    settings = settings_of(body, _APART, stop_sequences="stop")
    choice = body.get("tool_choice") or {}
    if choice.get("type") == "tool":
        settings["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice:
        settings["tool_choice"] = _CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        settings["parallel_tool_calls"] = False
    given = body.get("tools") or []
    tools = [
        function_tool(tool["name"], tool.get("description"), tool["input_schema"])
        for tool in given
        if "input_schema" in tool
    ]
    # Schemas of the others are known to Anthropic's models alone.
    left_out = [f"tool {tool['type']}" for tool in given if "input_schema" not in tool]
    return [ModelCall(str(body.get("model", "")), messages, tools=tools, settings=settings, changed=left_out)]


def _messages(given: Any, where: str, episode: Episode) -> list[Message]:
    """A message as chat messages: results of tools come first, each as its own."""
    if not isinstance(given.get("content"), list):
        return [plain_message(given, where)]
    found: list[Message] = []
    message: Message = {"role": given["role"], "content": [], "reasoning_content": "", "tool_calls": []}
    for block in given["content"]:
        if block["type"] == "tool_result":
            content = _parts(block.get("content") or "", where)
            found.append(
                plain_message({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}, where)
            )
        elif block["type"] == "tool_use":
            arguments = episode.arguments_of(block["id"], block["input"])
            message["tool_calls"].append(tool_call(block["id"], block["name"], arguments))
        elif block["type"] == "thinking":
            message["reasoning_content"] += block["thinking"]
        else:
            message["content"] += _parts([block], where)
    if message["content"] or message["role"] == "assistant":
        found.append(plain_message(message, where))
    return found


def _parts(given: Any, where: str) -> Any:
    if isinstance(given, str):
        return given
    parts: list[dict[str, Any]] = []
    for block in given:
        if block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            source = block["source"]
            url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise Refused(400, f"{where}: content of the type {block['type']!r:.50} is not known here")
    return parts


# ---- answers


def whole(body: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    (answer,) = exchange.answers
    content: list[dict[str, Any]] = []
    if thought := answer.message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": exchange.id})
    if text := text_of(answer.message):
        content.append({"type": "text", "text": text})
    content += [_used(call) for call in answer.message.get("tool_calls") or ()]
    return {**_head(body, exchange), "content": content, **_reason(answer), "usage": _usage(answer)}


def _head(body: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": f"msg_{exchange.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": [],
    }
    return {**made, "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}


def _used(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as a block. Arguments that are no JSON object, which it cannot carry, come under a name of their own."""
    said = call["function"]["arguments"]
    try:
        value = json.loads(said)
    except ValueError:
        value = None
    given = value if isinstance(value, dict) else {"arguments": said}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _reason(answer: ModelAnswer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop is not None else _REASONS.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answer: ModelAnswer) -> dict[str, int]:
    cached = answer.usage.get("cached_tokens", 0)
    counts = {"input_tokens": answer.usage.get("prompt_tokens", 0) - cached, "cache_read_input_tokens": cached}
    return {**counts, "output_tokens": answer.usage.get("completion_tokens", 0)}


def error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def events(
    body: Mapping[str, Any], exchange: Exchange, step: str, answer: int, block: int, *data: Any
) -> Iterator[tuple[str, Any]]:
    def start(content: Any) -> tuple[str, Any]:
        return "content_block_start", {"index": block, "content_block": content}

    def delta(kind: str, **more: str) -> tuple[str, Any]:
        return "content_block_delta", {"index": block, "delta": {"type": kind, **more}}

    thinks = data[:1] == (REASONING,)
    if step == "begin":
        yield "message_start", {"message": _head(body, exchange)}
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
        yield "message_delta", {"delta": _reason(exchange.answers[0]), "usage": _usage(exchange.answers[0])}
        yield "message_stop", {}
