"""Many episodes at once in containers, and what a Docker Engine that dies in the middle costs."""

import asyncio
import threading
import time

import pytest

import agentgym
from agentgym.core.messages import assistant, text_of
from agentgym.policies.base import ExpertPolicy, Reply
from agentgym.rollout.episode import Episode, Limits, run_many
from agentgym.sandbox.backends import engine
from agentgym.sandbox.backends.docker import docker_sandboxes
from agentgym.sandbox.backends.select import close_pools

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(280)]
ENV = "math_python"  # holds a session with state, so that a lost sandbox is a lost episode
LIMITS = Limits(init_timeout=180.0, step_timeout=120.0)


@pytest.fixture(autouse=True)
def _pools(monkeypatch, own_engine):
    close_pools()
    own_engine.start()
    monkeypatch.setenv("AGENTGYM_SANDBOX", "docker")
    yield
    close_pools(timeout=30.0)


class Worker(ExpertPolicy):
    """Takes two steps in its session that depend on each other, waits in between, and then does what the expert does."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.taken = 0
        self.steps = iter(["```python\nkept = 6\n```", "```python\nprint(kept * 7)\n```"])

    async def act(self, messages, tools):
        if self.taken:
            await self.between(self.taken)
        self.taken += 1
        step = next(self.steps, None)
        if step is None:
            assert "42" in text_of(messages[-1])
            return Reply(assistant(await self._call(self._env.expert_answer)))
        return Reply(assistant(step))

    def attach(self, env, call):
        super().attach(env, call)
        self._env = env


def play(count, concurrency, between, on_end=lambda trajectory: None, retries=0):
    tasks = agentgym.spec(ENV).tasks("train")
    episodes = [Episode(tasks[i % len(tasks)], i // len(tasks), seed=i) for i in range(count)]
    return asyncio.run(
        run_many(
            lambda: agentgym.make(ENV),
            lambda episode: Worker(between),
            episodes,
            concurrency=concurrency,
            limits=LIMITS,
            retries=retries,
            on_end=on_end,
        )
    )


def test_64_episodes_at_once_in_containers_all_complete():
    most = 0
    everyone = asyncio.Event()
    waiting = set()

    async def until_all_are_here(step):
        """Each of the first 64 waits in the middle of its episode until all of them have a container."""
        nonlocal most
        waiting.add(asyncio.current_task())
        if len(waiting) == 64 and not everyone.is_set():
            most = len(docker_sandboxes())
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 200)

    done = play(64, 64, until_all_are_here)
    assert [t.error for t in done if t.failed] == []
    assert all(t.reward == 1.0 for t in done)
    assert most == 64


def test_a_killed_engine_fails_the_episodes_that_it_ran_and_no_others(own_engine):
    """The engine dies after 20 of 80 episodes and is back 3 s later: the rest is played by the same call."""
    at_once, ended, back = 8, [], []

    async def outage(step):
        """The first episode that is between two steps in its session, once 20 are over, kills the engine under all."""
        await asyncio.sleep(0.3)
        if len(ended) >= 20 and step == 1 and not back:
            back.append(threading.Timer(3.0, own_engine.start))
            await asyncio.to_thread(own_engine.kill)
            back[0].start()

    done = play(80, at_once, outage, ended.append)
    back[0].join()
    failed = [t for t in done if t.failed]
    assert len(done) == 80
    assert 1 <= len(failed) <= at_once
    assert all("SandboxError" in t.error for t in failed)
    assert all(t.reward == 1.0 for t in done if not t.failed)
    close_pools(timeout=30.0)
    deadline = time.monotonic() + 30
    while docker_sandboxes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [box.id for box in docker_sandboxes() if box.alive] == []


def test_an_engine_that_was_restarted_while_the_agent_thought_is_an_error_and_the_episode_is_played_again(own_engine):
    """It is up when the loss is noticed, and the programs of the agent had run: but nothing that they did has stopped it."""
    restarted = []

    async def restart(step):
        if step == 1 and not restarted:
            restarted.append(True)
            await asyncio.to_thread(own_engine.kill)
            await asyncio.to_thread(own_engine.start)

    (played,) = play(1, 1, restart, retries=1)
    assert (played.reward, played.agent_failure) == (1.0, None)
    assert "SandboxError" in played.metadata["errors"][0]


def test_a_sandbox_that_is_lost_while_the_engine_is_up_is_the_agents_failure(own_engine):
    async def lose(step):
        if step == 1:
            for box in docker_sandboxes():
                await asyncio.to_thread(engine.client().kill, box.id)

    (played,) = play(1, 1, lose, retries=1)
    assert (played.end, played.reward, played.agent_failure) == ("terminated", 0.0, "sandbox_lost")
    assert "errors" not in played.metadata
