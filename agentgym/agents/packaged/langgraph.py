"""LangGraph, by LangChain's agent on it: chat completions, and the environment's tools by MCP."""

import asyncio
import os
import sys

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI


async def main() -> None:
    key = os.environ["OPENAI_API_KEY"]
    server = {
        "url": os.environ["AGENTGYM_MCP_URL"],
        "transport": "streamable_http",
        "headers": {"Authorization": f"Bearer {key}"},
    }
    tools = await MultiServerMCPClient({"environment": server}).get_tools()
    agent = create_agent(ChatOpenAI(model=os.environ["AGENTGYM_MODEL"]), tools)
    asked = {"messages": [{"role": "user", "content": sys.stdin.read()}]}
    answer = await agent.ainvoke(asked, {"recursion_limit": 10_000})
    print(answer["messages"][-1].text)


asyncio.run(main())
