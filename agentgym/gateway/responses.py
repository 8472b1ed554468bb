"""OpenAI's Responses: items in and out. An earlier response is found by its id in the episode's record."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from agentgym.core.messages import Message
from agentgym.gateway.calls import REASONING, TEXT, ModelCall, Refused
from agentgym.gateway.episodes import Episode, Exchange
from agentgym.gateway.forms import CUSTOM, Body, Events, call_of, plain_message, tool_call

_APART = ["input", "instructions", "previous_response_id", "include", "truncation", "background", "conversation"]
_APART += ["text", "reasoning", "client_metadata", "max_tool_calls"]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED: dict[str, Any] = {
    **dict.fromkeys(("model", "instructions", "previous_response_id", "max_output_tokens", "metadata", "reasoning")),
    **{"temperature": None, "top_p": None, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
}


def read(body: Body, episode: Episode) -> list[ModelCall]:
    if body.get("background") or body.get("conversation"):
        raise Refused(400, "background and conversation are not supported here")
    given = body.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    asked = {**body, "tools": [tool for tool, _ in _tools(body)]}
    call = call_of(asked, _APART, [*system, *_before(body, episode), *_messages(items, episode)])
    if effort := (body.get("reasoning") or {}).get("effort"):
        call.settings["reasoning_effort"] = effort
    form = dict((body.get("text") or {}).get("format") or {"type": "text"})
    if (kind := form.pop("type")) != "text":
        call.settings["response_format"] = {"type": kind, **({kind: form} if form else {})}
    return [call]


def _tools(body: Body) -> Iterator[tuple[Body, tuple[str, str]]]:
    """The tools as the model sees them, each with the client's namespace and tool name."""
    for tool in body.get("tools") or ():
        if tool["type"] != "namespace":
            yield tool, ("", tool.get("name", ""))
            continue
        for inner in tool["tools"]:
            yield {**inner, "name": f"{tool['name']}__{inner['name']}"}, (tool["name"], inner["name"])


def _before(body: Body, episode: Episode) -> list[Message]:
    """The conversation up to and including the previous response, without its instructions."""
    if not (name := body.get("previous_response_id")):
        return []
    exchange = episode.by_id.get(str(name).removeprefix("resp_"))
    if exchange is None or not exchange.calls:
        raise Refused(400, f"there is no response {name!r:.80} in this episode", "previous_response_not_found")
    call = exchange.calls[0]
    return [*call.conversation()[exchange.instructed :], call.answer.message]


def _messages(items: Any, episode: Episode) -> list[Message]:
    """Items as chat messages; what the model said in one response is one message."""
    messages: list[Message] = []
    before = ""  # the type of the item before
    for place, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{place}]"
        if kind == "reasoning":
            thought = "".join(part["text"] for part in item.get("content") or ())
            thought = thought or base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
            messages.append(plain_message({"role": "assistant", "reasoning_content": thought}, where))
        elif kind == "message":
            message = plain_message({"role": item["role"], "content": item["content"]}, where)
            if before == "reasoning" and message["role"] == "assistant":
                messages[-1]["content"] = message["content"]
            else:
                messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            custom = kind == "custom_tool_call"
            said = episode.arguments_of(item["call_id"], {CUSTOM: item["input"]}) if custom else item["arguments"]
            name = "__".join(filter(None, (item.get("namespace"), item["name"])))
            messages[-1].setdefault("tool_calls", []).append(tool_call(item["call_id"], name, said))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(plain_message(answer, where))
        else:
            raise Refused(400, f"{where}: items of the type {kind!r:.50} are not known here")
        before = kind
    return messages


def whole(body: Body, exchange: Exchange) -> dict[str, Any]:
    (answer,) = exchange.answers
    calls = answer.message.get("tool_calls") or ()
    parts = [(kind, text) for kind, text in answer.parts() if text or (kind == TEXT and not calls)]
    items = [_item(body, exchange, kind, text) for kind, text in parts]
    items += [_called(body, exchange, place, call) for place, call in enumerate(calls)]
    reason = _INCOMPLETE.get(answer.finish_reason)
    status = {"status": "incomplete", "incomplete_details": {"reason": reason}} if reason else {"status": "completed"}
    count = answer.usage.get
    read_, written = count("prompt_tokens", 0), count("completion_tokens", 0)
    usage = {"input_tokens": read_, "output_tokens": written, "total_tokens": read_ + written}
    details = {"input_tokens_details": {"cached_tokens": count("cached_tokens", 0), "cache_write_tokens": 0}}
    details["output_tokens_details"] = {"reasoning_tokens": count("reasoning_tokens", 0)}
    return {**_response(body, exchange), **status, "output": items, "usage": {**usage, **details}}


def _response(body: Body, exchange: Exchange) -> dict[str, Any]:
    """A response that has only begun."""
    made = {"id": f"resp_{exchange.id}", "object": "response", "created_at": int(exchange.began)}
    asked = {name: none if body.get(name) is None else body[name] for name, none in _ECHOED.items()}
    empty: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
    return {**made, **asked, "truncation": "disabled", "status": "in_progress", **empty}


def _item(body: Body, exchange: Exchange, kind: str, text: str | None) -> dict[str, Any]:
    """The reasoning or the text of an answer; None: it has only begun."""
    made: dict[str, Any] = {"status": "in_progress", "content": []}
    if text is not None:
        made = {"status": "completed", "content": [_part(kind, text)]}
    if kind == TEXT:
        return {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", **made}
    item = {"id": f"rs_{exchange.id}", "type": "reasoning", "summary": [], **made}
    if "reasoning.encrypted_content" in (body.get("include") or ()):
        item["encrypted_content"] = base64.b64encode((text or "").encode(errors="replace")).decode()
    return item


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _called(body: Body, exchange: Exchange, place: int, call: Body) -> dict[str, Any]:
    name, said = call["function"]["name"], call["function"]["arguments"]
    kinds = {tool["name"]: (tool["type"], of) for tool, of in _tools(body) if "name" in tool}
    kind, (space, bare) = kinds.get(name, ("function", ("", name)))
    item = {"id": f"fc_{exchange.id}_{place}", "call_id": call["id"], "name": bare, "status": "completed"}
    if space:
        item["namespace"] = space
    if kind != "custom":
        return {**item, "type": "function_call", "arguments": said}
    try:
        return {**item, "type": "custom_tool_call", "input": str(json.loads(said)[CUSTOM])}
    except (ValueError, TypeError, KeyError):  # the model did not keep to the form: the tool gets what it said
        return {**item, "type": "custom_tool_call", "input": said}


def events(body: Body, exchange: Exchange, step: str, answer: int, block: int, *data: Any) -> Events:
    def of(name: str, item: Body, **more: Any) -> tuple[str, Any]:
        if name.startswith("output_item"):
            return f"response.{name}", {"output_index": block, "item": item}
        return f"response.{name}", {"item_id": item["id"], "output_index": block, **more}

    if step == "begin":
        for name in ("created", "in_progress"):
            yield f"response.{name}", {"response": _response(body, exchange)}
    elif step in ("open", "delta", "close"):
        kind, text = data
        item = _item(body, exchange, kind, text if step == "close" else None)
        name = "reasoning_text" if kind == REASONING else "output_text"
        more: dict[str, Any] = {} if kind == REASONING else {"logprobs": []}
        if step == "open":
            yield of("output_item.added", item)
            yield of("content_part.added", item, content_index=0, part=_part(kind, ""))
        elif step == "delta":
            yield of(f"{name}.delta", item, content_index=0, delta=text, **more)
        else:
            yield of(f"{name}.done", item, content_index=0, text=text, **more)
            yield of("content_part.done", item, content_index=0, part=_part(kind, text))
            yield of("output_item.done", item)
    elif step == "call":
        item = _called(body, exchange, *data)
        custom = "input" in item
        field, name = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        yield of("output_item.added", {**item, "status": "in_progress", field: ""})
        yield of(f"{name}.delta", item, delta=item[field])
        yield of(f"{name}.done", item, **{field: item[field]})
        yield of("output_item.done", item)
    elif step == "failed":
        told = {"code": data[0].code or "server_error", "message": str(data[0])}
        yield "response.failed", {"response": {**_response(body, exchange), "status": "failed", "error": told}}
    elif step == "end":
        response = whole(body, exchange)
        yield f"response.{response['status']}", {"response": response}
