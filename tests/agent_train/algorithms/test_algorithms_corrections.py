import math

import pytest
import torch

from agent_train.algorithms.corrections import Gap, check_one_weight, correction, drifted, gap_of, interpolated
from agent_train.algorithms.losses import keep, segment_means, weighted_sum
from agent_train.algorithms.policy_losses import ppo_clip
from agent_train.config.extensions import corrections

ALL = torch.ones(3, dtype=torch.bool)
ONE_ROW = torch.zeros(3, dtype=torch.long)
W = torch.tensor([3.0, 0.8, 0.1])
GAP = Gap(torch.zeros(3), W.log())


@pytest.mark.parametrize(
    ("name", "numbers", "loss"),
    [
        ("tis", {"cap": 2.0}, -0.966667),
        ("icepop", {"low": 0.5, "high": 2.0}, -0.266667),
        ("seq-mask-tis", {"low": 0.5, "high": 2.0}, -1.3),
        ("sequence-is", {}, -0.24),
        ("geometric-is", {}, -0.621447),
        ("sequence-mask", {"low": 0.5, "high": 2.0}, 0.0),
        ("geometric-mask", {"low": 0.5, "high": 2.0}, -1.0),
    ],
)
def test_the_numbers_of_three_tokens(name, numbers, loss):
    logprobs_T = torch.zeros(3, requires_grad=True)
    policy_T = ppo_clip(logprobs_T, GAP.old_T, torch.ones(3), 0.2, 0.28)
    weights_T = corrections.load(name)(GAP, ALL, ONE_ROW, 1, **numbers)
    value = weighted_sum(policy_T * weights_T, torch.full((3,), 1 / 3), ALL)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    value.backward()
    # The weight is a constant: the gradient is that of the policy loss, times it.
    torch.testing.assert_close(logprobs_T.grad, -weights_T / 3)


def test_rows_are_decided_one_by_one_and_masked_cells_hold_anything():
    log_weight_T = torch.tensor([0.0, math.nan, 1.0, math.inf, 1.0])
    mask_T = torch.tensor([True, False, True, False, True])
    segment_T = torch.tensor([0, 0, 1, 1, 1])
    gap = gap_of(-log_weight_T, mask_T, torch.zeros(5))
    kept_T = correction(gap, mask_T, segment_T, 2, level=None, band_level="geometric", low=0.5, high=2.0)
    assert kept_T.tolist() == [1, 0, 0, 0, 0]
    product_T = correction(gap, mask_T, segment_T, 2, level="sequence")
    assert product_T.tolist() == pytest.approx([1, 0, math.e**2, 0, math.e**2])


def test_a_ratio_against_the_behaviour_policy_leaves_nothing_to_correct():
    gap = gap_of(-W.log(), ALL)
    assert gap.log_weight_T is None
    assert gap.old_T.tolist() == (-W.log()).tolist()
    with pytest.raises(ValueError, match="twice"):
        correction(gap, ALL, ONE_ROW, 1, cap=2.0)


def test_decoupled_ratios_multiply_to_the_whole_ratio():
    now_T, old_T, behaviour_T = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    for proximal_T in (old_T, interpolated(now_T, behaviour_T, torch.tensor([0, 1, 3]), 3, 4)):
        gap = gap_of(behaviour_T, ALL, proximal_T)
        torch.testing.assert_close((now_T - gap.old_T) + gap.log_weight_T, now_T - behaviour_T)


def place(versions, proximal, now):
    """Where the proximal policy lies between the behaviour policy (0) and the trained one (1)."""
    ones_T = torch.ones(len(versions), requires_grad=True)
    found_T = interpolated(ones_T, torch.zeros(len(versions)), torch.tensor(versions), proximal, now)
    assert not found_T.requires_grad
    return found_T.tolist()


def test_the_interpolated_policy_lies_between_behaviour_and_trained_by_the_versions():
    assert place([0, 1, 3], 3, 4) == pytest.approx([3 / 4, 2 / 3, 0])
    # A token of a version after the proximal one lies at the behaviour policy.
    assert place([4, 5], 3, 4) == [0, 0]
    # One update per step: the trained policy is the proximal one, the ratio is exactly 1.
    assert place([2, 4], 4, 4) == [1, 1]


def test_opsm_drops_only_what_has_drifted_and_was_bad():
    segment_T = torch.tensor([0, 0, 1, 1, 2, 2])
    mask_T = torch.tensor([True, True, True, False, True, True])
    now_T = torch.tensor([-1.2, -1.2, -1.2, math.nan, -1.2, -0.9])
    old_T = torch.full((6,), -1.0)
    advantages_T = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    dropped_T = drifted(now_T, old_T, advantages_T, mask_T, segment_T, 3, delta=0.1)
    assert dropped_T.tolist() == [True, True, False, False, False, False]


def test_a_row_without_sampled_tokens_has_mean_0():
    means_S = segment_means(torch.tensor([math.nan, 2.0]), torch.tensor([False, True]), torch.tensor([0, 1]), 2)
    assert means_S.tolist() == [0, 2]


def test_a_gap_of_nan_in_a_masked_cell_gives_a_finite_loss_and_gradient():
    mask_T = torch.tensor([True, False, True])
    logprobs_T = torch.tensor([-1.0, math.nan, -1.0], requires_grad=True)
    gap = gap_of(torch.tensor([-1.5, math.nan, -1.0]), mask_T, logprobs_T)
    weights_T = correction(gap, mask_T, ONE_ROW, 1, cap=2.0)
    loss_T = ppo_clip(keep(logprobs_T, mask_T), gap.old_T, torch.ones(3), 0.2, 0.28)
    weighted_sum(loss_T * weights_T, torch.ones(3), mask_T).backward()
    assert logprobs_T.grad.tolist() == pytest.approx([-math.exp(0.5), 0, -1])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("recomputed", "tis", True), "set proximal to behaviour"),
        (("behaviour", "tis", False), "covers it already"),
        (("behaviour", "tis", True), "covers it already"),
        (("recomputed", "cap", False), "unknown correction 'cap'"),
    ],
)
def test_settings_that_weigh_one_gap_twice_are_refused(arguments, what):
    with pytest.raises(ValueError, match=what):
        check_one_weight(*arguments)


def test_settings_that_weigh_each_gap_once_pass():
    check_one_weight("recomputed", "tis", False)
    check_one_weight("interpolated", None, False)
    check_one_weight("behaviour", None, True)
