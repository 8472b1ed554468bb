"""Tasks become groups: the right tasks, in order, by seeds of their own, and a failure costs its own trajectory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_train.config.schema import Config, EngineConfig, TinyConfig
from agent_train.data.samples import samples_of
from agent_train.engine.base import Completion, Engine, EngineError, EngineLostError, Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler, TokenPolicy, admit
from agent_train.trainer.rl import sampler_of
from agentgym.core.messages import user
from agentgym.core.registration import make, spec
from agentgym.core.tasks import Task
from agentgym.policies.base import EndEpisode
from agentgym.rollout.episode import run_episode
from agentgym_envs.games.frozen_lake import FrozenLake

SAMPLING = Sampling(max_tokens=6, temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    build_tiny(
        path, texts_of_env("frozen_lake", n=16), TinyConfig(hidden=64, layers=2, heads=2, intermediate=96), 512, seed=0
    )
    return path


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def engine(folder):
    engine = EmbeddedEngine(folder, 512, request_timeout=30)
    yield engine
    asyncio.run(engine.close())


def lake():
    return make("frozen_lake")


def tasks(n: int) -> list[Task]:
    return list(spec("frozen_lake").tasks("train").take(n))


def play(engine, renderer, problems, make_env=lake, **changes):
    given = {name: changes.pop(name) for name in ("on_end", "before") if name in changes}
    step = changes.pop("step", 0)
    settings = {"sampling": SAMPLING, "group_size": 3, "seed": 11, **changes}
    return asyncio.run(Sampler(make_env, engine, renderer, **settings).collect(problems, step, **given))


def sampled(groups):
    return [[turn.tokens.completion_ids for turn in t.turns] for group in groups for t in group.trajectories]


def test_groups_keep_the_order_of_tasks_and_samples(engine, renderer):
    problems, ended = tasks(3), []
    groups = play(engine, renderer, problems, on_end=ended.append)
    assert [group.task_id for group in groups] == [task.id for task in problems]
    assert [t.id for group in groups for t in group.trajectories] == [
        f"{task.id}/{k}" for task in problems for k in range(3)
    ]
    assert Counter(t.id for t in ended) == Counter(t.id for group in groups for t in group.trajectories)
    assert not any(t.failed for t in ended)
    schedules = [t.metadata["schedule"] for t in ended]
    assert all(of["began"] < of["ended"] and of["version"] == engine.version for of in schedules)
    assert [of["ended"] for of in schedules] == sorted(of["ended"] for of in schedules)
    assert engine.live_sessions == 0


def test_every_sample_has_a_seed_of_its_own_and_samples_its_own_way(engine, renderer):
    groups = play(engine, renderer, tasks(2))
    seeds = [t.seed for group in groups for t in group.trajectories]
    assert len(set(seeds)) == 6
    assert len({str(ids) for ids in sampled(groups)}) == 6
    assert not {t.seed for g in play(engine, renderer, tasks(2), step=1) for t in g.trajectories} & set(seeds)
    assert not {t.seed for g in play(engine, renderer, tasks(2), seed=12) for t in g.trajectories} & set(seeds)


def test_deterministic_rollouts_are_equal_to_the_last_bit_however_long_a_step_takes(folder, renderer):
    settings = EngineConfig("embedded", max_model_len=512, batch_wait=0.1, request_timeout=0.5)

    def played(deterministic: bool, *slow: tuple[str, int]):
        """Tokens and log-probabilities; steps of these tasks and turns take a second."""

        class Slow(FrozenLake):
            def step(self, action):
                if (self.task.id, self.turn) in slow:
                    slow_steps.append(self.task.id)
                    time.sleep(1.0)
                return super().step(action)

        async def play():
            engine = await EmbeddedEngine.start(settings, folder, folder, dtype="float32", deterministic=deterministic)
            groups = await Sampler(Slow, engine, renderer, SAMPLING, group_size=3, seed=11).collect(tasks(2), 0)
            await engine.close()
            return [[t.error, [vars(turn.tokens) for turn in t.turns]] for group in groups for t in group.trajectories]

        return asyncio.run(play())

    slow_steps: list[str] = []
    one = tasks(2)[1].id
    undisturbed = played(True)
    assert played(True, (one, 1)) == undisturbed
    assert len(slow_steps) == 3
    # Where the batch does not wait, the others go on without them: this could fail.
    assert played(False, (one, 1)) != undisturbed


def test_a_second_rollout_of_a_step_counts_on(engine, renderer):
    first, second = tasks(1), tasks(2)
    groups = play(engine, renderer, first, group_size=2) + play(engine, renderer, second, group_size=2, before=first)
    played = [t for group in groups for t in group.trajectories]
    assert [t.id for t in played] == [f"{first[0].id}/{k}" for k in range(4)] + [f"{second[1].id}/{k}" for k in (0, 1)]
    assert len({t.seed for t in played}) == 6


def test_greedy_episodes_take_the_likeliest_token_whatever_the_seed(engine, renderer):
    one, other = (
        asyncio.run(Sampler(lake, engine, renderer, SAMPLING, seed=seed).play_greedily(tasks(2), 0)) for seed in (1, 2)
    )
    assert [t.task_id for t in one] == [task.id for task in tasks(2)]
    for trajectory, again in zip(one, other, strict=True):
        first = trajectory.turns[0].tokens
        assert again.turns[0].tokens.completion_ids == first.completion_ids
        with torch.no_grad():
            logits_V = engine.model(torch.tensor([first.prompt_ids])).logits[0, -1]
        assert first.completion_ids[0] == int(logits_V.argmax())


@pytest.mark.parametrize("concurrency", [64, 2])
def test_the_same_seed_gives_the_same_tokens_at_any_concurrency(engine, renderer, concurrency):
    again = play(engine, renderer, tasks(2), concurrency=concurrency)
    assert sampled(again) == sampled(play(engine, renderer, tasks(2)))


def test_what_the_engine_sampled_is_what_is_trained(engine, renderer):
    """With the model itself as the judge: the log-probability of each sampled id, given the row before it, is the row's."""
    model = engine.model
    for group in play(engine, renderer, tasks(2)):
        for trajectory in group.trajectories:
            (row,) = samples_of(trajectory, SAMPLING.temperature)
            assert (
                sum(row.mask)
                == trajectory.sampled_tokens
                == sum(len(t.tokens.completion_ids) for t in trajectory.turns)
            )
            with torch.no_grad():
                logits_TV = model(torch.tensor([row.ids])).logits[0].float() / SAMPLING.temperature
            logprobs_TV = logits_TV.log_softmax(-1)
            for t, masked in enumerate(row.mask):
                if masked:
                    assert logprobs_TV[t - 1, row.ids[t]].item() == pytest.approx(row.logprobs[t], abs=1e-4)


def test_a_task_that_comes_twice_has_two_groups_with_ids_of_their_own(engine, renderer):
    (task,) = tasks(1)
    first, second = play(engine, renderer, [task, task], group_size=2)
    assert [t.id for t in first.trajectories] == [f"{task.id}/0", f"{task.id}/1"]
    assert [t.id for t in second.trajectories] == [f"{task.id}/2", f"{task.id}/3"]


def test_an_environment_that_fails_costs_its_own_trajectory(engine, renderer):
    """A fault on purpose: the first task's environment cannot be reset."""
    problems = tasks(2)

    class Broken(type(lake().unwrapped)):
        def reset(self, *, seed=None, options=None):
            if self.task.id == problems[0].id:
                raise OSError("no disk")
            return super().reset(seed=seed, options=options)

    broken, whole = play(engine, renderer, problems, make_env=Broken)
    assert all(t.failed and "no disk" in t.error for t in broken.trajectories)
    assert not any(t.failed for t in whole.trajectories)
    assert len(broken.trajectories) == len(whole.trajectories) == 3
    assert sampled([whole]) == sampled(play(engine, renderer, problems)[1:])


@pytest.mark.parametrize("fault", ["raises", "returns nothing"])
def test_a_rollout_of_ones_own_that_fails_costs_its_own_trajectory(engine, renderer, fault):
    async def mine(env, policy, task, *, sample, **more):
        if sample == 1 and fault == "raises":
            raise KeyError("no such thing")
        return None if sample == 1 else await run_episode(env, policy, task, sample=sample, **more)

    (group,) = play(engine, renderer, tasks(1), group_size=3, play=mine)
    assert [t.failed for t in group.trajectories] == [False, True, False]
    words = {"raises": "KeyError: 'no such thing' (test_generator.py:", "returns nothing": "not NoneType"}[fault]
    assert f"env.rollout failed for task {group.task_id!r}: " in group.trajectories[1].error
    assert words in group.trajectories[1].error


def test_a_dead_engine_fails_every_trajectory_and_then_the_rollout(engine, renderer):
    asyncio.run(engine.close())
    ended = []
    with pytest.raises(EngineError):
        play(engine, renderer, tasks(1), on_end=ended.append)
    assert len(ended) == 3
    assert all(t.failed and EngineError.__name__ in t.error and not t.turns for t in ended)
    assert engine.live_sessions == 0


def test_evaluation_plays_each_task_once_and_the_same_way_each_time(engine, renderer):
    problems = spec("frozen_lake").tasks("test").take(4)
    sampler = Sampler(lake, engine, renderer, replace(SAMPLING, temperature=0.0), seed=5)
    first, second = (asyncio.run(sampler.evaluate(problems)) for _ in range(2))
    assert [t.id for t in first] == [f"{task.id}/0" for task in problems]
    assert [[m["content"] for m in t.messages()] for t in first] == [
        [m["content"] for m in t.messages()] for t in second
    ]


def test_evaluation_in_several_samples_begins_with_the_one_and_goes_on_with_others(engine, renderer):
    problems = spec("frozen_lake").tasks("test").take(3)
    sampler = Sampler(lake, engine, renderer, SAMPLING, seed=5)
    once, twice = (asyncio.run(sampler.evaluate(problems, samples=samples)) for samples in (1, 2))
    assert [t.id for t in twice] == [f"{task.id}/{sample}" for sample in (0, 1) for task in problems]
    told = [[m["content"] for m in t.messages()] for t in twice]
    assert told[:3] == [[m["content"] for m in t.messages()] for t in once]
    assert told[:3] != told[3:]


def test_a_conversation_that_does_not_fit_ends_by_context(folder, renderer):
    engine = EmbeddedEngine(folder, 60)
    policy = TokenPolicy(engine, renderer, SAMPLING, seed=1)
    fits = renderer.prompt([user("a" * 20)]).ids
    assert len(fits) + SAMPLING.max_tokens <= 60
    asyncio.run(policy.act([user("a" * 20)], []))
    with pytest.raises(EndEpisode, match="context"):
        asyncio.run(TokenPolicy(engine, renderer, SAMPLING, seed=1).act([user("\u6f22" * 20)], []))
    asyncio.run(engine.close())


def test_a_policy_reports_exact_tokens(folder, renderer, engine):
    policy = TokenPolicy(engine, renderer, SAMPLING, seed=3)
    reply = asyncio.run(policy.act([user("P _ G")], []))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert reply.tokens.prompt_ids == renderer.prompt([user("P _ G")]).ids
    assert reply.message == renderer.parse(reply.tokens.completion_ids)
    assert reply.usage == {
        "prompt_tokens": len(reply.tokens.prompt_ids),
        "completion_tokens": len(reply.tokens.completion_ids),
    }
    assert reply.tokens.versions == [0] * len(reply.tokens.completion_ids)
    with torch.no_grad():
        logits_V = model(torch.tensor([reply.tokens.prompt_ids])).logits[0, -1] / SAMPLING.temperature
    assert reply.tokens.logprobs[0] == pytest.approx(
        logits_V.log_softmax(-1)[reply.tokens.completion_ids[0]].item(), abs=1e-4
    )


@given(data=st.data(), batch=st.integers(1, 6), staleness=st.integers(0, 3), most=st.integers(1, 16))
def test_admission_keeps_the_staleness_bound_and_uses_it_fully(data, batch, staleness, most):
    """Whatever ends first: a batch in starting order at version v was begun at v - staleness or later, and none starves."""
    begun: list[int] = []
    running: set[int] = set()
    for version in range(6):
        due = range(version * batch, (version + 1) * batch)
        while not all(i < len(begun) and i not in running for i in due):
            accepted = len(begun) - len(running)
            new = admit(
                batch=batch,
                version=version,
                staleness=staleness,
                accepted=accepted,
                running=len(running),
                max_concurrent=most,
            )
            running |= set(range(len(begun), len(begun) + new))
            begun += [version] * new
            assert len(running) == most or len(begun) == (staleness + version + 1) * batch
            assert running, "nothing runs and the batch is not whole: the run would hang"
            running.remove(data.draw(st.sampled_from(sorted(running))))
        assert all(version - begun[i] <= staleness for i in due)


class Faulty(Engine):
    """A double that answers after some time, or fails at each request, and has lost a part before some request."""

    max_model_len = 512

    def __init__(self, seconds=0.0, fails=False, loses_at=None):
        self.seconds, self.fails, self.loses_at, self.asked = seconds, fails, loses_at, 0

    async def generate(self, prompt_ids, sampling, episode=None):
        self.asked += 1
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise EngineError("it cannot answer")
        return Completion([5], [-1.0], [0], "length")

    async def losses(self):
        return int(self.loses_at is not None and self.asked >= self.loses_at)


def test_an_engine_alone_limits_the_time_of_an_answer(renderer):
    """It knows what of it was spent on a server that died, or on weights."""
    config = Config()
    config.engine.request_timeout, config.sampling.max_tokens, config.algorithm.group_size = 0.05, 6, 1
    sampler = sampler_of(config, lake, Faulty(seconds=0.2), renderer)
    (group,) = asyncio.run(sampler.collect(tasks(1), 0))
    assert group.trajectories[0].error is None


@pytest.mark.parametrize(("loses_at", "lost"), [(1, True), (0, False), (None, False)])
def test_if_all_episodes_fail_while_the_engine_loses_a_part_the_run_goes_back(renderer, loses_at, lost):
    """Not if the loss was before."""
    engine = Faulty(fails=True, loses_at=loses_at)
    if lost:
        with pytest.raises(EngineLostError, match=r"none of 3 episodes .* lost 1 of its parts; .*it cannot answer"):
            play(engine, renderer, tasks(1))
        return
    (group,) = play(engine, renderer, tasks(1))
    assert all("it cannot answer" in t.error for t in group.trajectories)
