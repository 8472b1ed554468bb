"""A gateway in front of the small model, and the official clients of its protocols."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import openai
from toy_model import ToyModel

from agentgym.gateway import Gateway

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello the lake"}]


def run(coroutine, seconds=60):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


class Agent:
    """The clients of one episode."""

    def __init__(self, gateway, episode, key, retries=0):
        self.gateway, self.episode, self.key = gateway, episode, key
        self.openai = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=retries)
        self.anthropic = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=retries)

    async def close(self):
        await self.openai.close()
        await self.anthropic.close()

    async def chat(self, messages=None, **settings):
        return await self.openai.chat.completions.create(model="toy", messages=messages or HELLO, **settings)

    @property
    def calls(self):
        return list(self.episode.tree.calls.values())


@asynccontextmanager
async def serving(folder, model=None, **options):
    async with Gateway(model or ToyModel(), folder, **options) as gateway:
        yield gateway


@asynccontextmanager
async def agent_of(folder, model=None, retries=0, seed=0, limits=None, **options):
    """An agent of one episode, and its gateway."""
    async with serving(folder, model, **options) as gateway:
        agent = Agent(gateway, *await gateway.open("e", limits=limits, seed=seed), retries)
        try:
            yield agent
        finally:
            await agent.close()


async def post(url, body, key="", headers=None, method="POST"):
    """Status and JSON of a raw request."""
    given = {"Authorization": f"Bearer {key}", **(headers or {})}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=given) as response:
        return response.status, await response.json()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def shape(episode):
    """What an episode's tree is, whatever the order in which its calls came: each call by its tokens, with the parent's."""

    def tokens(call):
        return None if call is None else (tuple(call.tokens().prompt_ids), tuple(call.tokens().completion_ids))

    def about(call):
        said = json.dumps([*call.conversation(), call.answer.message])
        # Of two conversations the one that comes later is the new one.
        return (
            tokens(call),
            tokens(call.parent) or (),
            said,
            call.why if call.why not in (None, "new conversation") else "",
        )

    return sorted(map(about, episode.tree.calls.values()))


def exact(agent):
    """Asserts that the tokens of all calls are those that the model's own log has."""
    logged = [(prompt, ids) for _, prompt, ids in agent.gateway.backend.log]
    recorded = [(call.tokens().prompt_ids, call.tokens().completion_ids) for call in agent.calls]
    assert sorted(recorded) == sorted(logged)
