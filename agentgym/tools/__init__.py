"""Tools: typed functions that an agent calls, their schemas, calls written as text, tools of MCP servers."""

from agentgym.tools.toolset import Tool, ToolError, ToolSet, tool

__all__ = ["Tool", "ToolError", "ToolSet", "tool"]
