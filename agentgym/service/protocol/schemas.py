"""JSON Schemas of "agentgym/1", over WebSockets and HTTP: the answers of `GET /schema` and `GET /envs/ID/schema`."""

from typing import Any

from agentgym.service.protocol.frames import CODES, METHODS, NAME, PROTOCOL

Json = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_BOOLEAN: Json = {"type": "boolean"}
_ANY_OBJECT: Json = {"type": "object"}


def _ref(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _tuple(*of: Json) -> Json:
    return {"type": "array", "prefixItems": list(of), "minItems": len(of), "maxItems": len(of)}


def _or_null(of: Json) -> Json:
    return {"anyOf": [of, {"type": "null"}]}


def _object(needed: Json, more: Json | None = None, closed: bool = True) -> Json:
    """An object with these fields: all of `needed`, and unless it is open none besides those and `more`."""
    made = {"type": "object", "required": list(needed), "properties": {**needed, **(more or {})}}
    return {**made, "additionalProperties": False} if closed else made


def _request(call: str, needed: Json | None = None, more: Json | None = None) -> Json:
    return _object({"id": {"type": "integer", "minimum": 1}, "call": {"const": call}, **(needed or {})}, more)


_FUNCTION = _object({"name": _TEXT}, {"description": _TEXT, "parameters": _ANY_OBJECT}, closed=False)
_MESSAGES = _list(_ref("Message"))
_OBSERVATION = {
    "anyOf": [_MESSAGES, {}],
    "description": "the new chat messages; whatever another kind of environment shows",
}
_ABOUT: Json = {"id": _TEXT, "description": _TEXT, "tags": _list(_TEXT), "nondeterministic": _BOOLEAN}
_MADE: Json = {"tools": _list(_ref("Tool")), "methods": _list({"enum": list(METHODS)}), "max_turns": _or_null(_WHOLE)}
_SPLIT: Json = {"size": _WHOLE, "name": _TEXT, "source": {}}
_ERROR = _object({"code": {"enum": list(CODES)}, "message": _TEXT, "fatal": _BOOLEAN})
DEFS: Json = {
    "Message": {
        "description": "a chat message, in the OpenAI form",
        **_object({"role": _TEXT}, {"tool_calls": _list(_ANY_OBJECT)}, closed=False),
    },
    "Tool": {
        "description": "a tool, in the OpenAI form",
        **_object({"type": {"const": "function"}, "function": _FUNCTION}, closed=False),
    },
    "Task": _object(
        {"id": _TEXT},
        {"messages": _MESSAGES, "answer": {}, "seed": _or_null({"type": "integer"}), "metadata": _ANY_OBJECT},
    ),
    "Action": {
        "anyOf": [_TEXT, _ref("Message"), {}],
        "description": "a reply as text or message, or what the env takes",
    },
    "Random": {
        "description": "random.Random().getstate() of Python, as JSON",
        **_tuple({"const": 3}, _list(_WHOLE), _or_null(_NUMBER)),
    },
    "Hello": _object(
        {
            "session": _TEXT,
            "resume": _or_null(_TEXT),
            "protocol": {"const": PROTOCOL},
            "last": _WHOLE,
            "env": _object(
                {**_ABOUT, **_MADE},
                {"kwargs": _ANY_OBJECT, "floor": _NUMBER, "step_seconds": _NUMBER, "runs_programs": _BOOLEAN},
            ),
            "limits": {"type": "object", "additionalProperties": {"type": ["number", "null"], "exclusiveMinimum": 0}},
        },
        closed=False,
    ),
    "Request": {
        "anyOf": [
            _request("init", {"task": _ref("Task")}),
            _request("reset", more={"seed": _or_null({"type": "integer"}), "options": _or_null(_ANY_OBJECT)}),
            _request("step", {"action": _ref("Action")}),
            _request("expert_action"),
            _request("random_action", {"rng": _ref("Random")}),
            _request("cut_off", {"reason": _TEXT}),
            _request("tools"),
            _request("close"),
        ]
    },
    "Result": {
        "anyOf": [
            {"description": "of init, tools and close", **_object({}, {"tools": _list(_ref("Tool"))})},
            {
                "description": "of reset",
                **_object(
                    {"observation": _OBSERVATION, "info": _ANY_OBJECT},
                    {"tools": _list(_ref("Tool")), "task": _ref("Task")},
                ),
            },
            {
                "description": "of step and cut_off: observation, reward, terminated, truncated, info",
                **_tuple(_OBSERVATION, _NUMBER, _BOOLEAN, _BOOLEAN, _ANY_OBJECT),
            },
            {"description": "of cut_off, if the environment does not judge the episode", "type": "null"},
            {"description": "of expert_action and random_action", **_object({"action": {}}, {"rng": _ref("Random")})},
        ]
    },
    "Answer": _object({"id": _WHOLE, "result": _ref("Result")}),
    "Failure": _object({"id": _or_null({"type": "integer"}), "error": _ERROR}),
    "Refusal": _object({"error": _object({"code": _TEXT, "message": _TEXT})}),
    "Env": _object(
        {**_ABOUT, "splits": {"type": "object", "additionalProperties": _object(_SPLIT)}},
        {**_MADE, "kwargs": _ANY_OBJECT, "error": _TEXT},
    ),
    "Page": _object({"split": _TEXT, "start": _WHOLE, "stop": _WHOLE, "tasks": _list(_ref("Task")), **_SPLIT}),
}


def protocol() -> Json:
    """The frames, the HTTP answers and the codes. Each `$ref` is into `$defs` beside them."""
    one = {"anyOf": [_ref("Answer"), _ref("Failure")]}
    ready = _object({"ready": _BOOLEAN, "draining": _BOOLEAN, "sessions": _WHOLE, "max_sessions": _WHOLE})
    return {
        "$schema": DRAFT,
        "title": NAME,
        "$defs": DEFS,
        "session": {
            "path": "/envs/{id}/session",
            "hello": _ref("Hello"),
            "client": {"anyOf": [_ref("Request"), {**_list(_ref("Request")), "minItems": 1}]},
            "server": {"anyOf": [one, _list(one)]},
        },
        "http": {
            "/health": {"200": _object({"status": {"const": "healthy"}})},
            "/ready": {"200": ready, "503": ready},
            "/envs": {"200": _object({"envs": _list(_ref("Env"))})},
            "/envs/{id}": {"200": _ref("Env")},
            "/envs/{id}/schema": {"200": _ANY_OBJECT},
            "/envs/{id}/tasks": {"200": _ref("Page")},
            "refusals": _ref("Refusal"),
        },
        "codes": {code: {"meaning": meaning, "close": close} for code, (meaning, close) in CODES.items()},
    }


def of_env(about: Json) -> Json:
    """The schemas of one environment's actions and observations. `about` is its record in `GET /envs`."""
    calls = [_call(tool.get("function", {})) for tool in about.get("tools", ())]
    tool_calls = _list({"anyOf": calls}) if calls else {"type": "array", "maxItems": 0}
    message = _object(
        {"role": {"const": "assistant"}}, {"content": _or_null(_TEXT), "tool_calls": tool_calls}, closed=False
    )
    return {
        "$schema": DRAFT,
        "title": about["id"],
        "description": about["description"],
        "$defs": {"Message": DEFS["Message"]},
        "action": {"anyOf": [_TEXT, message]},
        "observation": _OBSERVATION,
        "tools": about.get("tools", []),
        "methods": about.get("methods", []),
        "max_turns": about.get("max_turns"),
    }


def _call(function: Json) -> Json:
    """A call of a tool in a message; its arguments are JSON as text, of the tool's own schema."""
    arguments = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": function.get("parameters", _ANY_OBJECT),
    }
    called = _object({"name": {"const": function.get("name")}}, {"arguments": arguments}, closed=False)
    return _object({"function": called}, {"id": _TEXT, "type": {"const": "function"}}, closed=False)
