"""The learner and the embedded engine on a GPU compute what they compute on a CPU."""

import asyncio
import dataclasses

import pytest
import torch
from learner_cases import assert_same, gradients_of, make_config, make_rows, one_rank, write_model

from agent_train.data.packing import rank_batches
from agent_train.engine.base import Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.fsdp import full_tensors
from agent_train.weights.collective import checksum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BIG = 10_000
# Each is another way through the learner. Without checkpoints all activations are kept.
WAYS = {
    "as it is": {},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"offload": True},
    "without chunks": {"head_chunk": 10_000, "vocab_chunk": 0},
    "chunks of the vocabulary": {"vocab_chunk": 16},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The head size is one that every attention kernel takes."""
    return write_model(tmp_path_factory.mktemp("model"), head_dim=16)


def config_of(dtype="float32", **learner):
    config = make_config(**learner)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


def gradients_on(device, model_dir, config, rows, budget=BIG):
    with one_rank(model_dir, config, device=device) as worker:
        metrics, grads = gradients_of(worker, rank_batches(rows, 1, budget)[0])
        return metrics, {name: grad.cpu() for name, grad in grads.items()}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_float32_are_those_of_a_cpu(model_dir, way):
    expected_metrics, expected = gradients_on("cpu", model_dir, config_of(), make_rows())
    metrics, grads = gradients_on("cuda", model_dir, config_of(**WAYS[way]), make_rows(), budget=30)
    assert metrics.loss == pytest.approx(expected_metrics.loss, abs=1e-5)
    assert metrics.grad_norm == pytest.approx(expected_metrics.grad_norm, rel=1e-4)
    assert_same(grads, expected, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_bfloat16_point_where_those_of_float32_do(model_dir, way):
    _, expected = gradients_on("cpu", model_dir, config_of(), make_rows())
    _, grads = gradients_on("cuda", model_dir, config_of("bfloat16", **WAYS[way]), make_rows(), budget=30)
    one, other = (torch.cat([found[name].flatten() for name in expected]) for found in (grads, expected))
    assert torch.cosine_similarity(one, other, dim=0) > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_run_gives_the_same_bits_each_time(model_dir, dtype):
    config = config_of(dtype)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, deterministic=True))
    batch = rank_batches(make_rows(), 1, 30)[0]
    sums = []
    for _ in range(2):
        with one_rank(model_dir, config, device="cuda") as worker:
            worker.update([batch, batch])
            sums.append({name: checksum(whole) for name, whole in full_tensors(worker.module)})
    assert sums[0] == sums[1]


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_saved_on_a_gpu_goes_on_with_the_same_bits(model_dir, tmp_path, offload):
    batches = [rank_batches(make_rows(seed=seed), 1, 30)[0] for seed in range(3)]
    config = config_of("bfloat16", offload=offload)
    with one_rank(model_dir, config, device="cuda") as worker:
        worker.update([batches[0]])
        worker.save_state(str(tmp_path / "state"))
        while worker.state_saved() is None:
            pass
        worker.update(batches[1:])
        expected = {name: checksum(whole) for name, whole in full_tensors(worker.module)}
    with one_rank(model_dir, config, device="cuda") as worker:
        worker.load_state(str(tmp_path / "state"))
        worker.update(batches[1:])
        assert {name: checksum(whole) for name, whole in full_tensors(worker.module)} == expected


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_the_embedded_engine_tells_the_log_probabilities_that_the_learner_finds(model_dir, dtype, gap):
    async def sample():
        engine = EmbeddedEngine(model_dir, 64, dtype=dtype, batch_wait=0.05)
        prompts = [[1 + number, 2, 3] for number in range(8)]
        answers = await asyncio.gather(
            *(engine.generate(prompt, Sampling(20, seed=number)) for number, prompt in enumerate(prompts))
        )
        await engine.close()
        return list(zip(prompts, answers, strict=True))

    rows = [
        dataclasses.replace(
            row,
            ids=prompt + answer.ids,
            mask=[False] * len(prompt) + [True] * len(answer.ids),
            logprobs=[0.0] * len(prompt) + list(answer.logprobs),
            advantages=[0.0] * len(prompt) + [1.0] * len(answer.ids),
        )
        for row, (prompt, answer) in zip(make_rows(sizes=(9,) * 8), asyncio.run(sample()), strict=True)
    ]
    with one_rank(model_dir, config_of(dtype), device="cuda") as worker:
        batch = rank_batches(rows, 1, BIG)[0]
        scored = {
            row.id: numbers
            for own, found in zip(batch.micro_batches, worker.logprobs(batch), strict=True)
            for row, numbers in zip(own, found, strict=True)
        }
    gaps = [
        abs(told - found)
        for row in rows
        for told, found, mine in zip(row.logprobs, scored[row.id], row.mask, strict=True)
        if mine
    ]
    assert sum(gaps) / len(gaps) < gap
