"""Rubrics: what functions are given, how they are weighed and timed, and what happens when one fails."""

import asyncio
import functools
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentgym
from agentgym.checks.check_env import check_env
from agentgym.core import registration
from agentgym.core.env import Env
from agentgym.core.messages import assistant, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Trajectory, Turn
from agentgym.policies.base import ScriptedPolicy
from agentgym.rewards import (
    TAKES,
    Reward,
    Rewarded,
    RewardError,
    Rubric,
    boxed,
    env_reward,
    has_tags,
    length_penalty,
    matches,
)
from agentgym.rollout.episode import Limits, run_episode

TASK = Task("t1", (user("2 + 2?"),), answer="4")


def episode(*replies, rewards=None, info=None):
    turns = [
        Turn([user(f"q{i}")], assistant(reply), reward, dict(info or {}))
        for i, (reply, reward) in enumerate(zip(replies, rewards or [0.0] * len(replies), strict=True))
    ]
    return Trajectory("t1/0", "test", "t1", turns=turns, final_observation=[user("bye")])


def score(*rewards, trajectory=None, task=TASK):
    return asyncio.run(Rubric(rewards).score(trajectory or episode("4"), task))


def one(completion):
    return 1.0


def two(completion):
    return 2.0


# ---- what functions are given


def test_a_function_takes_what_it_names():
    seen = {}

    def look(task, answer, messages, completion, completions, info, reward, trajectory, own=7):
        seen.update(locals())
        return 0

    played = episode("first", "second", rewards=[0.5, 0.25], info={"lives": 3})
    score(look, trajectory=played)
    assert seen["task"] is TASK
    assert seen["answer"] == "4"
    assert [m["content"] for m in seen["messages"]] == ["q0", "first", "q1", "second", "bye"]
    assert (seen["completion"], seen["completions"]) == ("second", ["first", "second"])
    assert (seen["info"], seen["reward"], seen["own"]) == ({"lives": 3}, 0.75, 7)
    assert seen["trajectory"] is played
    assert set(TAKES) <= set(seen)


def test_objects_partials_and_positional_builtins():
    class Longer:
        def __call__(self, completion):
            return len(completion)

    def above(completion, limit):
        return len(completion) > limit

    got = score(Longer(), Reward(functools.partial(above, limit=0), name="above"))
    assert got.parts == {"longer": 1.0, "above": 1.0}
    with pytest.raises(TypeError, match=r"no parameter .* is given"):
        Reward(len)


def test_an_unknown_parameter_is_refused_when_the_reward_is_made():
    def wrong(completion, gold):
        return 0

    with pytest.raises(TypeError, match=r"reward 'wrong': no parameter 'gold' is given; there are task, answer, mess"):
        Rubric([wrong])


def test_a_function_of_the_task_needs_one():
    with pytest.raises(
        RewardError, match=r"reward 'right' of task 't1' failed: .*takes 'answer', and no task was given"
    ):
        score(Reward(lambda answer: 1, name="right"), task=None)


def test_an_episode_without_a_turn_has_an_empty_completion():
    assert score(Reward(lambda completion, completions, info: float(completion == "" and not completions), name="x"),
                 trajectory=episode()).total == 1.0  # fmt: skip


# ---- sums


def test_the_total_is_the_weighted_sum_and_the_parts_are_unweighted():
    got = score(Reward(one, weight=0.5), Reward(two, weight=-1), Reward(two, weight=0, name="watched"))
    assert got.total == -1.5
    assert got.parts == {"one": 1.0, "two": 2.0, "watched": 2.0}
    assert got.metrics == {"reward/one": 1.0, "reward/two": 2.0, "reward/watched": 2.0}


@pytest.mark.parametrize("value", [True, 3, np.float32(0.5), np.int64(2), np.True_])
def test_every_real_number_counts(value):
    assert score(Reward(lambda completion: value, name="v")).total == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", [1.0], 1j, np.array([1.0]), np.nan])
def test_anything_else_is_refused_with_the_reward_and_the_task(value):
    with pytest.raises(RewardError, match=r"reward 'v' of task 't1' must be a finite number, not "):
        score(one, Reward(lambda completion: value, name="v"))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Rubric([]), ValueError, "at least one"),
        (lambda: Rubric([one, Reward(one)]), ValueError, "two rewards are called 'one'"),
        (lambda: Reward(one, weight=math.nan), ValueError, "weight must be a finite number"),
        (lambda: Reward(one, timeout=0), ValueError, "timeout must be positive"),
        (lambda: Reward(one, timeout=math.inf), ValueError, "timeout must be positive"),
        (lambda: Reward(one, on_timeout=math.inf), ValueError, "on_timeout"),
        (lambda: Reward(lambda completion: 1, isolated=True), TypeError, "function of a module"),
        (lambda: Reward(behind, isolated=True), TypeError, "names completion before its own"),
        (lambda: Reward(slowly, isolated=True), TypeError, "plain `def`"),
    ],
)
def test_wrong_settings_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# ---- failures and time


def test_an_exception_names_the_reward_and_is_no_zero():
    def breaks(completion):
        raise KeyError("gone")

    with pytest.raises(RewardError, match="reward 'breaks' of task 't1' failed: KeyError: 'gone'"):
        score(one, breaks)


def test_a_failed_trajectory_has_no_reward():
    failed = Trajectory("t1/0", "test", "t1", end="error", error="the sandbox died")
    with pytest.raises(ValueError, match="failed and has no reward: the sandbox died"):
        score(one, trajectory=failed)


async def slowly(completion):
    await asyncio.sleep(30)


def stuck(completion):
    time.sleep(3)


def endless(completion):
    return 9**9**9  # holds the interpreter lock for hours


@pytest.mark.parametrize(("function", "isolated"), [(slowly, False), (stuck, False), (endless, True)])
def test_when_the_time_is_up_it_is_a_failure_or_a_number_as_was_asked(function, isolated):
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"reward '\w+' of task 't1' took longer than its limit of 0.2 s"):
        score(Reward(function, timeout=0.2, isolated=isolated))
    got = score(one, Reward(function, timeout=0.2, isolated=isolated, on_timeout=-0.5))
    assert got.total == 0.5
    assert time.monotonic() - started < 20


def behind(own=1, completion=""):
    return 0


def pid(completion, answer, own=3):
    return os.getpid() if (completion, answer, own) == ("4", "4", 3) else -1


def dies(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def raises(completion):
    raise ValueError("no verdict")


def test_an_isolated_function_runs_in_another_process():
    assert score(Reward(pid, isolated=True)).total not in (os.getpid(), -1)


@pytest.mark.parametrize(("function", "words"), [(dies, "WorkerDied: .*SIGKILL"), (raises, "no verdict")])
def test_what_goes_wrong_there_is_a_failure_here(function, words):
    with pytest.raises(RewardError, match=rf"reward '{function.__name__}' of task 't1' failed: .*{words}"):
        score(Reward(function, isolated=True, on_timeout=0.0))


def test_functions_run_at_the_same_time():
    met = threading.Barrier(2)
    both = asyncio.Event()

    def thread(completion):
        met.wait(30)
        return 1

    def other(completion):
        met.wait(30)
        return 1

    async def first(completion):
        await asyncio.wait_for(both.wait(), 30)
        return 1

    async def second(completion):
        both.set()
        return 1

    assert score(thread, other, first, second).total == 4


def test_the_first_failure_stops_the_others():
    ended = []

    async def waits(completion):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def fails(completion):
        await asyncio.sleep(0.01)
        raise RuntimeError("down")

    async def go():
        with pytest.raises(RewardError, match="reward 'fails'"):
            await Rubric([waits, fails]).score(episode("4"), TASK)
        await asyncio.sleep(0.1)
        return bool(ended)

    started = time.monotonic()
    assert asyncio.run(go()), "it was stopped, not left running"
    assert time.monotonic() - started < 10


# ---- format


@pytest.mark.parametrize(
    ("text", "anywhere", "alone"),
    [
        ("<think>a</think><answer>4</answer>", 1, 1),
        ("  <think></think>\n <answer>4</answer>\n", 1, 1),
        ("So <think>a</think> then <answer>4</answer>.", 1, 0),
        ("<answer>4</answer><think>a</think>", 0, 0),
        ("<think>a<answer>4</answer></think>", 0, 0),
        ("<think>a</think><answer>4", 0, 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0, 0),
        ("<think>a</think><answer>4</answer></answer>", 0, 0),
        ("</think>a<think><answer>4</answer>", 0, 0),
        ("<think><think>a</think><answer>4</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_has_tags(text, anywhere, alone):
    assert has_tags("think", "answer")(text) == anywhere
    assert has_tags("think", "answer", alone=True)(text) == alone


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (r"so \boxed{4}", 1),
        (r"\boxed{\frac{1}{2}}.", 1),
        (r"\boxed{1} no, \boxed{2}", 1),
        (r"\boxed{ }", 0),
        (r"\boxed{", 0),
        (r"\boxed{{1}", 0),
        (r"boxed{4}", 0),
        (r"\boxed{1} no, \boxed{2", 0),
    ],
)
def test_boxed(text, has):
    assert boxed(text) == has


def test_matches_searches_and_gives_up_on_an_expression_that_does_not_end():
    assert matches(r"\A\d+\Z")("42") == 1.0
    assert matches(r"\A\d+\Z")("42!") == 0.0
    assert matches("b.c", flags=16)("b\nc") == 1.0
    started = time.monotonic()
    assert matches(r"\A(a+)+b", timeout=0.3)("a" * 60) == 0.0
    assert time.monotonic() - started < 20
    with pytest.raises(Exception, match="unterminated"):
        matches("(")


def test_length_penalty_falls_evenly():
    penalty = length_penalty(10, 20)
    assert [penalty("x" * n) for n in (0, 10, 15, 20, 99)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="0 <= free < most"):
        length_penalty(5, 5)
    with pytest.raises(ValueError, match="needs the name"):
        has_tags()


@given(st.text(), st.integers(0, 50), st.integers(1, 50))
def test_format_rewards_take_any_text(text, free, more):
    assert has_tags("a")(text) in (0, 1)
    assert has_tags("a", alone=True)(text) <= has_tags("a")(text)
    assert boxed(text) in (0, 1)
    assert -1 <= length_penalty(free, free + more)(text) <= 0


# ---- in an environment


class Echo(Env):
    """Repeats what is said; "bye" ends it."""

    max_turns = 3

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(split)
        return TaskSet([Task(f"{split}-{i}", answer=str(i)) for i in range(4)], name=f"echo/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.threads = {threading.get_ident()}
        return [user("say something")], {}

    def step(self, action):
        self.threads.add(threading.get_ident())
        text = self.read(action)
        return self.outcome(f"you said {text}", 0.25, terminated=text == "bye", success=text == "bye", length=len(text))


class AsyncEcho(Echo):
    async def init(self, task):
        self.task = task

    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


def judged(completions, answer):
    return completions.count(answer)


async def judged_later(messages):
    await asyncio.sleep(0.001)
    return len(messages)


def play(rubric, script, env_class=Echo, limits=None):
    env = Rewarded(env_class(), Rubric(rubric))
    return asyncio.run(run_episode(env, ScriptedPolicy(script), Task("t", answer="2"), limits=limits or Limits())), env


@pytest.mark.parametrize("env_class", [Echo, AsyncEcho])
@pytest.mark.parametrize("later", [False, True])
def test_the_rubric_replaces_the_reward_at_the_end_of_the_episode(env_class, later):
    rubric = [Reward(judged, 2.0), Reward(env_reward, 0.1), *([Reward(judged_later, 0.0)] if later else [])]
    trajectory, env = play(rubric, ["2", "2", "bye"], env_class)
    assert trajectory.error is None
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([0, 0, 4 + 0.075])
    assert trajectory.metrics["reward/judged"] == 2.0
    assert trajectory.metrics["reward/env_reward"] == 0.75
    assert trajectory.metrics["success"] == 1.0
    assert trajectory.metrics["length"] == 3
    if later:
        assert trajectory.metrics["reward/judged_later"] == 7
    assert len(env.unwrapped.threads) == 1, "the environment's calls share one thread"


def test_an_episode_that_the_environment_truncates_is_scored_and_one_that_the_loop_cuts_is_not():
    ends = []

    def end(trajectory):
        ends.append(trajectory.end)
        return 1.0

    assert play([end], ["a", "b", "c"])[0].reward == 1.0
    cut, _ = play([end], ["a", "b", "c"], limits=Limits(max_turns=2))
    assert (cut.end, cut.reward) == ("max_turns", 0.0)
    assert ends == ["truncated"]


def test_episodes_in_one_environment_are_apart():
    env = Rewarded(Echo(), Rubric([turns]))

    async def go():
        return [
            (await run_episode(env, ScriptedPolicy(script), Task("t"))).reward for script in (["a", "bye"], ["bye"])
        ]

    assert asyncio.run(go()) == [2, 1]


@pytest.mark.parametrize("bad", [lambda completion: 1 / 0, lambda completion: math.nan])
def test_a_reward_that_fails_fails_the_trajectory(bad):
    trajectory, _ = play([Reward(bad, name="bad")], ["bye"])
    assert trajectory.failed
    assert "reward 'bad' of task 't'" in trajectory.error


def test_plain_gymnasium_users_get_plain_values():
    env = Rewarded(Echo(), Rubric([judged]))
    env.reset(seed=0)
    assert env.step("1")[1] == 0.0
    observation, reward, terminated, truncated, info = env.step("bye")
    assert (reward, terminated, truncated, info["reward/judged"]) == (0.0, True, False, 0.0)
    assert observation[0]["content"] == "you said bye"

    async def in_a_loop():
        env.reset(seed=0)
        return await env.step("bye")

    assert asyncio.run(in_a_loop())[2]


def turns(completions):
    return len(completions)


def rewarded_echo(**kwargs):
    return Rewarded(Echo(**kwargs), Rubric([judged]))


def test_it_can_be_registered_checked_and_rewarded_again(monkeypatch):
    monkeypatch.setattr(registration, "registered_specs", dict(registration.registered_specs))
    agentgym.register("test/rewarded", rewarded_echo, tasks=Echo.default_tasks)
    assert check_env("test/rewarded") == []
    env = Rewarded(agentgym.make("test/rewarded", max_turns=1), Rubric([Reward(env_reward, -1.0)]))
    task = TaskSet.load("test/rewarded", "test")[1]
    trajectory = asyncio.run(run_episode(env, ScriptedPolicy(["1"]), task))
    assert (trajectory.env, trajectory.reward) == ("test/rewarded", -1.0)
    assert {"reward/judged", "reward/env_reward"} <= set(trajectory.metrics)
