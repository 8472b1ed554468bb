"""Reads the requests of all protocols into one form."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from agentgym.core.messages import Message, problem_of
from agentgym.gateway.calls import ModelCall, Refused

Body: TypeAlias = Mapping[str, Any]
Events: TypeAlias = Iterator[tuple[str, Any]]
MOST_ANSWERS = 128
CUSTOM = "input"  # the only argument of a custom tool
# Of a client's own use: no model sees them.
_BOOKKEEPING = ["user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"]
_BOOKKEEPING += ["prompt_cache_key", "prompt_cache_retention", "model", "tools", "stream", "stream_options"]
_RENAMED = dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens") | {"stop_sequences": "stop"}
_CHOICES = {"any": "required", "tool": "function"}


def call_of(
    body: Body, apart: Collection[str], messages: list[Message], most_answers: int = 1, **more: Any
) -> ModelCall:
    """A call with the settings in a request's body: all that is not `apart`. Raises `Refused`."""
    left_out = [*apart, *_BOOKKEEPING]
    given = {name: value for name, value in body.items() if value is not None and name not in left_out}
    settings = {_RENAMED.get(name, name): value for name, value in given.items()}
    for name, most in (("max_tokens", sys.maxsize), ("n", most_answers)):
        number = settings.get(name, 1)
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
            wanted = f"a whole number from 1 to {most}" if most > 1 else "1 in this protocol"
            raise Refused(400, f"{name} is {wanted}, not {number!r:.50}")
    seed, options = settings.get("seed", 0), body.get("stream_options")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise Refused(400, f"seed is a whole number, not {seed!r:.50}")
    if not isinstance(options, Mapping | None):
        raise Refused(400, f"stream_options is an object, not {options!r:.50}")
    if (stop := settings.get("stop")) is not None:
        settings["stop"] = stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise Refused(400, f"stop is a text or a list of texts, not {stop!r:.50}")
    if isinstance(choice := settings.get("tool_choice"), Mapping):
        kind, name = _CHOICES.get(choice["type"], choice["type"]), choice.get("function", choice).get("name")
        settings["tool_choice"] = {"type": kind, "function": {"name": name}} if name else kind
        if choice.get("disable_parallel_tool_use"):
            settings["parallel_tool_calls"] = False
    tools, changed = [], []
    for tool in body.get("tools") or ():
        about = tool.get("function") or tool
        schema = about.get("parameters", about.get("input_schema"))
        if tool.get("type") == "custom" and schema is None:
            schema = {"type": "object", "properties": {CUSTOM: {"type": "string"}}, "required": [CUSTOM]}
        if tool.get("type", "custom") not in ("function", "custom"):  # its maker's models alone know it
            changed.append(f"tool {tool['type']}")
            continue
        told = {"description": about["description"]} if about.get("description") else {}
        function = {"name": str(about["name"]), **told, "parameters": schema or {"type": "object", "properties": {}}}
        tools.append({"type": "function", "function": function})
    return ModelCall(str(body.get("model", "")), messages, tools=tools, settings=settings, changed=changed, **more)


def plain_message(given: Any, where: str) -> Message:
    """A chat message as messages are compared: without empty fields, a lone part of text as text. Raises `Refused`."""
    message: Message = {name: value for name, value in given.items() if value or value == 0}
    if message.get("role") == "developer":
        message["role"] = "system"
    content = given.get("content")
    if isinstance(content, list):
        content = [_plain_part(part, where) for part in content]
        content = content[0]["text"] if [part["type"] for part in content] == ["text"] else content
    message["content"] = content or "" if message.get("role") == "assistant" else content
    if thought := message.pop("reasoning", None):
        message["reasoning_content"] = thought
    if problem := problem_of(message):
        raise Refused(400, f"{where}: {problem}")
    if called := message.get("tool_calls"):
        parts = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in called]
        message["tool_calls"] = [tool_call(*each) for each in parts]
    return message


def _plain_part(part: Any, where: str) -> dict[str, Any]:
    kind = part["type"]
    if kind in ("text", "input_text", "output_text", "refusal"):
        return {"type": "text", "text": part.get("text", part.get("refusal", ""))}
    if kind == "image":
        source = part["source"]
        part = {"image_url": source.get("url") or f"data:{source['media_type']};base64,{source['data']}"}
    if kind in ("image", "input_image", "image_url"):
        url = part["image_url"]
        return {"type": "image_url", "image_url": url if isinstance(url, Mapping) else {"url": url}}
    raise Refused(400, f"{where}: content of the type {kind!r:.50} is not known here")


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def levels(value: Any) -> int:
    """The depth of nested lists and objects in a JSON value."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(levels, value.values() if isinstance(value, dict) else value), default=0)
