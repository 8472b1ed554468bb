"""Rules that a learner must keep, each of which has broken somewhere. The table of all of them is in docs/algorithms.md, section "Rules",
with the tests that hold them; those that no other file has are here."""

import ast
import asyncio
import dataclasses
import functools
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as rounds
from hypothesis import strategies as st
from learner_cases import VOCAB, make_config, one_rank, write_model
from objective_cases import learn, row_of, settings
from step_cases import advantages, algorithm, episode
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_train.algorithms.returns import moments, whiten
from agent_train.data.packing import batch_of, rank_batches, weighted
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.engine.base import Completion, Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.vllm import _request_body
from agent_train.weights.sync import WeightAddress, WeightSyncError, free_port, sync
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(model_dir):
    with one_rank(model_dir) as worker:
        yield worker


def scored(worker, row):
    """The trainer's log-probabilities of one row."""
    return worker.logprobs(rank_batches([row], 1, 1000)[0])[0][0]


# Rule 5.


def test_5_an_episode_that_sampled_nothing_writes_no_reward_and_shifts_no_baseline():
    """The silent one would lie at index -1, on its neighbour, and change its group's mean."""
    played = [episode("a", 0, [(2, 1.0)]), episode("a", 1, [(0, 7.0)]), episode("a", 2, [(3, 0.0)])]
    alone = [episode("a", 0, [(2, 1.0)]), episode("a", 2, [(3, 0.0)])]
    found, rows = advantages([Group("a", played)], algorithm())
    assert [row.trajectory for row in rows] == ["a/0", "a/2"]
    assert found == advantages([Group("a", alone)], algorithm())[0]
    for name in ("gae", "reinforce_pp"):
        found, _ = advantages([Group("a", played)], algorithm(name), values=[0.0] * 5)
        assert found == advantages([Group("a", alone)], algorithm(name), values=[0.0] * 5)[0]


# Rule 8.


def write_counting_model(folder, sure=20.0):
    """A model that is nearly sure that after token k comes k + 1: one-hot embeddings, layers that add nothing."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # The last norm makes a one-hot vector sqrt(VOCAB) long.
        model.lm_head.weight.copy_(torch.eye(VOCAB).roll(1, dims=0) * sure / math.sqrt(VOCAB))
    model.save_pretrained(str(folder))
    return folder


def test_8_every_number_of_a_token_speaks_of_that_token_and_not_of_its_neighbour(tmp_path):
    """Ids that count up are certain, others are not; log-probability, mask, engine, reference and advantage go together."""
    ids = [3, 4, 5, 9, 10, 2]
    mask = [False, True, False, True, True, True]
    sure = math.log1p((VOCAB - 1) * math.exp(-20.0))
    expected = [0.0, -sure, 0.0, -20.0 - sure, -sure, -20.0 - sure]
    row = TrainingSample(ids, mask, expected, advantages=[0.0, 1.0, 0.0, 2.0, 4.0, 8.0], reference=expected)
    with one_rank(write_counting_model(tmp_path / "model")) as worker:
        assert scored(worker, row) == pytest.approx(expected, abs=1e-4)
        metrics = worker.update(shares_of(row))
    assert metrics.gap_max == pytest.approx(0.0, abs=1e-4)
    assert metrics.kl_reference == pytest.approx(0.0, abs=1e-4)
    assert metrics.loss == pytest.approx(-(1 + 2 + 4 + 8) / 4)


def test_8_an_advantage_moves_the_probability_of_its_own_token(tmp_path):
    ids, mask = [3, 8, 20, 31], [False, True, True, True]
    row = TrainingSample(ids, mask, [0.0, -1.0, -1.0, -1.0], advantages=[0.0, 0.0, 1.0, 0.0])
    with one_rank(write_counting_model(tmp_path / "model", sure=1.0), make_config(lr=1e-3)) as worker:
        before = scored(worker, row)
        worker.update(shares_of(row))
        change = [b - a for a, b in zip(before, scored(worker, row), strict=True)]
    assert change[2] > 1e-4
    assert abs(change[1]) < change[2] / 3
    assert abs(change[3]) < change[2] / 3


def shares_of(*rows):
    return [rank_batches(rows, 1, 1000)[0]]


# Rule 13.


def test_13_with_learning_rate_0_the_mismatch_stays_flat_for_20_steps(model_dir):
    """A real engine samples, the trainer updates and sends its weights, 20 times: nothing may creep in anywhere."""

    async def run(worker):
        engine = EmbeddedEngine(model_dir, 64)
        try:
            address = WeightAddress("127.0.0.1", free_port(), 1 + engine.receivers)
            await asyncio.gather(asyncio.to_thread(worker.connect_weights, address), engine.connect_weights(address))
            learner, found = Sending(worker), []
            for step in range(20):
                rows = [await sampled_row(engine, [5, 6 + k], seed=2 * step + k) for k in range(2)]
                metrics = worker.update(shares_of(*rows), version=step)
                found.append((metrics, await sync(learner, engine, version=step + 1)))
            return found
        finally:
            await engine.close()

    with one_rank(model_dir, make_config(lr=0.0)) as worker:
        found = asyncio.run(asyncio.wait_for(run(worker), 300))
    assert len({checksum for _, checksum in found}) == 1
    assert max(metrics.gap_max for metrics, _ in found) < 1e-5
    assert max(metrics.gap_k3 for metrics, _ in found) < 1e-9
    assert {(metrics.staleness, metrics.ratio_max) for metrics, _ in found} == {(0.0, 1.0)}
    assert all(metrics.grad_norm > 0 for metrics, _ in found)


class Sending:
    """A worker in this process as `sync` knows a learner."""

    def __init__(self, worker):
        self.manifest = worker.manifest
        self._send = worker.send_weights

    async def send_weights(self):
        return await asyncio.to_thread(self._send)


async def sampled_row(engine, prompt, seed, advantage=1.0):
    """What an engine says to a prompt, as a row."""
    said = await engine.generate(prompt, Sampling(12, seed=seed))
    turn = Turn([], {"role": "assistant", "content": ""}, tokens=tokens_of(prompt, said))
    (row,) = samples_of(Trajectory(f"t/{seed}", "env", "t", turns=[turn]))
    return dataclasses.replace(row, advantages=row.spread(advantage if seed % 2 else -advantage))


def tokens_of(prompt, said: Completion):
    return Tokens(list(prompt), said.ids, said.logprobs, said.versions)


# Rule 15.


def test_15_log_probabilities_of_a_cut_distribution_are_off_by_exactly_the_kept_mass(worker):
    """Of four tokens with 0.6, 0.3, 0.06 and 0.04 top-p keeps two, 0.9 of the mass: what it says divided by that, the trainer's
    ratio is 0.9 on every token, and the effective sample size does not show it."""
    exact = [math.log(0.6), math.log(0.3)]
    row = row_of([p - math.log(0.9) for p in exact], [1.0, 1.0])
    found = learn(worker, [row], exact, settings(proximal="behaviour"))
    assert (found.metrics.ratio_mean, found.metrics.ratio_max) == pytest.approx((0.9, 0.9), abs=1e-6)
    assert found.metrics.gap_k1 == pytest.approx(-math.log(0.9), abs=1e-6)
    assert found.metrics.gap_ess == pytest.approx(1.0, abs=1e-6)


def test_15_no_engine_is_asked_to_cut_the_distribution():
    assert set(Sampling.__dataclass_fields__) == {"max_tokens", "temperature", "stop_token_ids", "seed"}
    assert not {"top_p", "top_k", "min_p"} & _request_body([1], Sampling(4))["sampling_params"].keys()


# Rule 18.


def test_18_a_turn_that_crossed_an_update_keeps_the_version_of_each_token(worker):
    prompt, said = [7, 8], Completion([1, 2, 3], [-1.0, -1.0, -1.0], [4, 4, 5], "stop")
    turn = Turn([], {"role": "assistant", "content": ""}, tokens=tokens_of(prompt, said))
    (row,) = samples_of(Trajectory("t/0", "env", "t", turns=[turn]))
    assert row.versions == [-1, -1, 4, 4, 5]
    row = dataclasses.replace(row, advantages=row.spread(1.0))
    metrics = learn(worker, [row], [-1.0] * 8, settings(), version=6).metrics
    assert metrics.staleness == pytest.approx((2 + 2 + 1) / 3)


# Rule 21.


@given(
    values=st.lists(st.floats(-5, 5), min_size=2, max_size=30),
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
@rounds(deadline=None)
def test_21_whitening_over_ranks_is_whitening_of_the_whole_step(values, cuts):
    """Moments of each rank's tokens are added; a rank may have none, and a token more moves the mean."""
    values_T = torch.tensor(values)
    mask_T = torch.tensor([i % 3 != 1 for i in range(len(values))])
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    ranks = [slice(a, b) for a, b in pairwise(bounds)]
    together = functools.reduce(torch.add, [moments(values_T[rank], mask_T[rank]) for rank in ranks])
    split = torch.cat([whiten(values_T[rank], mask_T[rank], together) for rank in ranks])
    torch.testing.assert_close(split, whiten(values_T, mask_T, moments(values_T, mask_T)), atol=1e-5, rtol=1e-5)


# Rule 23.


class Sent:
    def manifest(self):
        return []

    async def send_weights(self):
        return {"w": 1}


class Arrived:
    def __init__(self, checksums):
        self.checksums = checksums

    async def receive_weights(self, manifest, version):
        return self.checksums


def test_23_weights_that_did_not_arrive_as_they_were_sent_are_an_error():
    assert asyncio.run(sync(Sent(), Arrived({"w": 1}), 1)) == asyncio.run(sync(Sent(), Arrived({"w": 1}), 2))
    for checksums in ({"w": 2}, {}, {"w": 1, "v": 1}):
        with pytest.raises(WeightSyncError, match="did not arrive"):
            asyncio.run(sync(Sent(), Arrived(checksums), 1))


# Rule 33.


@given(lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5))
@rounds(deadline=None)
def test_33_the_rows_of_one_episode_share_its_weight_and_its_advantage(lengths):
    """Of `lengths` episodes each leaves one row for each number, as many tokens in it: an episode weighs 1 / B, however many rows."""
    episodes = [episode("a", i, [(n, float(i)) for n in sizes], samples="many") for i, sizes in enumerate(lengths)]
    _, rows = advantages([Group("a", episodes)], algorithm())
    assert len(rows) == sum(map(len, lengths))
    rows = weighted(rows, "seq-mean-token-mean")
    by_episode = {}
    for row in rows:
        by_episode.setdefault(row.trajectory, []).append(row)
    for own in by_episode.values():
        assert len({a for row in own for a, on in zip(row.advantages, row.mask, strict=True) if on}) == 1
        assert [row.weight * row.sampled for row in own] == pytest.approx([1 / len(lengths) / len(own)] * len(own))
    batch = batch_of(rows)
    assert batch.weights_T[batch.mask_T].double().sum().item() == pytest.approx(1.0, abs=1e-6)


# The table.


def rules():
    """From the page: the number of each rule, and the tests that hold it."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Rules\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| \d+ ", line)]
    return {int(line.split("|")[1]): re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line) for line in lines}


@functools.cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_rule_has_tests():
    found = rules()
    assert sorted(found) == list(range(1, 34))
    assert all(found.values())


@pytest.mark.parametrize("number", range(1, 34))
def test_the_tests_of_a_rule_exist(number):
    for path, name in rules()[number]:
        assert (ROOT / path).is_file(), path
        assert name.startswith("test_")
        assert name in names_in(path), f"{path}::{name}"
