"""What users may add to a run: each example is named by its path, as `algorithm.filter.name=my_package.mine:hardest`, and runs."""

import asyncio
import json
import math
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from step_cases import algorithm, example, group, samples_for

import agentgym
from agent_train.algorithms.corrections import Gap
from agent_train.algorithms.selection import choose, turn_rewards
from agent_train.config.combinations import wrong_combinations
from agent_train.config.extensions import POINTS, corrections, engines, rollouts, trackers
from agent_train.config.schema import Config, EngineConfig
from agent_train.engine.base import Completion, Engine
from agent_train.learner.roles import roles_of
from agent_train.trainer.rl import give_advantages
from agentgym.core.extensions import ExtensionPoint
from agentgym.policies.base import ExpertPolicy, NullPolicy
from agentgym.rollout.episode import Episode, run_episode, run_many
from agentgym.sandbox import SandboxSpec, acquire
from agentgym.sandbox.backends.bubblewrap import open_bubblewrap

# ---- the examples


def hardest(rewards, share):
    """A filter: the share of the groups with the lowest mean reward."""
    known = [[reward for reward in group if reward is not None] for group in rewards]
    means = [sum(group) / len(group) if group else math.inf for group in known]
    order = sorted(range(len(means)), key=means.__getitem__)
    return sorted(order[: math.ceil(share * len(means))])


def above_the_value(inputs):
    """An advantage with a critic, which learns the numbers of `targets`."""
    return inputs.on_tokens(inputs.rewards) - inputs.tokens("values")


above_the_value.targets = lambda inputs: inputs.on_tokens(inputs.rewards)


def half_way(gap, mask_T, segment_T, n_segments, *, cap, low, high):
    """A correction: the square root of the importance weight of each token."""
    weights_T = (gap.log_weight_T / 2).exp()
    return weights_T.clamp(max=cap) * mask_T


def turns_cost(trajectory):
    """A reward shaping: each turn costs 0.25."""
    return [turn.reward - 0.25 for turn in trajectory.turns]


async def second_try(env, policy, task, **more):
    """A rollout: an episode that fails its task is played once more."""
    first = await run_episode(env, policy, task, **more)
    return first if first.success else await run_episode(env, policy, task, **more)


def to_csv(folder):
    """A tracker: reward and success of each step in a file beside the run."""
    file = folder / "reward.csv"

    def track(record):
        if record["kind"] == "train":
            with file.open("a") as out:
                out.write(f"{record['step']},{record['reward']}\n")

    return track


class Parrot(Engine):
    """An engine: it samples the last token of the prompt again. A run also needs `connect_weights` and `receive_weights`."""

    max_model_len = 64

    async def generate(self, prompt_ids, sampling, episode=None):
        return Completion([prompt_ids[-1]], [0.0], [0], "stop")


async def start_parrot(config, model_dir, logs, **more):
    return Parrot()


def open_small(spec, run):
    """A sandbox back end: bubblewrap with a quarter of the memory."""
    return open_bubblewrap(replace(spec, memory=spec.memory // 4), run)


# ---- what they do


def test_a_filter():
    chosen = {"name": f"{__name__}:hardest", "share": 0.5}
    assert [group.task_id for group in choose(example(), algorithm(chosen=chosen), 2)[0]] == ["a"]


def test_a_filter_that_returns_other_than_indices_is_refused():
    with pytest.raises(ValueError, match="not ascending indices of 2 groups"):
        choose(example(), algorithm(chosen={"name": f"{__name__}:backwards"}), 2)


def backwards(rewards, share):
    return list(reversed(range(len(rewards))))


def test_an_advantage_with_a_critic():
    settings = algorithm(name=f"{__name__}:above_the_value")
    config = Config(algorithm=settings)
    assert roles_of(config) == ("policy", "critic")
    config.critic.alone_steps = 1
    assert list(wrong_combinations(config)) == []
    groups, samples = samples_for([group("t", [[(2, 1.0)]])], settings)
    (sample,) = give_advantages(config, groups, [replace(each, values=each.spread(0.25)) for each in samples], [], 0.0)
    assert [a for a, on in zip(sample.advantages, sample.mask, strict=True) if on] == [0.75, 0.75]
    assert [t for t, on in zip(sample.targets, sample.mask, strict=True) if on] == [1.0, 1.0]


def test_a_correction():
    gap = Gap(torch.zeros(3), torch.log(torch.tensor([4.0, 1.0, 100.0])))
    correct = corrections.load(f"{__name__}:half_way")
    mask_T, segment_T = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.long)
    assert correct(gap, mask_T, segment_T, 1, cap=5.0, low=0.0, high=math.inf).tolist() == pytest.approx([2, 0, 5])


def test_a_reward_shaping():
    settings = replace(algorithm(), reward_shaping=f"{__name__}:turns_cost")
    assert [turn_rewards(t, settings) for t in example()[0].trajectories] == [[0.75], [-0.25], [-0.25], [0.75]]


def test_a_reward_shaping_gives_a_number_for_each_turn():
    with pytest.raises(ValueError, match="not a finite number for each of 1 turns"):
        turn_rewards(example()[0].trajectories[0], replace(algorithm(), reward_shaping=f"{__name__}:nothing"))


def nothing(trajectory):
    return []


def test_a_rollout():
    policies = []

    def policy(episode):
        policies.append(NullPolicy() if episode.sample else ExpertPolicy())
        return policies[-1]

    task = agentgym.spec("frozen_lake").tasks("train")[0]
    episodes = [Episode(task, sample, 7) for sample in range(2)]
    resets = []

    def make():
        env = agentgym.make("frozen_lake")
        reset = env.unwrapped.reset
        env.unwrapped.reset = lambda **more: resets.append(1) or reset(**more)
        return env

    played = asyncio.run(run_many(make, policy, episodes, concurrency=1, play=rollouts.load(f"{__name__}:second_try")))
    assert [t.success for t in played] == [1.0, 0.0]
    assert len(resets) == 3


def test_a_tracker(tmp_path):
    track = trackers.load(f"{__name__}:to_csv")(tmp_path)
    for record in ({"kind": "eval", "step": 0}, {"kind": "train", "step": 1, "reward": 0.5}):
        track(json.loads(json.dumps(record)))
    assert (tmp_path / "reward.csv").read_text() == "1,0.5\n"


def test_an_engine(tmp_path):
    async def sampled():
        engine = await engines.load(f"{__name__}:start_parrot")(EngineConfig(), tmp_path, tmp_path, dtype="float32")
        return await engine.generate([3, 9], None)

    assert asyncio.run(sampled()).ids == [9]


@pytest.mark.bubblewrap
def test_a_sandbox_back_end():
    box = acquire(SandboxSpec(), backend=f"{__name__}:open_small")
    try:
        assert box.exec("echo here").stdout.strip() == "here"
        assert box.spec.memory == SandboxSpec().memory // 4
    finally:
        box.close()


# ---- names


def test_an_installed_package_adds_a_name(monkeypatch):
    mine = metadata.EntryPoint("hardest", f"{__name__}:hardest", "agentgym.filters")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [mine] if group == mine.group else [])
    point = ExtensionPoint("filter", "agentgym.filters", {"none": "agent_train.algorithms.selection:all_groups"})
    assert point.load("hardest") is hardest
    assert list(point.names) == ["none", "hardest"]


@pytest.mark.parametrize("name", sorted(POINTS))
def test_every_shipped_implementation_can_be_imported(name):
    for shipped in POINTS[name].shipped:
        assert callable(POINTS[name].load(shipped))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "topp",
            r"unknown filter 'topp': did you mean top_p\? Known are none, spread, uncertain, top_p; your own is named as",
        ),
        ("no.such:filter", "filter 'no.such:filter': cannot import module 'no.such'"),
        (f"{__name__}:missing", "has no 'missing'"),
        (f"{__name__}:__name__", "is a str, not a function"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one(name, words):
    with pytest.raises(ValueError, match=words):
        POINTS["filters"].load(name)
