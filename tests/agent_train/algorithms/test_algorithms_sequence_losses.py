"""Losses of whole sequences: numbers, gradients, and that packing changes nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.losses import weighted_sum
from agent_train.algorithms.policy_losses import gmpo, gspo, gspo_token, sequence_log_ratio, topr_sequence

LOSSES = [gspo, gspo_token, gmpo, topr_sequence]
WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def whole(n):
    return torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64), 1


def two_tokens():
    old_T = torch.tensor([-1.0, -1.0])
    return (old_T + torch.tensor([2.0, 0.605]).log()).requires_grad_(), old_T


@pytest.mark.parametrize("loss_of", [gspo, gspo_token])
def test_gspo_has_one_ratio_for_all_tokens(loss_of):
    logprobs_T, old_T = two_tokens()
    loss = loss_of(logprobs_T, old_T, torch.ones(2), *whole(2), **WIDE).mean()
    loss.backward()
    assert loss.item() == pytest.approx(-1.1, abs=1e-6)
    assert logprobs_T.grad.tolist() == pytest.approx([-0.55, -0.55], abs=1e-6)


@pytest.mark.parametrize("loss_of", [gspo, gspo_token])
def test_gspo_clips_a_sequence_whole(loss_of):
    logprobs_T, old_T = two_tokens()
    loss = loss_of(logprobs_T, old_T, torch.ones(2), *whole(2)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(-1.0004, abs=1e-6)
    assert logprobs_T.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("loss_of", [gspo, gspo_token])
@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), [(0.5, -1.0, 0.8, 0.0), (0.5, 1.0, -0.5, -0.25)])
def test_gspo_has_a_lower_bound_of_its_own(loss_of, ratio, advantage, loss, slope):
    old_T = torch.tensor([-1.0, -1.0])
    logprobs_T = (old_T + math.log(ratio)).requires_grad_()
    loss_T = loss_of(logprobs_T, old_T, torch.full((2,), advantage), *whole(2), **WIDE)
    loss_T.mean().backward()
    assert loss_T.mean().item() == pytest.approx(loss, abs=1e-6)
    assert logprobs_T.grad.tolist() == pytest.approx([slope, slope], abs=1e-6)


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage():
    logprobs_T, old_T = two_tokens()
    loss = gspo_token(logprobs_T, old_T, torch.tensor([1.0, 3.0]), *whole(2), **WIDE).mean()
    loss.backward()
    assert loss.item() == pytest.approx(-2.2, abs=1e-6)
    assert logprobs_T.grad.tolist() == pytest.approx([-0.55, -1.65], abs=1e-6)


def test_gmpo_clips_each_log_ratio_and_takes_the_geometric_mean():
    logprobs_T, old_T = two_tokens()
    loss = gmpo(logprobs_T, old_T, torch.ones(2), *whole(2), **WIDE).mean()
    loss.backward()
    assert loss.item() == pytest.approx(-0.894703, abs=1e-6)
    assert logprobs_T.grad.tolist() == pytest.approx([0.0, -0.447352], abs=1e-6)


def test_gmpo_clips_the_other_side_where_the_advantage_is_negative():
    logprobs_T, old_T = two_tokens()
    loss = gmpo(logprobs_T, old_T, -torch.ones(2), *whole(2), **WIDE).mean()
    loss.backward()
    value = math.exp((math.log(2.0) - 0.2) / 2)
    assert loss.item() == pytest.approx(value, abs=1e-6)
    assert logprobs_T.grad.tolist() == pytest.approx([value / 2, 0.0], abs=1e-6)


@pytest.mark.parametrize(("ratios", "weight"), [((2.0, 0.25), 0.5), ((2.0, 0.605), 1.0), ((0.1, 0.2), 0.02)])
def test_topr_weighs_a_failure_by_the_product_of_its_ratios_up_to_one(ratios, weight):
    old_T = torch.tensor([-1.0, -1.0])
    logprobs_T = (old_T + torch.tensor(ratios).log()).requires_grad_()
    topr_sequence(logprobs_T, old_T, -torch.ones(2), *whole(2)).sum().backward()
    assert logprobs_T.grad.tolist() == pytest.approx([weight, weight], abs=1e-6)
    logprobs_T.grad = None
    topr_sequence(logprobs_T, old_T, torch.ones(2), *whole(2)).sum().backward()
    assert logprobs_T.grad.tolist() == [-1.0, -1.0]


def test_what_is_not_sampled_is_in_no_ratio():
    mask_T, segment_T = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 1, 1])
    logprobs_T, old_T = torch.tensor([-1.0, math.nan, -3.0, -7.0]), torch.tensor([-1.5, 1.0, -2.0, math.inf])
    assert sequence_log_ratio(logprobs_T, old_T, mask_T, segment_T, 2).tolist() == [0.5, 0.5, -1.0, -1.0]


def test_a_sequence_without_sampled_tokens_has_ratio_one():
    nothing_T = torch.zeros(3, dtype=torch.bool)
    ratio_T = sequence_log_ratio(torch.full((3,), math.nan), torch.zeros(3), nothing_T, torch.zeros(3).long(), 1)
    assert ratio_T.tolist() == [0.0, 0.0, 0.0]


def test_the_mean_log_ratio_is_clamped_so_that_no_ratio_overflows():
    far_T = sequence_log_ratio(torch.zeros(2), torch.full((2,), -1000.0), *whole(2))
    assert far_T.tolist() == [20.0, 20.0]


# Rows of (log-probability, old, sampled) with one advantage each.
TOKENS = st.tuples(st.floats(-4.0, -0.1), st.floats(-0.3, 0.3), st.booleans())
ROWS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.sampled_from([-1.5, 0.0, 0.7])), min_size=1, max_size=5
)


def summed(loss_of, rows, sequences):
    """The loss of rows packed in this order, as a mean over `sequences` sequences of means over tokens, and gradients by row."""
    mask_T = torch.tensor([t[2] for tokens, _ in rows for t in tokens])
    old_T = torch.tensor([t[0] for tokens, _ in rows for t in tokens], dtype=torch.float64)
    drift_T = torch.tensor([t[1] for tokens, _ in rows for t in tokens], dtype=torch.float64)
    logprobs_T = (old_T + drift_T).requires_grad_()
    lengths = [len(tokens) for tokens, _ in rows]
    sizes_T = torch.tensor(lengths)
    segment_T = torch.arange(len(rows)).repeat_interleave(sizes_T)
    advantages_T = torch.tensor([a for _, a in rows], dtype=torch.float64).repeat_interleave(sizes_T)
    sampled = torch.tensor([max(sum(t[2] for t in tokens), 1) for tokens, _ in rows]).repeat_interleave(sizes_T)
    given_clip = {} if loss_of is topr_sequence else WIDE
    loss_T = loss_of(logprobs_T, old_T, advantages_T, mask_T, segment_T, len(rows), **given_clip)
    loss = weighted_sum(loss_T, 1.0 / (sequences * sampled.double()), mask_T)
    loss.backward()
    return loss.item(), [g.tolist() for g in logprobs_T.grad.split(lengths)]


@settings(max_examples=40, deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]))
@pytest.mark.parametrize("loss_of", LOSSES)
def test_order_and_micro_batches_change_neither_loss_nor_gradient(loss_of, rows, random, parts):
    loss, gradients = summed(loss_of, rows, len(rows))
    order = random.sample(range(len(rows)), len(rows))
    shares = [order[i::parts] for i in range(parts) if order[i::parts]]
    results = [summed(loss_of, [rows[i] for i in share], len(rows)) for share in shares]
    assert math.fsum(part for part, _ in results) == pytest.approx(loss, abs=1e-6)
    for share, (_, parts_of) in zip(shares, results, strict=True):
        for index, gradient in zip(share, parts_of, strict=True):
            assert gradient == pytest.approx(gradients[index], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(rows):
    loss, gradients = summed(gspo, rows, len(rows))
    token_loss, token_gradients = summed(gspo_token, rows, len(rows))
    assert token_loss == pytest.approx(loss, abs=1e-9)
    for one, other in zip(gradients, token_gradients, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
