"""How the embedded engine gathers prompts into batches."""

import asyncio
import random
import time

import pytest
import torch
from engine_models import build, perturb, reference_logprobs
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from agent_train.engine import embedded as embedded_module
from agent_train.engine.base import EngineError, Sampling
from agent_train.engine.decoding import Request, decode, sample
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.fast_decoding import GROUPED


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch_sizes(monkeypatch):
    """Sizes of the batches that are decoded, which are otherwise untouched."""
    sizes: list[int] = []
    decode = embedded_module.decode

    def counted(model, requests, version):
        sizes.append(len(requests))
        return decode(model, requests, version)

    monkeypatch.setattr(embedded_module, "decode", counted)
    return sizes


async def episodes(engine, count: int, turns: int, delay_seed: int):
    """Episodes of several turns whose envs take a random time; returns all completions in order of episode and turn."""
    delays = random.Random(delay_seed)

    async def one(number: int):
        completions, prompt = [], [10 + number, 20, 30]
        for turn in range(turns - number % 2):
            await asyncio.sleep(delays.random() * 0.03)
            completion = await engine.generate(prompt, Sampling(4, seed=1000 * number + turn))
            completions.append(completion)
            prompt = prompt + completion.ids + [40]
        engine.close_session()
        return completions

    engine.open_session(count)
    return await asyncio.gather(*(one(number) for number in range(count)))


def test_with_sessions_timing_changes_nothing_not_even_the_last_bit(model_dir, batch_sizes) -> None:
    async def run(delay_seed: int):
        engine = EmbeddedEngine(model_dir, 256, batch_wait=20)
        try:
            return await episodes(engine, 6, 4, delay_seed)
        finally:
            await engine.close()

    first = asyncio.run(run(1))
    sizes = list(batch_sizes)
    second = asyncio.run(run(2))
    assert first == second
    assert sizes == batch_sizes[len(sizes) :] == [6, 6, 6, 3]


def test_a_session_that_does_not_ask_holds_nobody_up_for_long(model_dir) -> None:
    async def run() -> float:
        engine = EmbeddedEngine(model_dir, 256, batch_wait=0.3)
        engine.open_session(2)
        begun = time.monotonic()
        await engine.generate([5, 6], Sampling(2, seed=0))
        await engine.close()
        return time.monotonic() - begun

    assert 0.3 <= asyncio.run(run()) < 5


def test_without_a_bound_a_batch_waits_for_every_session_and_longer_than_an_answer_may_take(
    model_dir, batch_sizes
) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(model_dir, 256, batch_wait=None, request_timeout=0.4)
        engine.open_session(2)
        first = asyncio.ensure_future(engine.generate([5, 6], Sampling(2, seed=0)))
        await asyncio.sleep(0.8)
        assert not first.done()
        await asyncio.gather(first, engine.generate([5, 7], Sampling(2, seed=1)))
        # Who waits without end is told when the engine closes.
        waits = asyncio.ensure_future(engine.generate([5, 6], Sampling(2, seed=0)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(waits, 5)

    asyncio.run(run())
    assert batch_sizes == [2]


def test_closing_the_session_that_others_wait_for_starts_the_batch(model_dir) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(model_dir, 256, batch_wait=60)
        engine.open_session(2)
        answer = asyncio.ensure_future(engine.generate([5, 6], Sampling(2, seed=0)))
        await asyncio.sleep(0.1)
        assert not answer.done()
        engine.close_session()
        await asyncio.wait_for(answer, 10)
        await engine.close()

    asyncio.run(run())


def test_prompts_that_are_asked_together_are_one_batch_in_parts_of_the_bound(model_dir, batch_sizes) -> None:
    async def run():
        engine = EmbeddedEngine(model_dir, 256, max_concurrent=4)
        completions = await asyncio.gather(*(engine.generate([5, 6 + i], Sampling(3, seed=i)) for i in range(10)))
        await engine.close()
        return completions

    assert all(len(c.ids) == 3 for c in asyncio.run(run()))
    assert batch_sizes == [4, 4, 2]


def test_rows_that_end_early_do_not_disturb_the_others(model_dir) -> None:
    """Ragged lengths make the engine drop rows in the middle; each row is as if it had been alone."""
    wanted = [(i, 1 + 5 * i) for i in range(10)]

    async def run():
        engine = EmbeddedEngine(model_dir, 256)
        together = await asyncio.gather(*(engine.generate([9] * (1 + i), Sampling(n, seed=i)) for i, n in wanted))
        alone = [await engine.generate([9] * (1 + i), Sampling(n, seed=i)) for i, n in wanted]
        await engine.close()
        return together, alone

    together, alone = asyncio.run(run())
    assert [c.ids for c in together] == [c.ids for c in alone]
    for both, one in zip(together, alone, strict=True):
        assert both.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_rows_that_end_early_take_no_positions_that_a_model_has_not_learned() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=8, n_layer=1, n_head=1, vocab_size=20)).eval()
    asked = [([*range(19)], 13), ([1, 2], 30), ([3, 4], 30)]
    said = decode(model, [Request(ids, Sampling(tokens, seed=1)) for ids, tokens in asked], 0)
    assert [len(answer.ids) for answer in said] == [13, 30, 30]
    assert said[0].ids == decode(model, [Request(asked[0][0], Sampling(13, seed=1))], 0)[0].ids


def test_a_prompt_that_many_ask_at_once_is_computed_once(model_dir) -> None:
    """Groups of three beside one that is longer; every answer is as if it had been asked alone."""
    model = AutoModelForCausalLM.from_pretrained(str(model_dir)).eval()
    shapes = []
    model.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    prompts = [[9, 8, 7]] * 3 + [[5] * 6] + [[9, 8]] * 3
    together = decode(model, [Request(prompt, Sampling(4, seed=n)) for n, prompt in enumerate(prompts)], 0)
    assert shapes[:2] == [(3, 6), (7, 1)]
    alone = [decode(model, [Request(prompt, Sampling(4, seed=n))], 0)[0] for n, prompt in enumerate(prompts)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert len({tuple(c.ids) for c in together[:3]}) > 1
    for both, one in zip(together, alone, strict=True):
        assert both.logprobs == pytest.approx(one.logprobs, abs=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_heads_that_share_keys_and_windows_attend_as_transformers_does(tmp_path, window) -> None:
    """Long enough that the cache needs more room; padded, and some rows end before others."""
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    plain = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **windows, eos_token_id=None)).eval()
    perturb(plain, seed=1)
    plain.save_pretrained(tmp_path)
    prompts = [[9, 8, 7], [5] * 40, [9, 8, 7], [6, 4] * 30]
    requests = [Sampling(most, seed=n) for n, most in enumerate((150, 200, 3, 180))]

    async def run():
        engine = EmbeddedEngine(tmp_path, 512, device="cpu")
        assert engine.model.config._attn_implementation == GROUPED
        completions = await asyncio.gather(*map(engine.generate, prompts, requests))
        await engine.close()
        return completions

    for prompt, completion in zip(prompts, asyncio.run(run()), strict=True):
        expected = reference_logprobs(plain, prompt, completion.ids, 1.0)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_event_loop_stays_free_while_a_batch_runs(model_dir) -> None:
    async def run() -> int:
        engine = EmbeddedEngine(model_dir, 512)
        answers = asyncio.gather(*(engine.generate([9] * 200, Sampling(200, seed=i)) for i in range(32)))
        beats = 0
        while not answers.done():
            await asyncio.sleep(0.005)
            beats += 1
        await answers
        await engine.close()
        return beats

    assert asyncio.run(run()) > 10


def test_no_answer_in_time_is_an_engine_error_that_says_so(model_dir) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(model_dir, 256, batch_wait=60, request_timeout=0.2)
        engine.open_session(2)
        with pytest.raises(EngineError, match=r"within 0\.2 s"):
            await engine.generate([5, 6], Sampling(2))
        await engine.close()

    asyncio.run(run())


def test_closing_refuses_who_waits_and_who_comes_later(model_dir) -> None:
    async def run() -> None:
        engine = EmbeddedEngine(model_dir, 256, batch_wait=60)
        engine.open_session(2)
        answer = asyncio.ensure_future(engine.generate([5, 6], Sampling(2)))
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(answer, 5)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([5, 6], Sampling(2))
        with pytest.raises(EngineError, match="closed"):
            await engine.live()

    asyncio.run(run())


def test_a_folder_that_is_no_model_is_named(tmp_path) -> None:
    with pytest.raises(EngineError, match=str(tmp_path)):
        EmbeddedEngine(tmp_path, 256)


def test_sampling_never_takes_a_token_of_no_probability() -> None:
    logits_RV = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(5, 5)
    uniforms_R = torch.tensor([0.0, 0.4999, 0.5001, 0.75, 1 - 2**-53], dtype=torch.float64)
    sampled_R, logprobs_R = sample(logits_RV, torch.ones(5), uniforms_R)
    assert sampled_R.tolist() == [1, 1, 3, 3, 3]
    assert logprobs_R.tolist() == pytest.approx([-0.693147] * 5, abs=1e-5)
