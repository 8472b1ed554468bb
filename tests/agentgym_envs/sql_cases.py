"""What the tests of the sql environment share: tasks, replies, and playing one or many episodes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import one_episode
import pytest

import agentgym
from agentgym import sandbox
from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym.sandbox import SandboxError
from agentgym_envs.sql.tasks import load_questions

PARALLEL = 4


def need_sandbox(backend=None):
    """Skip the test where this machine has no such back end; with AGENTGYM_NEED_SANDBOXES, as in CI, it fails."""
    try:
        sandbox.choose(backend, "sql")
    except SandboxError as error:
        if os.environ.get("AGENTGYM_NEED_SANDBOXES"):
            raise
        pytest.skip(str(error))


def question(gold="SELECT COUNT(*) FROM book", database="library", **metadata):
    return Task("mine", (user("How many?"),), gold, metadata={"database": database, **metadata})


def started(env, task=None):
    observation, _ = env.reset(options={"task": task or question()})
    return observation[-1]["content"]


def call(name, query):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'query': query}})}</tool_call>"


def look(env, query):
    (message,) = env.step(call("sql", query))[0]
    return message["content"].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def reward_of(env, task, query):
    started(env, task)
    return env.step(call("answer", query))[1]


def play(task, reply, **kwargs):
    """Play one episode: the rewards' sum, the turns and the last info."""
    with closing(agentgym.make("sql", **kwargs)) as env:
        return one_episode.play(env, task, reply)


def play_all(tasks, reply, **kwargs):
    with ThreadPoolExecutor(PARALLEL) as threads:
        return list(threads.map(lambda task: play(task, reply, **kwargs), tasks))


def all_of(data):
    return [task for split in ("train", "test") for task in load_questions(split, data)]
