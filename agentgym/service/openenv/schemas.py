"""What OpenEnv's routes tell about an environment: JSON schemas, metadata and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.core.registration import EnvSpec

Json = dict[str, Any]
VERSION = "1.0.0"  # of the HTTP interface, which `openenv validate` reads
TITLE = "AgentgymAction"  # by which `openenv_client` knows an environment that speaks in chat messages

_MESSAGE: Json = {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}
_METADATA: Json = {"type": "object", "additionalProperties": True, "title": "Metadata"}

ACTION: Json = {
    "title": TITLE,
    "description": "The agent's reply, as text or as an assistant message of the OpenAI form; or a call of one tool.",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "message": {
            "title": "Message",
            "description": "the reply: text, or an assistant message, which may have tool_calls",
            "anyOf": [{"type": "string"}, _MESSAGE],
        },
        "type": {"title": "Type", "enum": ["call_tool", "list_tools"], "type": "string"},
        "tool_name": {"title": "Tool Name", "type": "string"},
        "arguments": {"title": "Arguments", "type": "object", "additionalProperties": True},
        "metadata": _METADATA,
    },
    "oneOf": [{"required": ["message"]}, {"required": ["type"]}],
}
_COMMON: Json = {
    "done": {"title": "Done", "type": "boolean", "default": False},
    "reward": {"title": "Reward", "anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
    "metadata": _METADATA,
}
_MESSAGES: Json = {
    "title": "Messages",
    "description": "the new chat messages, in the OpenAI form",
    "type": "array",
    "items": _MESSAGE,
}
OBSERVATION: Json = {
    "title": "AgentgymObservation",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **_COMMON,
        "messages": _MESSAGES,
        "tools": {"title": "Tools", "type": "array", "items": {"type": "object"}},
        "tool_name": {"title": "Tool Name", "type": "string"},
        "result": {"title": "Result"},
        "error": {"title": "Error", "anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
RESET_OBSERVATION: Json = {
    "title": "AgentgymOpening",
    "type": "object",
    "additionalProperties": False,
    "required": ["messages"],
    "properties": {**_COMMON, "messages": _MESSAGES},
}
STATE: Json = {
    "title": "State",
    "type": "object",
    "additionalProperties": True,
    "properties": {
        "episode_id": {"title": "Episode Id", "anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "step_count": {"title": "Step Count", "type": "integer", "minimum": 0, "default": 0},
        "task_id": {"title": "Task Id", "anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "reward": {"title": "Reward", "description": "sum over the episode", "type": "number", "default": 0.0},
        "done": {"title": "Done", "type": "boolean", "default": False},
    },
}
SCHEMAS: Json = {"action": ACTION, "observation": OBSERVATION, "state": STATE, "reset_observation": RESET_OBSERVATION}
FRESH_STATE: Json = {"episode_id": None, "step_count": 0, "task_id": None, "reward": 0.0, "done": False}


def metadata_of(spec: EnvSpec) -> Json:
    return {
        "name": spec.id,
        "description": spec.description or f"the environment {spec.id}",
        "readme_content": None,
        "version": None,
        "author": None,
        "documentation_url": None,
    }


def openapi_of(title: str, routes: Mapping[str, Mapping[str, str]]) -> Json:
    """The OpenAPI document. `routes`: path -> method -> summary."""
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": VERSION, "description": "OpenEnv's HTTP interface, served by agentgym."},
        "paths": {
            path: {method: _operation(path, method, summary) for method, summary in methods.items()}
            for path, methods in routes.items()
        },
        "components": {"schemas": {schema["title"]: schema for schema in SCHEMAS.values()}},
    }


def _operation(path: str, method: str, summary: str) -> Json:
    json_content = {"application/json": {"schema": {"type": "object"}}}
    operation: Json = {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": {"application/json": {}}}},
    }
    if "{env_name}" in path:
        operation["parameters"] = [{"name": "env_name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if method == "post":
        operation["requestBody"] = {"content": json_content}
    return operation
