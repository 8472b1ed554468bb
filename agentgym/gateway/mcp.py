"""The Model Context Protocol, by which agents reach the tools of an episode: streamable HTTP, answered as JSON, without sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentgym import __version__

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
_EMPTY = {"type": "object", "properties": {}}
_NO_METHOD, _BAD_PARAMS = -32601, -32602


class Tools(Protocol):
    """The tools that an episode offers its agent."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools' schemas, in OpenAI's form."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The result of a tool as text, and whether it is an error."""


async def answer(message: Mapping[str, Any], tools: Tools) -> dict[str, Any] | None:
    """The answer to a message; None where it wants none."""
    if "id" not in message:
        return None
    head, params = {"jsonrpc": "2.0", "id": message["id"]}, message.get("params") or {}
    if not isinstance(params, Mapping):
        return {**head, "error": {"code": _BAD_PARAMS, "message": "params are an object"}}
    method = message.get("method")
    if method == "initialize":
        version = asked if (asked := params.get("protocolVersion")) in VERSIONS else VERSIONS[0]
        made = {"serverInfo": {"name": "agentgym", "version": __version__}, "capabilities": {"tools": {}}}
        return {**head, "result": {"protocolVersion": version, **made}}
    if method == "ping":
        return {**head, "result": {}}
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.schemas}
    if method == "tools/list":
        listed = [
            {
                "name": name,
                "description": about.get("description", ""),
                "inputSchema": about.get("parameters") or _EMPTY,
            }
            for name, about in functions.items()
        ]
        return {**head, "result": {"tools": listed}}
    if method != "tools/call":
        return {**head, "error": {"code": _NO_METHOD, "message": f"no method {method!r:.80} here"}}
    name, arguments = str(params.get("name")), params.get("arguments") or {}
    if name not in functions or not isinstance(arguments, Mapping):
        return {**head, "error": {"code": _BAD_PARAMS, "message": f"no tool {name!r:.80}, or its arguments are none"}}
    text, failed = await tools.call(name, arguments)
    return {**head, "result": {"content": [{"type": "text", "text": text}], "isError": failed}}
