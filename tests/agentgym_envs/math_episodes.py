"""Episodes of the mathematics environments with Python, for their tests."""

from __future__ import annotations

import asyncio

import pytest

import agentgym
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task
from agentgym.policies.base import Reply
from agentgym.rollout.episode import Episode, run_many


def problem(answer="18", **more):
    return Task("mine", ({"role": "user", "content": "How many?"},), answer, **more)


@pytest.fixture
def make():
    """Makes an environment in an episode of a task; all are closed at the end."""
    made = []

    def start(env_id="math_python", task=None, **kwargs):
        env = agentgym.make(env_id, **kwargs)
        made.append(env)
        env.reset(options={"task": task or problem()})
        return env

    yield start
    for env in made:
        env.close()


def code(text):
    return f"```python\n{text}\n```"


class Playing:
    """A policy that asks the environment itself, within the one agent loop."""

    def __init__(self, choose):
        self.choose = choose

    def attach(self, env, call):
        self.env, self.call = env, call

    async def act(self, messages, tools):
        return Reply(assistant(await self.call(lambda: self.choose(self.env.unwrapped))))


def play_all(env_id, tasks, choose, concurrency=8, **kwargs):
    """Many episodes at a time; none may fail."""
    ends = asyncio.run(
        run_many(
            lambda: agentgym.make(env_id, **kwargs),
            lambda episode: Playing(choose),
            [Episode(task) for task in tasks],
            concurrency=concurrency,
            retries=0,
        )
    )
    assert [end.error for end in ends if end.failed] == []
    return ends
