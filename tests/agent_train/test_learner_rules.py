"""Rules that a learner must keep, each of which has broken somewhere: a table of all, and the tests that no other file has."""

import ast
import asyncio
import dataclasses
import functools
import math
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
from agent_train.engine.vllm import sampling_params
from agent_train.weights.sync import WeightAddress, WeightSyncError, free_port, sync
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn

FOLDER = Path(__file__).parent


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
    assert not {"top_p", "top_k", "min_p"} & sampling_params(Sampling(4)).keys()


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
    connected = True

    def __init__(self, checksums):
        self.checksums = checksums

    async def losses(self):
        return 0

    async def live(self):
        pass

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


# The table: each rule, and the tests that hold it.

RULES = {
    1: (
        "tokens in, tokens out: the ids of the engine are trained, never encoded again",
        "test_samples.py::test_an_encoding_of_the_engine_s_own_goes_into_the_row",
        "test_renderer.py::test_ids_that_encode_would_never_give_are_kept",
    ),
    2: (
        "a prompt that does not extend the row, id for id, begins a row; the rows share the episode's weight",
        "test_samples.py::test_a_template_that_forgets_thoughts_gives_two_rows_of_one_weight",
        "test_samples.py::test_a_prompt_that_does_not_extend_begins_a_row",
    ),
    3: (
        "the mask is what was sampled, the stop token too, and nothing else",
        "test_samples.py::test_every_sampled_id_is_trained_once_and_nothing_else",
        "test_samples.py::test_the_stop_token_is_trained_and_the_bridge_is_not",
    ),
    4: (
        "the length that shaping looks at counts sampled tokens",
        "test_selection.py::test_the_penalty_for_length_by_the_tokens_that_were_sampled",
    ),
    5: (
        "an episode without sampled tokens writes no reward and shifts no baseline",
        "test_learner_rules.py::test_5_an_episode_that_sampled_nothing_writes_no_reward_and_shifts_no_baseline",
        "algorithms/test_algorithms_turn_rewards.py::test_a_trajectory_without_sampled_tokens_puts_its_score_nowhere",
    ),
    6: (
        "masked cells may hold NaN or infinity",
        "test_policy_objective.py::test_nan_in_every_masked_cell_leaves_loss_and_gradient_finite",
        "algorithms/test_algorithms_policy_loss.py::test_rubbish_in_masked_cells_reaches_neither_loss_nor_gradient",
        "test_learner_worker.py::test_rubbish_in_masked_cells_of_a_row_changes_nothing",
    ),
    7: (
        "cut episodes are out of the loss, and in the baseline or not",
        "test_selection.py::test_a_cut_episode_is_out_of_the_loss_and_in_the_baseline_or_not",
        "test_step_advantages.py::test_an_episode_that_shaping_masks_counts_in_the_baseline_or_not",
    ),
    8: (
        "every number of a token speaks of that token",
        "test_learner_rules.py::test_8_every_number_of_a_token_speaks_of_that_token_and_not_of_its_neighbour",
        "test_learner_rules.py::test_8_an_advantage_moves_the_probability_of_its_own_token",
        "test_head.py::test_each_token_is_scored_by_the_position_before_it_in_its_own_row",
    ),
    9: (
        "padding, packing, micro-batches, order and ranks change nothing",
        "test_learner_worker.py::test_packed_loss_and_gradients_are_those_of_transformers_with_any_padding",
        "test_learner_worker.py::test_rows_do_not_see_each_other",
        "test_policy_objective.py::test_no_loss_and_no_reduction_sees_the_order_or_the_micro_batches",
        "test_policy_objective_ranks.py::test_ranks_give_the_loss_and_gradients_of_one",
    ),
    10: (
        "denominators are of the whole optimizer step",
        "test_learner_worker.py::test_the_denominator_counts_all_tokens_so_that_long_and_short_micro_batches_are_no_mean_of_means",
        "test_policy_objective.py::test_a_row_that_a_mask_drops_stays_in_every_denominator",
        "test_policy_objective_ranks.py::test_ranks_give_the_loss_and_gradients_of_one",
    ),
    11: (
        "a rank without tokens joins every collective",
        "test_policy_objective_ranks.py::test_ranks_give_the_loss_and_gradients_of_one",
        "test_packing.py::test_a_micro_batch_without_rows_has_one_token_that_no_loss_sees",
    ),
    12: (
        "on policy the ratio is exactly 1 and nothing is clipped",
        "test_policy_objective.py::test_on_policy_every_loss_is_that_of_the_policy_gradient",
        "test_learner_worker.py::test_on_policy_the_ratio_is_one_and_nothing_is_clipped",
    ),
    13: (
        "with learning rate 0 the mismatch stays flat",
        "test_learner_rules.py::test_13_with_learning_rate_0_the_mismatch_stays_flat_for_20_steps",
        "test_policy_objective.py::test_learning_rate_zero_leaves_the_mismatch_where_it_was",
    ),
    14: (
        "temperature divides the trainer's logits, row by row",
        "test_learner_worker.py::test_temperature_divides_the_logits_of_each_row",
        "test_head.py::test_temperature_divides_the_logits_of_its_own_row",
    ),
    15: (
        "no engine cuts the distribution: its log-probabilities would be off by the kept mass",
        "test_learner_rules.py::test_15_log_probabilities_of_a_cut_distribution_are_off_by_exactly_the_kept_mass",
        "test_learner_rules.py::test_15_no_engine_is_asked_to_cut_the_distribution",
    ),
    16: (
        "log-sum-exp in fp32 over logits of any type; the chunked head is the dense one",
        "test_head.py::test_bf16_logits_are_normalised_in_fp32",
        "test_head.py::test_chunked_head_equals_the_dense_head_with_gradients",
    ),
    17: (
        "one gap is weighed once",
        "test_policy_objective.py::test_what_is_recomputed_is_corrected_and_what_divides_by_the_engine_is_not",
        "test_policy_objective.py::test_settings_that_weigh_one_gap_twice_make_no_objective",
    ),
    18: (
        "each token keeps the version that sampled it",
        "test_learner_rules.py::test_18_a_turn_that_crossed_an_update_keeps_the_version_of_each_token",
        "test_engines.py::test_ids_come_back_with_a_logprob_and_a_version_each",
    ),
    19: (
        "a group of one, or without spread, has advantage exactly 0",
        "test_step_advantages.py::test_a_group_of_one_and_one_without_spread_get_exactly_nought",
        "algorithms/test_algorithms_advantages.py::test_a_group_of_one_or_without_spread_gets_exactly_zero",
    ),
    20: (
        "the KL in the reward is masked, and reaches GRPO",
        "test_step_advantages.py::test_the_kl_in_the_reward_costs_the_tokens_of_gae_and_the_score_of_grpo",
    ),
    21: (
        "whitening is over all ranks, by tokens",
        "test_learner_rules.py::test_21_whitening_over_ranks_is_whitening_of_the_whole_step",
        "test_step_advantages.py::test_whitening_counts_the_tokens_in_the_loss",
    ),
    22: (
        "tied weights are sent once",
        "test_learner_worker.py::test_sent_weights_arrive_with_the_checksums_that_were_sent_and_tied_ones_once",
        "test_learner_worker.py::test_a_saved_folder_loads_with_transformers_and_says_the_same",
    ),
    23: (
        "the sync moved the right bytes, or is an error",
        "test_learner_rules.py::test_23_weights_that_did_not_arrive_as_they_were_sent_are_an_error",
        "test_weights_collective.py::test_what_arrives_is_what_was_sent_for_any_shapes_and_bucket_size",
        "test_engines.py::test_new_weights_arrive_whole_and_answer_from_then_on",
    ),
    24: (
        "the version moves after the weights, and the prefix cache with it",
        "test_engines.py::test_new_weights_arrive_whole_and_answer_from_then_on",
        "../acceptance/test_training_run.py::test_the_prefix_cache_is_cleared_after_every_weight_sync",
    ),
    25: (
        "a resumed run skips no prompt and trains none twice",
        "../acceptance/test_same_numbers.py::test_a_run_that_was_killed_again_and_again_is_the_run_that_was_not",
        "../acceptance/test_resume.py::test_a_run_whose_vllm_server_was_killed_goes_on_without_a_prompt_skipped_or_taken_twice",
        "test_selection.py::test_no_task_is_skipped_and_none_is_played_twice_whatever_dynamic_sampling_does",
        "test_draws.py::test_no_epoch_repeats_or_skips_a_task",
    ),
    26: (
        "the bound of staleness holds however fast the generator is",
        "test_generator.py::test_admission_keeps_the_staleness_bound_and_uses_it_fully",
    ),
    27: (
        "bounded means at the bound; the mean lag is measured",
        "test_generator.py::test_admission_keeps_the_staleness_bound_and_uses_it_fully",
        "test_policy_objective.py::test_staleness_is_the_mean_lag_of_the_tokens_whose_version_is_known",
        "test_policy_objective.py::test_the_panel_of_each_lag_is_that_of_its_own_tokens",
    ),
    28: (
        "nothing is chosen by when it finished",
        "test_generator.py::test_groups_keep_the_order_of_tasks_and_samples",
        "test_generator.py::test_the_same_seed_gives_the_same_tokens_at_any_concurrency",
    ),
    29: (
        "a failed environment is no reward of 0",
        "test_generator.py::test_an_environment_that_fails_costs_its_own_trajectory",
        "test_step_advantages.py::test_what_failed_or_sampled_nothing_is_in_no_baseline",
    ),
    30: (
        "every wait has a timeout and a name",
        "test_weights_collective.py::test_a_rank_that_never_joins_is_a_named_timeout",
        "test_vllm_server.py::test_a_slow_endpoint_is_a_timeout_with_its_name",
        "test_embedded_batches.py::test_no_answer_in_time_is_an_engine_error_that_says_so",
    ),
    31: (
        "seeds follow from step, task and sample",
        "test_draws.py::test_the_order_of_tasks_follows_from_place_and_seed_alone",
        "test_generator.py::test_every_sample_has_a_seed_of_its_own_and_samples_its_own_way",
    ),
    32: (
        "a reward finds its rows by name",
        "test_step_advantages.py::test_the_order_of_groups_and_of_other_trajectories_rows_changes_nothing",
    ),
    33: (
        "the rows of an episode share its weight and its advantage",
        "test_packing.py::test_optimizer_steps_tear_no_trajectory_apart_and_lose_no_row",
        "test_learner_rules.py::test_33_the_rows_of_one_episode_share_its_weight_and_its_advantage",
        "algorithms/test_algorithms_reductions.py::test_rows_of_one_trajectory_share_its_weight",
    ),
}


@functools.cache
def names_in(path):
    tree = ast.parse((FOLDER / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("number", RULES)
def test_the_tests_of_a_rule_exist(number):
    _, *tests = RULES[number]
    assert tests
    for path, name in (test.split("::") for test in tests):
        assert name.startswith("test_")
        assert name in names_in(path), f"{path}::{name}"
