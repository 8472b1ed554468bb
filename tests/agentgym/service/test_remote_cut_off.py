"""A served environment is told how its episode ends, and may judge it."""

import asyncio

from served import served

import agentgym
from agentgym import AsyncEnv, Env, ScriptedPolicy, Task, run_episode, user
from agentgym.core.registration import EnvSpec
from agentgym.service.client import lookup


class Judging(Env):
    max_turns = 9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user("go on")], {}

    def step(self, action):
        self.read(action)
        return self.outcome("go on", 0.25)

    def cut_off(self, reason):
        if self.task.answer == "fault":
            raise ValueError("no such luck")
        return [], 1.0, False, True, {"exit": reason}


class AsyncJudging(AsyncEnv, Judging):
    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed, options=options)
        return [user("go on")], {}

    async def step(self, action):
        return Judging.step(self, action)

    async def cut_off(self, reason):
        return Judging.cut_off(self, reason)


class Silent(Judging):
    cut_off = Env.cut_off


def test_what_it_says_counts_here(monkeypatch):
    monkeypatch.setattr(lookup, "known_records", {})
    names = ("Judging", "AsyncJudging", "Silent")
    specs = {name: EnvSpec(name, f"test_remote_cut_off:{name}") for name in names}

    def play(name, answer=None):
        policy = ScriptedPolicy(["word"], "context")
        return asyncio.run(run_episode(agentgym.make(f"{server.url}/{name}"), policy, Task("t", answer=answer)))

    with served(specs=specs) as server:
        done = {name: play(name) for name in names}
        failed = play("Judging", "fault")
    told = {name: (each.end, each.error, each.reward, each.turns[0].info) for name, each in done.items()}
    assert told["Judging"] == told["AsyncJudging"] == ("context", None, 1.25, {"exit": "context"})
    assert told["Silent"] == ("context", None, 0.25, {})
    assert "cut_off failed" in failed.error
    assert "no such luck" in failed.error
