"""An episode that the loop or the policy ends: the environment may judge what there is."""

import asyncio
import time

import pytest

from agentgym import AsyncEnv, Blocking, Env, ScriptedPolicy, Task, Wrapper, run_episode, user
from agentgym.core.agent_failure import AgentFailure
from agentgym.policies.base import EndEpisode, Reply
from agentgym.rewards import Rewarded, Rubric
from agentgym.rollout.episode import Limits

TASK = Task("t")
NONE = Limits()


class Saved(Env):
    """Counts the words that it is told, and pays for them at the end, or when it is cut off."""

    max_turns = 9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.words = 0
        return [user("go on")], {}

    def step(self, action):
        text = self.read(action)
        self.words += len(text.split())
        done = text == "done"
        return self.outcome("go on", float(self.words) if done else 0.0, done, success=done, words=self.words)

    def cut_off(self, reason):
        if reason == "fault":
            raise {"agent": AgentFailure("sandbox_lost"), "own": ValueError("no such luck")}[self.task.answer]
        if reason == "hang":
            time.sleep(20)
        self.running = False
        return [user(f"cut off: {reason}")], float(self.words), False, True, {"success": True, "exit": reason}


class AsyncSaved(AsyncEnv, Saved):
    async def reset(self, *, seed=None, options=None):
        await super().reset(seed=seed, options=options)
        self.words = 0
        return [user("go on")], {}

    async def step(self, action):
        return Saved.step(self, action)

    async def cut_off(self, reason):
        await asyncio.sleep(0)
        return Saved.cut_off(self, reason)


class Plain(Saved):
    cut_off = Env.cut_off


def play(env, *replies, end="context", task=TASK, limits=NONE):
    return asyncio.run(run_episode(env, ScriptedPolicy(replies, end), task, limits=limits))


def judged(done):
    last = done.turns[-1].info if done.turns else {}
    return done.end, done.error, done.reward, done.metrics.get("success"), last.get("exit")


@pytest.mark.parametrize(("limits", "end"), [(Limits(), "context"), (Limits(max_turns=2), "max_turns")])
def test_its_last_step_counts_and_the_reason_stays(limits, end):
    done = play(Saved(), *["two words"] * (2 if end == "context" else 5), limits=limits)
    assert judged(done) == (end, None, 4.0, 1.0, end)
    assert [turn.reward for turn in done.turns] == [0.0, 4.0]
    assert done.turns[-1].info == {"success": True, "words": 4, "exit": end}
    assert done.final_observation == [user("go on"), user(f"cut off: {end}")]


def test_so_it_does_when_the_time_is_up():
    class Slow:
        said = False

        async def act(self, messages, tools):
            if self.said:
                await asyncio.sleep(30)
            self.said = True
            return Reply({"role": "assistant", "content": "word"})

    done = asyncio.run(run_episode(Saved(), Slow(), TASK, limits=Limits(episode_timeout=0.5)))
    assert judged(done) == ("time", None, 1.0, 1.0, "time")


def test_without_the_method_an_episode_keeps_what_it_has():
    assert judged(play(Plain(), "two words")) == ("context", None, 0.0, 0.0, None)


def test_an_episode_that_has_ended_or_has_no_turn_is_not_judged():
    assert judged(play(Saved(), "done")) == ("terminated", None, 1.0, 1.0, None)
    assert judged(play(Saved(), end="quit")) == ("quit", None, 0.0, None, None)


@pytest.mark.parametrize(
    "make",
    [AsyncSaved, lambda: Wrapper(Saved()), lambda: Wrapper(AsyncSaved()), lambda: Blocking(Wrapper(AsyncSaved()))],
)
def test_async_and_wrapped_environments_judge_too(make):
    assert judged(play(make(), "two words")) == ("context", None, 2.0, 1.0, "context")


@pytest.mark.parametrize("make", [Saved, AsyncSaved])
def test_a_rubric_scores_what_the_environment_judged(make):
    def seen(trajectory, reward):
        return 10 * reward + (trajectory.end == "context")

    done = play(Rewarded(make(), Rubric([seen])), "two words")
    assert judged(done) == ("context", None, 21.0, 1.0, "context")
    assert done.metrics["reward/seen"] == 21.0
    assert play(Rewarded(Plain(), Rubric([seen])), "two words").reward == 0.0


def test_what_the_agent_s_programs_break_gets_the_floor_and_what_fails_else_is_an_error():
    done = play(Saved(), "word", end="fault", task=Task("t", answer="agent"))
    assert (done.end, done.agent_failure, done.reward) == ("fault", "sandbox_lost", 0.0)
    failed = play(Saved(), "word", end="fault", task=Task("t", answer="own"))
    assert failed.failed
    assert "turn 1: cut_off failed after 0.0 s: ValueError: no such luck" in failed.error


def test_it_has_the_time_limit_of_a_step():
    failed = play(Saved(), "word", end="hang", limits=Limits(step_timeout=0.3))
    assert failed.error.endswith("turn 1: cut_off took longer than its limit of 0.3 s")


def test_a_policy_that_gives_up_says_why():
    class Tired:
        async def act(self, messages, tools):
            if len(messages) > 1:
                raise EndEpisode("enough")
            return Reply({"role": "assistant", "content": "word"})

    assert judged(asyncio.run(run_episode(Saved(), Tired(), TASK))) == ("enough", None, 1.0, 1.0, "enough")
