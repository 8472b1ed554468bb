"""Every registered environment is a Gymnasium environment, alone and in Gymnasium's vector environments."""

import contextlib
import copy
import functools
import random

import gymnasium
import pytest

import agentgym
from agentgym.checks.check_env import check_env
from agentgym.core.registration import registry

IDS = sorted(set(registry) - {"swe_bench"})  # whose images are built for each task; see test_swe_bench_env.py
EVERY = [pytest.param(id, marks=pytest.mark.sandbox if "sandbox" in registry[id].tags else ()) for id in IDS]
SEED = 11


def test_the_project_registers_environments():
    assert {"frozen_lake", "sokoban", "gsm8k", "gsm8k_tool", "countdown"} <= set(IDS)


@pytest.mark.parametrize("env_id", EVERY)
def test_agentgym_check_finds_nothing(env_id):
    """Gymnasium's own check is one of its checks, and that the spec goes through pickle and JSON another."""
    assert check_env(env_id) == []


def play(env, seed, actions):
    """An episode of an environment, which is closed afterwards."""
    with contextlib.closing(env):
        return played(env, seed, actions)


def played(env, seed, actions):
    observation, _ = env.reset(seed=seed)
    out = [copy.deepcopy(observation)]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        out.append((copy.deepcopy(observation), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return out


def actions_of(env_id, count=3):
    with contextlib.closing(agentgym.make(env_id)) as env:
        env.reset(seed=SEED)
        env.action_space.seed(SEED)
        rng = random.Random(SEED)
        choose = getattr(env.unwrapped, "random_action", None)
        return [choose(rng) if choose else env.action_space.sample() for _ in range(count)]


# In processes of their own: one of each kind, since what they are given is checked for all above.
ASYNC = [pytest.param("async", env_id, marks=of) for env_id, of in (("sokoban", ()), ("sql", pytest.mark.sandbox))]


@pytest.mark.parametrize(("kind", "env_id"), [*(pytest.param("sync", *e.values, marks=e.marks) for e in EVERY), *ASYNC])
def test_vector_envs_agree_with_single_ones(kind, env_id):
    makers = [functools.partial(agentgym.make, env_id) for _ in range(2)]
    vector = (
        gymnasium.vector.SyncVectorEnv(makers)
        if kind == "sync"
        else gymnasium.vector.AsyncVectorEnv(makers, shared_memory=False)
    )
    try:
        actions = actions_of(env_id)
        singles = [play(agentgym.make(env_id), SEED + i, actions) for i in range(2)]
        observations, _ = vector.reset(seed=SEED)
        assert list(observations) == [single[0] for single in singles]
        for turn in range(1, min(map(len, singles))):
            action = actions[turn - 1]
            observations, rewards, terminated, truncated, _ = vector.step((action, action))
            got = [(observations[i], float(rewards[i]), bool(terminated[i]), bool(truncated[i])) for i in range(2)]
            assert got == [single[turn] for single in singles]
    finally:
        vector.close()


@pytest.mark.parametrize("env_id", EVERY)
def test_a_drawn_task_plays_like_the_same_task_bound(env_id):
    drawn = agentgym.make(env_id)
    actions = actions_of(env_id)
    first = play(drawn, SEED, actions)
    bound = agentgym.make(env_id)
    bound.init(drawn.unwrapped.task)
    assert play(bound, SEED, actions) == first
