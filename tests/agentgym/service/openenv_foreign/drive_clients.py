"""OpenEnv's own clients against a server: `drive_clients.py CASE URL`. The last line that it prints is what they saw, as JSON."""

import asyncio
import json
import sys

from openenv import GenericEnvClient
from openenv.core import MCPToolClient
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction


def result_of(result):
    observation = result.observation
    observation = observation if isinstance(observation, dict) else observation.model_dump(mode="json")
    return {"observation": observation, "reward": result.reward, "done": result.done, "metadata": result.metadata}


async def refusal(awaitable):
    try:
        return f"no error, but {await awaitable}"
    except (RuntimeError, ConnectionError) as error:
        return str(error)


async def generic(url):
    async with GenericEnvClient(base_url=url) as env:
        found = {"reset": result_of(await env.reset(seed=5, episode_id="e-5"))}
        found["step"] = result_of(await env.step({"message": "x"}))
        found["state"] = await env.state()
        found["invalid"] = await refusal(env.step({"massage": "x"}))
        found["raised"] = await refusal(env.step({"message": "raise"}))
        found["task"] = result_of(await env.reset(split="test", index=1))
        found["right"] = result_of(await env.step({"message": "2"}))
        found["over"] = await refusal(env.step({"message": "2"}))
    return found


def synchronous(url):
    with GenericEnvClient(base_url=url).sync() as env:
        reset = env.reset(split="train", index=4)
        step = env.step({"message": "8"})
        return {"reset": result_of(reset), "step": result_of(step), "state": env.state()}


async def tools(url):
    async with MCPToolClient(base_url=url) as env:
        listed = [tool.model_dump() for tool in await env.list_tools()]
        reset = result_of(await env.reset(split="train", index=1))
        first = await env.call_tool("add", number=2)
        failed = await refusal(env.call_tool("nope"))
        after = (await env.state()).model_dump()  # the WebSocket sees what HTTP did
        by_step = await env.step(ListToolsAction())
        kind = type(by_step.observation).__name__
        last = result_of(await env.step(CallToolAction(tool_name="add", arguments={"number": 3})))
    return {
        "listed": listed,
        "reset": reset,
        "first": first,
        "failed": failed,
        "after": after,
        "kind": kind,
        "last": last,
    }


async def full(url):
    """A server with two sessions: a third is refused, and let in when one has left."""
    first, second, third = (GenericEnvClient(base_url=url) for _ in range(3))
    await first.reset(seed=1)
    await second.reset(seed=1)
    refused = await refusal(third.reset(seed=1))
    await third.disconnect()
    await first.close()
    for _ in range(200):
        if (told := await refusal(third.reset(seed=1))).startswith("no error"):
            break
        await asyncio.sleep(0.05)
    await second.close()
    await third.close()
    return {"refused": refused, "then": told}


if __name__ == "__main__":
    case = globals()[sys.argv[1]]
    found = asyncio.run(case(sys.argv[2])) if asyncio.iscoroutinefunction(case) else case(sys.argv[2])
    sys.stdout.write("\n" + json.dumps(found) + "\n")
