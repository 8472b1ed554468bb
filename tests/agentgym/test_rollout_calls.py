"""How the agent loop calls an environment: `init` and `reset` in one go, and lanes, whose threads answer to event loops."""

import asyncio
import contextlib
import threading
import time

import pytest

from agentgym.core.env import Env
from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import assistant, user
from agentgym.core.tasks import Task
from agentgym.policies.base import Policy, Reply, ScriptedPolicy
from agentgym.rollout import calls
from agentgym.rollout.episode import Episode, Limits, close_env, run_episode, run_many


def run(coroutine):
    return asyncio.run(coroutine)


def say():
    return ScriptedPolicy(["something"])


class Opening(Env):
    """Its task's answer names what `init` and `reset` do: how long each sleeps, or what it raises."""

    def init(self, task):
        super().init(task)
        self.do(task.answer.get("init"))

    def reset(self, *, seed=None, options=None):
        self.resets = getattr(self, "resets", 0) + 1
        self.do(self.task.answer.get("reset"))
        super().reset(seed=seed, options=options)
        return [user("say something")], {}

    def step(self, action):
        return self.outcome(self.read(action), 1.0, terminated=True)

    def do(self, fault):
        if isinstance(fault, str):
            raise ValueError(fault)
        time.sleep(fault or 0)


class LaterInit(Opening):
    """Its `init` is a `def` that returns a coroutine."""

    def init(self, task):
        async def later():
            Env.init(self, task)
            if (fault := task.answer.get("init")) and not isinstance(fault, str):
                await asyncio.sleep(fault)
            elif fault:
                raise ValueError(fault)

        return later()


@pytest.mark.parametrize("env_class", [Opening, LaterInit])
@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"init": 0.7}, "turn 0: init took longer than its limit of 0.4 s"),
        ({"reset": 0.7}, "turn 0: reset took longer than its limit of 0.2 s"),
        ({"init": "no such luck"}, "turn 0: init failed after 0.0 s: ValueError: no such luck"),
        ({"reset": "no such luck"}, "turn 0: reset failed after 0.0 s: ValueError: no such luck"),
        ({"init": 0.3}, None),
        ({"init": 0.3, "reset": 0.1}, None),
    ],
)
def test_init_and_reset_go_to_the_thread_together_and_have_limits_of_their_own(env_class, faults, words):
    limits = Limits(init_timeout=0.4, reset_timeout=0.2, close_timeout=0.2)
    env = env_class()
    trajectory = run(run_episode(env, say(), Task("t", answer=faults), limits=limits))
    assert (trajectory.error or "").partition("'t', ")[2].partition(" (test_")[0] == (words or "")
    assert trajectory.end == ("error" if words else "terminated")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"usage": {"prompt_tokens": "10"}}, "act failed after 0.0 s: TypeError: a reply's usage must be numbers"),
        ({"usage": None}, "act failed after 0.0 s: TypeError: a reply's usage must be numbers by name, not None"),
        (
            {"finish_reason": 5},
            "act failed after 0.0 s: TypeError: a reply's finish_reason must be text or None, not 5",
        ),
    ],
)
def test_a_policy_whose_reply_makes_no_sense_fails_its_episode(odd, words):
    reply = Reply({"role": "assistant", "content": "x"}, **odd)
    trajectory = run(run_episode(Opening(), ScriptedPolicy([reply]), Task("t", answer={})))
    assert trajectory.end == "error"
    assert words in trajectory.error


class Panic(BaseException):
    """As libraries in Rust raise: no Exception."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class MutePanic(Panic):
    __str__ = Mute.__str__


class Raising(Opening):
    """Raises its task's answer in `init`, `reset` or `step`."""

    def init(self, task):
        super().init(task)
        self.fail("init")

    def reset(self, *, seed=None, options=None):
        self.fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.fail("step")
        return super().step(action)

    def do(self, fault):
        pass

    def fail(self, where):
        if where in self.task.answer:
            raise self.task.answer[where]


class RaisingAsync(Raising):
    async def init(self, task):
        super().init(task)

    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


class RaisingPolicy(Policy):
    def __init__(self, error):
        self.error = error

    async def act(self, messages, tools):
        if self.error is not None:
            raise self.error
        return Reply(assistant("something"))


@pytest.mark.parametrize("env_class", [Raising, RaisingAsync])
@pytest.mark.parametrize("where", ["init", "reset", "step", "act"])
@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (Panic("rust"), "RuntimeError: Panic(rust) was raised by the call"),
        (SystemExit(3), "RuntimeError: SystemExit(3) was raised by the call"),
        (Mute(), "Mute: <its __str__ raises ValueError>"),
        (MutePanic(), "RuntimeError: MutePanic(<its __str__ raises ValueError>) was raised by the call"),
    ],
)
def test_whatever_is_raised_ends_its_own_episode_and_is_named(env_class, where, raised, words):
    episodes = [Episode(Task("bad", answer={where: raised})), Episode(Task("good", answer={}))]
    policies = {"bad": RaisingPolicy(raised if where == "act" else None), "good": RaisingPolicy(None)}
    playing = run_many(
        env_class, lambda episode: policies[episode.task.id], episodes, limits=Limits(5, None, 2, 2, 2, 2, 2), retries=0
    )
    bad, good = run(playing)
    assert good.end == "terminated"
    assert bad.end == "error"
    assert f"{where} failed after 0.0 s: {words}" in bad.error


def test_an_environment_whose_init_failed_or_was_given_up_is_not_reset():
    limits = Limits(init_timeout=0.2, close_timeout=1.0)
    for fault in ("no such luck", 0.4):
        env = Opening()
        assert run(run_episode(env, say(), Task("t", answer={"init": fault}), limits=limits)).failed
        run(close_env(env, 2.0))
        assert not hasattr(env, "resets")


def test_what_a_loop_left_behind_does_not_reach_the_next_one():
    """A call that outlives its event loop answers to nobody, and the threads' answers in the next loop arrive."""
    gate = threading.Event()
    lane = EnvExecutor("left behind")

    async def abandon():
        lane.start(gate.wait, 5)

    run(abandon())
    gate.set()
    for _ in range(3):
        assert run(lane.call(lambda: 7)) == 7
    assert not lane.busy
    lane.stop()


def test_a_call_that_is_cancelled_before_its_turn_is_left_out():
    called, gate = [], threading.Event()

    async def play():
        lane = EnvExecutor("turns")
        first = lane.start(gate.wait, 5)
        second = lane.start(called.append, "second")
        third = lane.start(called.append, "third")
        second.cancel()
        gate.set()
        await asyncio.wait_for(third, 5)
        lane.stop()
        return await first

    assert run(play())
    assert called == ["third"]


def test_a_task_that_swallows_its_cancellation_keeps_nobody_from_leaving(monkeypatch):
    """A command's end waits for its tasks, as `asyncio.run` would wait for ever."""
    monkeypatch.setattr(calls, "LEAVE_SECONDS", 0.1)
    ended = []

    async def deaf():
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)

    async def obedient():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("obedient")

    async def main():
        tasks.extend(asyncio.create_task(each()) for each in (deaf, obedient))
        await asyncio.sleep(0)
        return "done"

    tasks: list = []
    assert asyncio.run(calls.leaving(main())) == "done"
    assert ended == ["obedient"]
