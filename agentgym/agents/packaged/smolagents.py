"""smolagents: its agent that calls tools, by chat completions, and the environment's tools by MCP."""

import os
import sys

from smolagents import LogLevel, MCPClient, OpenAIModel, ToolCallingAgent

key = os.environ["OPENAI_API_KEY"]
server = {
    "url": os.environ["AGENTGYM_MCP_URL"],
    "transport": "streamable-http",
    "headers": {"Authorization": f"Bearer {key}"},
}
model = OpenAIModel(os.environ["AGENTGYM_MODEL"], os.environ["OPENAI_BASE_URL"], api_key=key)
with MCPClient(server, structured_output=False) as tools:
    agent = ToolCallingAgent(tools=tools, model=model, max_steps=10_000, verbosity_level=LogLevel.OFF)
    print(agent.run(sys.stdin.read()))
