"""The driver's handle on real Ray actors: two ranks work as one, and a dead or late one is an error with a name."""

import asyncio
import dataclasses
import math
import os
import signal
import time

import pytest
import ray
from learner_cases import make_config, make_rows, one_rank, write_model

from agent_train.learner.group import Learner, LearnerError
from agent_train.packing import shares

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def running_ray():
    if not ray.is_initialized():
        ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def two_ranks(**learner):
    return make_config(workers=2, microbatch_tokens=20, **learner)


async def pid_of(learner, rank):
    return await asyncio.wait_for(learner._actors[rank].__ray_call__.remote(lambda self: os.getpid()), 30)


async def a_run(model_dir, tmp_path):
    rows = make_rows()
    learner = await Learner.start(model_dir, two_ranks())
    try:
        scored = await learner.logprobs(rows)
        update = await learner.update(rows)
        sft = await learner.sft(rows, 1e-3)
        await learner.save(tmp_path / "saved")
        with pytest.raises(ValueError, match="nothing to train on"):
            await learner.update([])  # refused before it reaches a rank: the next one is as ever
        assert (await learner.update(rows)).skipped == 0
    finally:
        learner.close()
        learner.close()
    return scored, update, sft, learner


def test_two_ranks_update_as_one_does(model_dir, tmp_path):
    scored, update, sft, learner = asyncio.run(a_run(model_dir, tmp_path))
    rows = make_rows()
    with one_rank(model_dir) as worker:
        expected_scores = worker.logprobs(shares(rows, 1, 1)[0])
        expected = worker.update(shares(rows, 1, 10_000))
        expected_sft = worker.sft(shares(rows, 1, 10_000)[0], 1e-3)
    found, wanted = ({**dataclasses.asdict(metrics), "seconds": 0.0} for metrics in (update, expected))
    assert found == pytest.approx(wanted, abs=1e-5)
    # One row in each micro-batch, the longest first.
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    for i, (expected_score,) in zip(longest_first, expected_scores, strict=True):
        assert scored[i] == pytest.approx(expected_score, abs=1e-5)
    assert sft.loss == pytest.approx(expected_sft.loss, abs=1e-5)
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert learner.manifest()[0].name == "model.embed_tokens.weight"


def test_several_updates_of_a_step_share_its_rows_out(model_dir):
    async def run():
        config = two_ranks(lr=1e-2)
        config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, updates_per_step=3))
        learner = await Learner.start(model_dir, config)
        try:
            return await learner.update(make_rows())
        finally:
            learner.close()

    metrics = asyncio.run(run())
    assert metrics.tokens == sum(sum(row.mask) for row in make_rows())
    assert metrics.ratio_max > 1.0
    assert math.isfinite(metrics.loss)


def test_a_rank_that_dies_in_a_call_is_named_and_nothing_hangs(model_dir):
    async def run():
        learner = await Learner.start(model_dir, two_ranks())
        os.kill(await pid_of(learner, 1), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(LearnerError, match=r"update: rank 1 died"):
            await learner.update(make_rows())
        assert time.monotonic() - started < 120
        with pytest.raises(LearnerError, match=r"cannot update: rank 1 failed"):
            await learner.update(make_rows())

    asyncio.run(run())


def test_a_rank_that_does_not_answer_is_named_after_the_timeout_and_its_process_is_gone(model_dir):
    async def run():
        learner = await Learner.start(model_dir, two_ranks())
        pids = [await pid_of(learner, rank) for rank in (0, 1)]
        learner._config = two_ranks(timeout=1.0)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(LearnerError, match=r"save: rank 0.* within learner.timeout=1 s"):
            await learner.save("/nowhere/to/be/written")
        return pids

    pids = asyncio.run(run())
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_rank_raises_reaches_the_caller(tmp_path):
    with pytest.raises(LearnerError, match=r"start: rank \d failed: FileNotFoundError: .*config.json"):
        asyncio.run(Learner.start(tmp_path, two_ranks()))
