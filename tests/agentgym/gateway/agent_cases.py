"""Environments that agents of these tests play, and the gateway in front of the small model."""

import asyncio
import contextlib
import json
import threading
from contextlib import asynccontextmanager

import openai
from toy_model import ToyModel

from agentgym.agents.play import AgentPolicy, play_agent
from agentgym.agents.programs import agent_of
from agentgym.core.env import Env
from agentgym.core.messages import tool_result, user
from agentgym.core.tasks import Task
from agentgym.gateway import Gateway
from agentgym.rollout.episode import Limits

COUNT = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
TASK = Task("t", [user("count to three")])


class Counting(Env):
    """Counts its calls of `count`; a text ends it, and the third call earns 1. What is cut off is judged by half the count."""

    max_turns = 8
    floor = -1.0
    tools = (COUNT,)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.count = 0
        return list(self.current_task.messages), {}

    def step(self, action):
        text = self.read(action)
        if not action.get("tool_calls"):
            return self.outcome("", 0.5 * (text == "done"), terminated=True, success=text == "done", said=text)
        self.count += 1
        told = [tool_result(action["tool_calls"][0]["id"], f"count {self.count}")]
        return self.outcome(told, float(self.count == 3), terminated=self.count == 5, success=True)

    def cut_off(self, reason):
        return [], self.count / 2, False, True, {"judged": reason}


class Talking(Counting):
    """Without tools: it says what it was told, and `stop` ends it."""

    tools = ()

    def step(self, action):
        text = self.read(action)
        return self.outcome(f"heard {text}", float(text == "stop"), terminated=text == "stop")


class Broken(Counting):
    def step(self, action):
        raise OSError("the disk is gone")


@asynccontextmanager
async def gateway_of(folder, model=None, **options):
    async with Gateway(model or ToyModel(), folder / "gateway", **options) as gateway:
        yield gateway


def played(agent, folder, env=Counting, model=None, limits=None, incomplete=False, seed=0, **options):
    """The trajectory of an agent, which is a text as users write it, or a function of this test."""

    async def play():
        made = agent_of(agent) if isinstance(agent, str) else agent
        async with gateway_of(folder, model, **options) as gateway:
            policy = AgentPolicy(made, gateway, seed, incomplete)
            trajectory = await play_agent(env(), policy, TASK, seed=seed, limits=limits or Limits())
            assert not gateway.episodes, "an episode that has ended takes no memory"
            return trajectory

    return asyncio.run(asyncio.wait_for(play(), 60))


def asking(episode):
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0)


async def ask(client, episode, messages, **settings):
    answer = await client.chat.completions.create(model=episode.model, messages=messages, **settings)
    return answer.choices[0].message.model_dump(exclude_none=True)


def call_of(name="count", **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


# ---- agents, as a user's file has them


async def counts(episode):
    """Asks the model before each of three calls, and says that it is done."""
    async with asking(episode) as client:
        messages = list(episode.messages)
        for _ in range(3):
            messages.append(await ask(client, episode, messages))
            messages += [user(told["content"]) for told in await episode.step(call_of())]
        messages.append(await ask(client, episode, messages))
    return "done"


async def deeper(episode, depth=1):
    return "done" * depth


def counts_in_a_thread(episode):
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as client:
        answer = client.chat.completions.create(model=episode.model, messages=episode.messages)
    return "done" if answer.choices and episode.step(call_of())[0]["content"] == "count 1" else "no"


async def counts_on(episode):
    async with asking(episode) as client:
        while not episode.over:
            await ask(client, episode, episode.messages)
            await episode.step(call_of())
        await ask(client, episode, [user("what was that?")])
        assert (await episode.step(call_of()))[0]["content"] == "The episode is over."


async def leaves(episode):
    await episode.step(call_of())


async def raises(episode):
    await episode.step(call_of())
    raise LookupError("I am lost")


async def cancels_its_own_task(episode):
    sleeping = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    sleeping.cancel()
    await sleeping


class Steps:
    async def __call__(self, episode):
        await episode.step(call_of())
        return "done"


steps = Steps()


def returns_a_coroutine(episode):
    return steps(episode)


async def asks_forever(episode):
    async with asking(episode) as client:
        await episode.step(call_of())
        while True:
            await ask(client, episode, episode.messages)


async def grows(episode):
    async with asking(episode) as client:
        await episode.step(call_of())
        messages = list(episode.messages)
        while True:
            messages += [await ask(client, episode, messages), user("more " * 10)]


async def hangs(episode):
    async with asking(episode) as client:
        await ask(client, episode, episode.messages)
        await episode.step(call_of())
        await asyncio.sleep(60)


RELEASED = threading.Event()


async def obeys_nobody(episode):
    """Goes on whenever it is cancelled, until the test releases it."""
    while not RELEASED.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def stays(episode):
    while not episode.over:
        await episode.step(call_of())
    await asyncio.sleep(60)


async def branches(episode):
    """A main line of two calls, and between them a title, one that top_p spoils, and two answers to one prompt."""
    async with asking(episode) as client:
        first = await ask(client, episode, episode.messages)
        await ask(client, episode, [user("a title, please")])
        await ask(client, episode, [user("hot")], top_p=0.5)
        await client.chat.completions.create(model=episode.model, messages=[user("two")], n=2)
        await ask(client, episode, [*episode.messages, first, user("go on")])
    return "done"
