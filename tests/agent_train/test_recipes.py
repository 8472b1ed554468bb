"""Each recipe resolves, is accepted, and trains: two updates of its roles on episodes that a model really played.

The ranks are in this process (no Ray), through the same `Learner` that a run has; the steps are those of the loop.
"""

import asyncio
import copy
import math

import pytest
import torch
from learner_cases import InProcess, in_process, one_rank
from recipe_cases import composed, settings_of
from transformers import AutoTokenizer

from agent_train.algorithms.selection import choose
from agent_train.config.compose import choices, config_folder
from agent_train.config.schema import TinyConfig
from agent_train.engine.base import Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.role_start import Models
from agent_train.learner.roles import roles_of
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.checkpoint import Progress
from agent_train.trainer.rl import after, give_advantages, learn, score_with_models, training_samples
from agentgym.core.env import Env
from agentgym.core.messages import text_of, user
from agentgym.core.tasks import Task, TaskSet

RECIPES = choices("algorithm")
ALONE = 50  # steps in which VAPO's critic learns alone


class Codes(Env):
    """Two turns, each rewarded by the codes of its characters: what a model without any sense says is worth different amounts."""

    max_turns = 2

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        return TaskSet([Task(id=f"{split}-{i}") for i in range(2)], name=split)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"say {self.task.id}")], {}

    def step(self, action):
        reward = sum(map(ord, text_of(action))) % 5 / 4
        return [user("more")], reward, self.turn == self.max_turns, False, {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, and a teacher that thinks otherwise."""
    shape, texts = TinyConfig(hidden=64, layers=1, heads=2, intermediate=96), texts_of_env("frozen_lake", n=8)
    made = [tmp_path_factory.mktemp(name) for name in ("policy", "teacher")]
    for seed, folder in enumerate(made):
        build_tiny(folder, texts, shape, 512, seed=seed)
    return made


@pytest.fixture(scope="module")
def played(folders):
    """Two groups of four episodes, and a greedy one of each task, sampled by the embedded engine."""
    engine, renderer = (
        EmbeddedEngine(folders[0], 512, request_timeout=60),
        Renderer(AutoTokenizer.from_pretrained(folders[0])),
    )
    tasks, sampling = list(Codes.default_tasks()), Sampling(max_tokens=6)

    async def play():
        sampler = Sampler(Codes, engine, renderer, sampling, group_size=4, seed=3)
        groups, greedy = await sampler.collect(tasks, 0), await sampler.play_greedily(tasks, 0)
        await engine.close()
        return groups, greedy

    groups, greedy = asyncio.run(play())
    assert not any(t.failed for group in groups for t in group.trajectories)
    assert all(len({t.reward for t in group.trajectories}) > 1 for group in groups)
    return groups, greedy


@pytest.fixture(scope="module")
def ranks(folders):
    """One rank of every role that some recipe has."""
    with one_rank(folders[0], composed("prime")) as policy:
        beside = {
            role: in_process(policy, role, folders[role == "teacher"], composed("prime" if role == "prm" else "ppo"))
            for role in ("reference", "critic", "prm", "teacher")
        }
        yield {"policy": policy, **beside}


def weights(worker):
    return [
        p.full_tensor().clone() if hasattr(p, "full_tensor") else p.detach().clone() for p in worker.module.parameters()
    ]


def changed(before, worker):
    return any(not torch.equal(old, new) for old, new in zip(before, weights(worker), strict=True))


def test_the_file_says_its_name_and_where_it_comes_from():
    for name in RECIPES:
        text = (config_folder() / "algorithm" / f"{name}.yaml").read_text()
        assert f"name: {name}\n" in text
        assert "arXiv" in text or "notion.site" in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, played, ranks):
    config = copy.deepcopy(settings_of(f"algorithm={name}", "learner.workers=1", "learner.warmup_steps=0"))
    config.algorithm.updates_per_step = min(config.algorithm.updates_per_step, 2)
    config.algorithm.overlong.mask = False  # all replies here are cut off
    assert config.algorithm.name == name
    learners = {role: InProcess(ranks[role], config) for role in roles_of(config)}
    before = {role: weights(ranks[role]) for role in learners}
    models, (groups, greedy) = Models(**learners), played

    async def step(progress):
        kept, selection = choose(groups, config.algorithm, len(groups))
        samples = await score_with_models(config, models, training_samples(config, groups, kept))
        samples = give_advantages(config, kept, samples, greedy, progress.kl_coef)
        learned = await learn(config, models, progress, kept, samples)
        return learned, after(config, progress, groups, selection.episodes, learned[0])

    progress = Progress(step=ALONE, kl_coef=config.algorithm.kl.coef)
    for _ in range(2):
        (update, critic, prm), progress = asyncio.run(step(progress))
        assert update.tokens > 0
        assert update.skipped == 0
        assert math.isfinite(update.loss)
        assert update.grad_norm > 0
        for metrics in (critic, prm):
            assert metrics is None or (math.isfinite(metrics.loss) and metrics.grad_norm > 0)
    assert (critic is None, prm is None) == (models.critic is None, models.prm is None)
    assert progress.step == ALONE + 2
    learning = {"policy", "critic", "prm"}
    assert {role for role in before if changed(before[role], ranks[role])} == learning & set(before)
