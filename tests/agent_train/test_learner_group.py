"""The driver's handle on real Ray actors: two ranks work as one, and a dead or late one is an error with a name."""

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import signal
import time

import psutil
import pytest
import ray
from learner_cases import make_config, make_rows, numbers_of, one_rank, write_model
from ray.exceptions import RayActorError

from agent_train.config.schema import AlgorithmConfig
from agent_train.data.packing import rank_batches
from agent_train.learner.actor_group import Learner, LearnerError, RankLostError, _reason
from agent_train.learner.role_start import begin_as_policy, start_models

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def running_ray(workers_as_forks):
    with workers_as_forks():
        ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def ranks(workers, **learner):
    # Ranks that start beside much else take their time.
    return make_config(**{"workers": workers, "microbatch_tokens": 20, "timeout": 300.0, **learner})


async def pid_of(learner, rank):
    return await asyncio.wait_for(learner.actors[rank].__ray_call__.remote(lambda self: os.getpid()), 120)


async def a_run(model_dir, saved):
    """What two ranks say, and how they fail when one of them stands still."""
    rows, said = make_rows(), {}
    learner = await Learner.start(model_dir, ranks(2))
    try:
        said["scored"] = await learner.logprobs(rows)
        said["update"] = await learner.update(rows)
        said["sft"] = await learner.sft(rows, 1e-3)
        said["manifest"] = learner.manifest()
        await learner.save(saved)
        with pytest.raises(ValueError, match="nothing to train on"):
            await learner.update([])  # refused before it reaches a rank: the next one is as ever
        assert (await learner.update(rows)).skipped == 0
        # Several optimizer steps share the rows of a step out.
        learner.config = dataclasses.replace(learner.config, algorithm=AlgorithmConfig(updates_per_step=3))
        said["several"] = await learner.update(rows, lr_scale=10.0)
        said["pids"] = [await pid_of(learner, rank) for rank in (0, 1)]
        watching = asyncio.create_task(learner.watch())
        learner.config = ranks(2, timeout=1.0)
        os.kill(said["pids"][0], signal.SIGSTOP)
        with pytest.raises(RankLostError) as late:
            await learner.save("/nowhere/to/be/written")
        said["late"] = str(late.value)
        await asyncio.wait_for(watching, 60)  # it tells nothing: the call did
    finally:
        learner.close()
        learner.close()
    return said


@pytest.fixture(scope="module")
def ran(model_dir, tmp_path_factory):
    saved = tmp_path_factory.mktemp("run") / "saved"
    return {**asyncio.run(a_run(model_dir, saved)), "saved": saved}


def test_two_ranks_update_as_one_does(model_dir, ran):
    rows = make_rows()
    with one_rank(model_dir) as worker:
        expected_scores = worker.logprobs(rank_batches(rows, 1, 1)[0])
        expected = worker.update(rank_batches(rows, 1, 10_000))
        expected_sft = worker.sft(rank_batches(rows, 1, 10_000)[0], 1e-3)
    assert numbers_of(ran["update"]) == pytest.approx(numbers_of(expected), abs=1e-5)
    # One row in each micro-batch, the longest first.
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    for i, (expected_score,) in zip(longest_first, expected_scores, strict=True):
        assert ran["scored"][i] == pytest.approx(expected_score, abs=1e-5)
    assert ran["sft"].loss == pytest.approx(expected_sft.loss, abs=1e-5)
    several = ran["several"]
    assert several.tokens == sum(row.sampled for row in rows)
    assert several.ratio_max > 1.0
    assert math.isfinite(several.loss)
    assert (ran["saved"] / "model.safetensors").is_file()
    assert ran["manifest"][0].name == "model.embed_tokens.weight"


def test_a_rank_that_does_not_answer_is_named_after_the_timeout_and_its_process_is_gone(ran):
    assert re.search(r"save: rank 0.* within learner.timeout=1 s", ran["late"])
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in ran["pids"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in ran["pids"])


def with_roles():
    """A policy, a reference and a critic of a rank each."""
    config = ranks(1)
    config.algorithm.kl.coef, config.algorithm.advantage.name, config.critic.lr = 0.1, "gae", 1e-2
    return config


async def roles_together(model_dir, begin, rows):
    """What the roles of a run say before and after the policy moves, and what is left when the critic's rank is killed."""
    said, config = {}, with_roles()
    async with contextlib.AsyncExitStack() as stack:
        models = await start_models(config, model_dir, model_dir, stack)
        assert models.prm is models.teacher is models.reward_model is None
        said["policy"], said["reference"] = await asyncio.gather(
            models.policy.logprobs(rows), models.reference.logprobs(rows)
        )
        await models.policy.update(rows, lr_scale=10.0)
        said["moved"], said["held"] = await asyncio.gather(
            models.policy.logprobs(rows), models.reference.logprobs(rows)
        )
        said["critic"] = [await models.critic.update_critic(rows), await models.critic.update_critic(rows[:1])]
        said["values"] = await models.critic.values(rows)
        # The end of a warm start: those without a folder of their own begin again, where the policy is.
        await begin_as_policy(config, models, begin)
        said["begun"], said["anew"] = await asyncio.gather(models.reference.logprobs(rows), models.critic.values(rows))
        os.kill(await pid_of(models.critic, 0), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankLostError, match=r"^learner: critic: update_critic: rank 0 died"):
            await models.critic.update_critic(rows)
        assert time.monotonic() - started < 120
        with pytest.raises(RankLostError, match=r"^learner: critic: cannot values: rank 0 failed in update_critic"):
            await models.critic.values(rows)
        watching = asyncio.create_task(models.reference.watch())
        os.kill(await pid_of(models.reference, 0), signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"^learner: reference: watch: rank 0 died: ActorDiedError"):
            await asyncio.wait_for(watching, 60)  # it was asked nothing
        assert await models.policy.logprobs(rows) == said["moved"]
    return said


def test_roles_work_side_by_side_and_a_dead_one_is_named_and_leaves_the_others(model_dir, tmp_path):
    rows = [dataclasses.replace(row, targets=row.spread(0.5 * i)) for i, row in enumerate(make_rows())]
    said = asyncio.run(roles_together(model_dir, tmp_path / "start", rows))
    for row, policy, reference, moved, held, begun in zip(
        rows, *(said[name] for name in ("policy", "reference", "moved", "held", "begun")), strict=True
    ):
        assert reference == pytest.approx(policy, abs=1e-6)
        assert held == reference
        assert moved != pytest.approx(policy, abs=1e-2)
        assert begun == pytest.approx(moved, abs=1e-5)
        assert [x == 0.0 for x in reference] == [not on for on in row.mask]
    assert said["anew"] != said["values"]
    with one_rank(model_dir, with_roles(), "critic") as critic:
        for found, some in zip(said["critic"], (rows, rows[:1]), strict=True):
            wanted = critic.update_critic(rank_batches(some, 1, 10_000))
            for name in ("loss", "explained_variance", "value_mean", "grad_norm", "lr"):
                assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3, abs=1e-5), name
        for row, values in zip(rows, said["values"], strict=True):
            ((expected,),) = critic.values(rank_batches([row], 1, 100)[0])
            assert values == pytest.approx(expected, abs=2e-3)


def test_what_a_rank_raises_reaches_the_caller(tmp_path):
    with pytest.raises(LearnerError, match=r"start: rank \d failed: FileNotFoundError: .*config.json") as raised:
        asyncio.run(Learner.start(tmp_path, ranks(1)))
    assert not isinstance(raised.value, RankLostError), "it would come again"


@ray.remote
class Unmade:
    """A rank whose process cannot import what it needs, say."""

    def __init__(self):
        raise ImportError("no module of that name")

    def work(self):
        pass


def test_of_a_rank_that_cannot_be_made_the_reason_is_told():
    with pytest.raises(RayActorError) as caught:
        ray.get(Unmade.remote().work.remote(), timeout=120)
    assert "creation task" in str(caught.value).splitlines()[0]
    assert _reason(caught.value) == "ImportError: no module of that name"


def test_of_a_rank_that_runs_out_of_memory_the_reason_names_the_setting_to_lower():
    assert "lower learner.microbatch_tokens" in _reason(ray.exceptions.OutOfMemoryError("a worker was killed"))
    assert "lower" not in _reason(ray.exceptions.RayActorError())
