"""OpenEnv's actions and observations as chat: what an agent reads, and how its reply becomes an action."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentgym.core.messages import Message, text_of
from agentgym.service.openenv.schemas import TITLE
from agentgym.tools.text_forms import spoken
from agentgym.tools.toolset import Tool, ToolCall, ToolSet, shortened

Json = dict[str, Any]
MOST_SHOWN = 50_000  # characters of one observation
_DEPTH = 3  # of references within references that are looked up
ACT = "act"  # the tool that takes an action, if the environment has no tools
_UNSHOWN = ("metadata", "done", "reward")
_PLAIN_RESULTS = ("data", "structured_content", "structuredContent")
_LIMITS = {"minimum": "at least", "maximum": "at most"}
_SOLE = "the {} itself and nothing else, or with a JSON object"
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class Unreadable(ValueError):
    """A reply that is not an action; the message describes one."""


@dataclass(frozen=True)
class Form:
    """The form of an environment's actions.

    "chat": messages pass as they are, the server is agentgym's; "tools": the reply calls tools; "fields": it is a JSON
    object.
    """

    kind: Literal["chat", "tools", "fields"]
    action: Json = field(default_factory=dict)  # JSON schema of actions
    tools: tuple[Tool, ...] = ()  # that a reply may call; for "fields" the one that takes an action
    by_step: bool = True  # a tool is called by a step, which has a reward; else by MCP's own method, which has none

    @property
    def schemas(self) -> list[Json]:
        return ToolSet(self.tools).schemas

    @property
    def told(self) -> str:
        if self.kind == "tools":
            return "Call tools; a reply that calls none ends the episode."
        needed, lines = self.action.get("required") or (), []
        for name, schema in _properties(self.action).items():
            limits = [f", {word} {schema[key]}" for key, word in _LIMITS.items() if key in schema]
            optional = "" if name in needed else ", optional"
            described = f": {schema['description']}" if schema.get("description") else ""
            lines.append(f"- {name} ({_kind(schema)}{''.join(limits)}{optional}){described}")
        sole = sole_text(self.action)
        how = "a JSON object and nothing else. Its fields" if sole is None else _SOLE.format(sole)
        return "\n".join([f"Answer with {how}:", *lines])

    def calls(self, message: Message) -> list[ToolCall] | str:
        """The tool calls of a reply, or the error in one."""
        found = ToolSet(self.tools).calls_of(message)
        names = [tool.name for tool in self.tools]
        for call in found if isinstance(found, list) else []:
            if call.name not in names:
                return f"there is no tool {call.name!r:.100}; the tools are: {', '.join(names)}"
        return found

    def action_of(self, message: Message) -> Json:
        """The action of a reply to an environment of kind "fields". Raises `Unreadable`."""
        calls = self.calls(message)
        if isinstance(calls, str):
            raise Unreadable(calls)
        if len(calls) > 1:
            raise Unreadable(f"{len(calls)} actions in one reply: take one at a time")
        if calls:
            return dict(calls[0].arguments)
        said = _said(text_of(message))
        given = _object_in(said)
        sole = sole_text(self.action)
        if given is not None and (sole is None or given.keys() <= _properties(self.action).keys()):
            return given
        if sole is not None and said:
            return {sole: said}
        raise Unreadable(f"{said!r:.80} is no action. {self.told}")


def form_of(action: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form:
    """The form of actions, from their JSON schema (`GET /schema`) and the tools that `tools/list` told."""
    schema = dict(action)
    if schema.get("title") == TITLE:
        return Form("chat", schema)
    fields = _properties(schema)
    if not tools:
        parameters = {**schema, "properties": fields}
        return Form("fields", schema, (Tool(ACT, "Take an action in the environment.", parameters, _not_here),))
    made = []
    for tool in tools:
        parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
        made.append(Tool(str(tool["name"]), str(tool.get("description") or ""), dict(parameters), _not_here))
    return Form("tools", schema, tuple(made), by_step=not fields or "tool_name" in fields)


def shown(observation: Mapping[str, Any]) -> str:
    """An observation as text: a single field as it is, several under their names; long ones are cut in the middle."""
    parts = {
        key: value for key, value in observation.items() if key not in _UNSHOWN and value not in (None, "", [], {})
    }
    texts = {key: _text(value) for key, value in parts.items()}
    if len(texts) == 1:
        return shortened(next(iter(texts.values())), MOST_SHOWN)
    lines = [f"{key}:\n{text}" if "\n" in text else f"{key}: {text}" for key, text in texts.items()]
    return shortened("\n".join(lines), MOST_SHOWN)


def shown_result(result: Any) -> str:
    """A tool's result as text, from FastMCP's form, MCP's content, or plain JSON."""
    told = _text(result)
    if isinstance(result, Mapping):
        content = result.get("content")
        plain = [result[key] for key in _PLAIN_RESULTS if result.get(key) is not None]
        if isinstance(content, list) and content:
            told = "\n".join(_text(item.get("text", item) if isinstance(item, Mapping) else item) for item in content)
            if (result.get("is_error") or result.get("isError")) and not told.startswith("Error: "):
                told = f"Error: {told}"
        elif plain:
            told = _text(plain[0])
    return shortened(told, MOST_SHOWN)


def metadata_of(answer: Mapping[str, Any]) -> Json:
    """The metadata of an answer: beside the observation, or inside it from older servers."""
    found = answer.get("metadata") or (answer.get("observation") or {}).get("metadata")
    return dict(found) if isinstance(found, Mapping) else {}


def sole_text(action: Mapping[str, Any]) -> str | None:
    """The only required field of an action if it is a text, else None."""
    properties = _properties(action)
    needed = [name for name in action.get("required") or properties if name in properties]
    if len(needed) != 1:
        return None
    schema = properties[needed[0]]
    return needed[0] if schema.get("type") == "string" and "enum" not in schema else None


def _properties(action: Mapping[str, Any]) -> Json:
    """The schemas of an action's fields, without metadata and with references resolved."""
    found = action.get("properties") or {}
    return {name: _resolved(schema, action) for name, schema in found.items() if name != "metadata"}


def _resolved(schema: Any, action: Mapping[str, Any], within: frozenset[str] = frozenset()) -> Any:
    if isinstance(schema, list):
        return [_resolved(part, action, within) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in within and len(within) < _DEPTH:
        named = action
        for word in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",):
            named = named.get(word.replace("~1", "/").replace("~0", "~"), {}) if isinstance(named, Mapping) else {}
        if named:
            # Keys beside a reference (a description, a default) belong to this field.
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            return {**_resolved(named, action, within | {reference}), **_resolved(beside, action, within)}
    return {key: _resolved(value, action, within) for key, value in schema.items()}


def _kind(schema: Mapping[str, Any]) -> str:
    options = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if options:
        return "one of " + ", ".join(json.dumps(option, ensure_ascii=False) for option in options)
    for key in ("anyOf", "oneOf", "allOf"):
        kinds = [kind for part in schema.get(key) or [] if (kind := _kind(part)) != "value"]
        if kinds:
            return " or ".join(dict.fromkeys(kinds))
    kind = str(schema.get("type") or "value")
    items = schema.get("items")
    within = _kind(items) if kind == "array" and isinstance(items, Mapping) else "value"
    return kind if within == "value" else f"{kind}, each {within}"


def _not_here(**_: Any) -> Any:
    raise NotImplementedError("the tool runs in the environment's server")


def _said(text: str) -> str:
    said = spoken(text)
    end = said.rfind("</action>")
    start = said.rfind("<action>", 0, max(end, 0))
    return (said if start < 0 else said[start + len("<action>") : end]).strip()


def _object_in(said: str) -> Json | None:
    for text in (said, *reversed(_FENCED.findall(said))):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
