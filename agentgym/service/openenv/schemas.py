"""Answers of OpenEnv's routes about an environment: JSON schemas, metadata and the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

from agentgym.core.registration import EnvSpec

Json = dict[str, Any]
VERSION = "1.0.0"  # of the HTTP interface, which `openenv validate` reads
TITLE = "AgentgymAction"  # by which `openenv_client` knows an environment that speaks in chat messages


def _object(title: str, properties: Json, **more: Any) -> Json:
    return {"title": title, "type": "object", "additionalProperties": False, "properties": properties} | more


def _or_null(title: str, kind: str, **more: Any) -> Json:
    return {"title": title, "anyOf": [{"type": kind}, {"type": "null"}], **more}


_ANY_JSON: Json = {"content": {"application/json": {}}}
_ENV_NAME: Json = {"name": "env_name", "in": "path", "required": True, "schema": {"type": "string"}}
_MESSAGE: Json = {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}
_METADATA: Json = {"type": "object", "additionalProperties": True, "title": "Metadata"}
_TOOL_NAME: Json = {"title": "Tool Name", "type": "string"}
_DONE: Json = {"title": "Done", "type": "boolean", "default": False}
_COMMON: Json = {
    "done": _DONE,
    "reward": _or_null("Reward", "number", default=None),
    "metadata": _METADATA,
    "messages": {
        "title": "Messages",
        "description": "the new chat messages, in the OpenAI form",
        "type": "array",
        "items": _MESSAGE,
    },
}
ACTION = _object(
    TITLE,
    {
        "message": {
            "title": "Message",
            "description": "the reply: text, or an assistant message, which may have tool_calls",
            "anyOf": [{"type": "string"}, _MESSAGE],
        },
        "type": {"title": "Type", "enum": ["call_tool", "list_tools"], "type": "string"},
        "tool_name": _TOOL_NAME,
        "arguments": {"title": "Arguments", "type": "object", "additionalProperties": True},
        "metadata": _METADATA,
    },
    description="The agent's reply, as text or as an assistant message of the OpenAI form; or a call of one tool.",
    oneOf=[{"required": ["message"]}, {"required": ["type"]}],
)
OBSERVATION = _object(
    "AgentgymObservation",
    {
        **_COMMON,
        "tools": {"title": "Tools", "type": "array", "items": {"type": "object"}},
        "tool_name": _TOOL_NAME,
        "result": {"title": "Result"},
        "error": _or_null("Error", "object"),
    },
)
RESET_OBSERVATION = _object("AgentgymOpening", _COMMON, required=["messages"])
_STATE: Json = {
    "episode_id": _or_null("Episode Id", "string", default=None),
    "step_count": {"title": "Step Count", "type": "integer", "minimum": 0, "default": 0},
    "task_id": _or_null("Task Id", "string", default=None),
    "reward": {"title": "Reward", "description": "sum over the episode", "type": "number", "default": 0.0},
    "done": _DONE,
}
STATE = _object("State", _STATE, additionalProperties=True)
SCHEMAS: Json = {"action": ACTION, "observation": OBSERVATION, "state": STATE, "reset_observation": RESET_OBSERVATION}
FRESH_STATE: Json = {name: schema["default"] for name, schema in _STATE.items()}


def metadata_of(spec: EnvSpec) -> Json:
    unknown = dict.fromkeys(("readme_content", "version", "author", "documentation_url"))
    return {"name": spec.id, "description": spec.description or f"the environment {spec.id}", **unknown}


def openapi_of(title: str, routes: Mapping[str, tuple[str, str]]) -> Json:
    """The OpenAPI document. `routes`: method and summary of each path."""
    paths: Json = {}
    for path, (method, summary) in routes.items():
        operation: Json = {"summary": summary, "responses": {"200": {"description": "the answer", **_ANY_JSON}}}
        if "{env_name}" in path:
            operation["parameters"] = [_ENV_NAME]
        if method == "post":
            operation["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": VERSION, "description": "OpenEnv's HTTP interface, served by agentgym."},
        "paths": paths,
        "components": {"schemas": {schema["title"]: schema for schema in SCHEMAS.values()}},
    }
