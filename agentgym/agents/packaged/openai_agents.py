"""OpenAI's Agents SDK: the Responses API, and the environment's tools by MCP."""

import asyncio
import os
import sys

from agents import Agent, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp

SECONDS = 3600.0  # of a tool's call: the episode has limits of its own


async def main() -> None:
    set_tracing_disabled(True)  # it would go to OpenAI
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    params = {"url": os.environ["AGENTGYM_MCP_URL"], "headers": headers, "timeout": SECONDS}
    async with MCPServerStreamableHttp(params, client_session_timeout_seconds=SECONDS) as server:
        agent = Agent(name="player", model=os.environ["AGENTGYM_MODEL"], mcp_servers=[server])
        result = await Runner.run(agent, sys.stdin.read(), max_turns=10_000)
    print(result.final_output)


asyncio.run(main())
