"""An agent with OpenAI's SDK: it asks the model, acts by its answer, and tells it what came of that, until the episode is over.

As a function:  agentgym eval frozen_lake --agent examples.agents.openai_sdk:play --model M --base-url URL
As a command:   agentgym eval frozen_lake --agent "command:python examples/agents/openai_sdk.py" --model M --base-url URL
"""

import json
import os
import urllib.request

from openai import AsyncOpenAI, OpenAI


async def play(episode):
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.key) as client:
        messages = list(episode.messages)
        while not episode.over:
            tools = {"tools": episode.tools} if episode.tools else {}
            answer = await client.chat.completions.create(model=episode.model, messages=messages, **tools)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            messages += [said, *await episode.step(said)]


def main():
    client = OpenAI()  # finds the gateway by OPENAI_BASE_URL and OPENAI_API_KEY
    messages, told = [], os.environ["AGENTGYM_TASK"]
    while not told.endswith("The episode is over."):
        messages.append({"role": "user", "content": told})
        answer = client.chat.completions.create(model=os.environ["AGENTGYM_MODEL"], messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        # The environment's tools are behind MCP; one that has none is spoken to by the tool `act`.
        tool = {"name": "act", "arguments": {"text": messages[-1]["content"]}}
        call = {"jsonrpc": "2.0", "id": len(messages), "method": "tools/call", "params": tool}
        key = {"Authorization": f"Bearer {client.api_key}"}
        request = urllib.request.Request(os.environ["AGENTGYM_MCP_URL"], json.dumps(call).encode(), key)
        with urllib.request.urlopen(request, timeout=300) as answer:
            told = json.load(answer)["result"]["content"][0]["text"]


if __name__ == "__main__":
    main()
