"""The Model Context Protocol, by which agents reach the tools of an episode: streamable HTTP, answered as JSON, without sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentgym import __version__

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
_NO_METHOD, _BAD_PARAMS = -32601, -32602


class Tools(Protocol):
    """What an episode lets its agent do."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """In OpenAI's form."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The result of a tool as text, and whether it is an error."""


async def answer(message: Mapping[str, Any], tools: Tools) -> dict[str, Any] | None:
    """The answer to a message; None where it wants none."""
    if "id" not in message:
        return None
    head, params = {"jsonrpc": "2.0", "id": message["id"]}, message.get("params") or {}
    method = message.get("method")
    if method == "initialize":
        asked = params.get("protocolVersion")
        about = {"name": "agentgym", "version": __version__}
        version = asked if asked in VERSIONS else VERSIONS[0]
        return {**head, "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "ping":
        return {**head, "result": {}}
    if method == "tools/list":
        return {**head, "result": {"tools": [_listed(tool["function"]) for tool in tools.schemas]}}
    if method != "tools/call":
        return {**head, "error": {"code": _NO_METHOD, "message": f"no method {method!r:.80} here"}}
    name, arguments = str(params.get("name")), params.get("arguments") or {}
    if name not in [tool["function"]["name"] for tool in tools.schemas] or not isinstance(arguments, Mapping):
        return {**head, "error": {"code": _BAD_PARAMS, "message": f"no tool {name!r:.80}, or its arguments are none"}}
    text, failed = await tools.call(name, arguments)
    return {**head, "result": {"content": [{"type": "text", "text": text}], "isError": failed}}


def _listed(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description", ""), "inputSchema": schema}
