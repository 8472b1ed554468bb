"""Tools: typed functions that an agent calls, their schemas, calls written as text, tools of MCP servers."""

from agentgym.tools.toolset import Tool as Tool
from agentgym.tools.toolset import ToolError as ToolError
from agentgym.tools.toolset import ToolSet as ToolSet
from agentgym.tools.toolset import tool as tool
