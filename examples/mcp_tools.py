"""An environment with the tools of an MCP server: a shop whose prices the agent can ask for.

python examples/mcp_tools.py            plays one episode with a scripted agent; needs pip install -e '.[mcp]'

The server is this file too, run as a child process with the argument "serve". Any MCP server will do in its place.
"""

import asyncio
import sys

from agentgym import Env, ScriptedPolicy, Task, ToolSet, assistant, run_episode, user
from agentgym.tools.mcp import McpTools

PRICES = {"pear": 0.40, "plum": 0.25}


def serve():
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop", log_level="ERROR")

    @server.tool()
    def price(fruit: str) -> float:
        """What one piece of a fruit costs."""
        return PRICES[fruit]

    server.run()


class Shop(Env):
    max_turns = 5

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.server = McpTools([sys.executable, __file__, "serve"])  # it starts when its tools are first asked for

    def init(self, task):
        super().init(task)
        self.shop = ToolSet(self.server)  # or ToolSet([*self.server, a_tool_of_ones_own])
        self.tools = self.shop.schemas  # what models with native tool calls are shown

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [*self.task.messages], {}

    def step(self, action):
        said = self.read(action)
        results = self.shop.answer(assistant(action))
        if results:
            return self.outcome(results)
        right = said.strip() == self.task.answer
        return self.outcome("Thank you.", reward=float(right), terminated=True, success=right)

    def close(self):
        super().close()
        self.server.close()


def main():
    task = Task("pears", (user("How much are three pears? Ask for the price."),), answer="1.20")
    agent = ScriptedPolicy(['<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>', "1.20"])
    env = Shop()
    trajectory = asyncio.run(run_episode(env, agent, task))
    env.close()
    for turn in trajectory.turns:
        for message in turn.observation:
            print(f"{message['role']}> {message['content']}")
        print(f"agent> {turn.reply['content']}")
    print(f"{trajectory.end}, reward {trajectory.reward:g}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
