"""JSON schemas of tools: made from a function's signature and docstring, and checked against the arguments of a call."""

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from agentgym.tools.text_forms import NotJson, parse_json

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*")
_OPEN_ENDED = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A function's description for an agent, and the JSON schema of its arguments. TypeError: see `agentgym.tool`."""
    where = f"tool {function.__name__!r}"
    description, documented = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise TypeError(f"{where} has no docstring: it is what the agent reads about the tool")
    parameters = inspect.signature(function).parameters
    if stray := sorted(documented.keys() - parameters.keys()):
        raise TypeError(f"{where}: the docstring describes {stray[0]!r}, which is no argument of the function")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise TypeError(f"{where}: a type is not known at module level: {error}") from error
    properties = {p.name: _property(where, p, hints, documented.get(p.name, "")) for p in parameters.values()}
    required = [p.name for p in parameters.values() if p.default is p.empty]
    schema = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return description, {**schema, "additionalProperties": False}


def _property(where: str, parameter: inspect.Parameter, hints: Mapping[str, Any], text: str) -> dict[str, Any]:
    where = f"{where}: argument {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        why = "an agent gives arguments by name, so *args, **kwargs and positional-only ones cannot be"
        raise TypeError(f"{where}: {why}")
    if parameter.name not in hints:
        raise TypeError(f"{where} has no type")
    schema = _schema_of(hints[parameter.name], where)
    if text:
        schema["description"] = text
    if parameter.default is not parameter.empty:
        try:
            schema["default"] = json.loads(json.dumps(parameter.default))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where}: the default {parameter.default!r} is no JSON value") from error
    return schema


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal and all(isinstance(v, str | int | bool | None) for v in inner):
        kinds = {_kind(v) for v in inner}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(option, where) for option in inner]}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(inner[1], where)}
    raise TypeError(f"{where}: no JSON schema for the type {hint!r}; see agentgym.tool for those there are")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before any section, and of "Args" the `name: text` lines at its indent; deeper lines go on with the text."""
    description, arguments = [], dict[str, str]()
    section, indent, last = "", None, ""
    for line in text.splitlines():
        depth, said = len(line) - len(line.lstrip()), line.strip()
        if heading := _SECTION.fullmatch(line):
            section, indent, last = heading[1], None, ""
        elif not section:
            description.append(said)
        elif said and section in ("Args", "Arguments", "Parameters"):
            indent = depth if indent is None else indent
            if (match := _ARGUMENT.fullmatch(said)) and depth == indent:
                last = match[1]
                arguments[last] = match[2]
            elif last:
                arguments[last] = f"{arguments[last]} {said}".strip()
    return " ".join(" ".join(description).split()), arguments


def problem_of_arguments(arguments: Any, parameters: Mapping[str, Any]) -> str | None:
    """The problem with the arguments of a call, or None. `parameters` is a schema from `describe`."""
    if problem := problem_of_names(arguments, parameters):
        return problem
    for name, value in arguments.items():
        if problem := _problem_of_value(value, parameters["properties"][name]):
            return f"argument {_quoted(name)} {problem}"
    return None


def problem_of_names(arguments: Any, parameters: Mapping[str, Any]) -> str | None:
    """The problem with the names of a call's arguments, or None, by any JSON schema of an object."""
    if not isinstance(arguments, Mapping):
        return f"arguments must be an object, not {_kind(arguments)}"
    properties = parameters.get("properties", {})
    takes = ", ".join(properties) or "none"
    unknown = [name for name in arguments if name not in properties]
    if unknown and not any(parameters.get(word) for word in _OPEN_ENDED):
        return f"there is no argument {_quoted(unknown[0])}; the arguments are: {takes}"
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"the argument {_quoted(missing[0])} is missing; the arguments are: {takes}"
    return None


_OF_PYTHON = {"True": True, "False": False, "None": None}


def typed(texts: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were written as text, parsed as JSON if their schema takes no text. "" is the `sole_argument`.

    Some chat templates write Python's True, False and None.
    """
    properties = parameters.get("properties", {})
    read: dict[str, Any] = {}
    for written, text in texts.items():
        name = written or sole_argument(parameters) or ""
        value = text if _takes_text(properties.get(name, {}), text) else parse_json(text)
        read[name] = _OF_PYTHON.get(text.strip(), text) if isinstance(value, NotJson) else value
    return read


def sole_argument(parameters: Mapping[str, Any]) -> str | None:
    """The only text argument that a call needs: the only required one, or the only one; else None."""
    properties = parameters.get("properties", {})
    names = list(parameters.get("required") or properties)
    return names[0] if len(names) == 1 and _takes_text(properties.get(names[0], {}), "") else None


def _takes_text(schema: Mapping[str, Any] | bool, text: str) -> bool:
    if not isinstance(schema, Mapping):  # JSON Schema's true, for anything
        return False
    if "enum" in schema:
        return text in schema["enum"]
    if "anyOf" in schema:
        return any(_takes_text(option, text) for option in schema["anyOf"])
    kind = schema.get("type")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _problem_of_value(value: Any, schema: Mapping[str, Any]) -> str | None:
    if options := schema.get("anyOf"):
        problems = [_problem_of_value(value, option) for option in options]
        inside = [found for found in problems if found and found.startswith("at ")]  # the kind is right, an item is not
        told = inside[0] if inside else f"must be {' or '.join(map(_wanted, options))}, not {_kind(value)}"
        return None if None in problems else told
    if "enum" in schema:  # JSON tells true from 1, Python's `in` does not
        fits = any(type(value) is type(option) and value == option for option in schema["enum"])
        return None if fits else f"must be {_wanted(schema)}, not {_quoted(value)}"
    wanted = schema.get("type")
    if wanted not in (None, _kind(value)) and not (wanted == "number" and _kind(value) == "integer"):
        return f"must be {wanted}, not {_kind(value)}"
    if wanted == "number" and abs(value) > sys.float_info.max:  # an integer, which Python keeps whole
        return "is too large"
    inner = schema.get("items") if wanted == "array" else schema.get("additionalProperties")
    for key, item in enumerate(value) if wanted == "array" else value.items() if wanted == "object" else ():
        if problem := _problem_of_value(item, inner or {}):
            return f"at {_quoted(key)} {problem}"
    return None


def _wanted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(json.dumps(v, ensure_ascii=False) for v in schema['enum'])}"
    return str(schema.get("type", "a value"))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "object" if isinstance(value, Mapping) else _PLAIN.get(type(value), type(value).__name__)


def _quoted(value: Any) -> str:
    try:
        return f"{json.dumps(value, ensure_ascii=False, default=str):.100}"
    except (ValueError, RecursionError):  # a value nested too deep to be written
        return f"this {_kind(value)}"
