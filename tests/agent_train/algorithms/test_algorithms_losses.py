"""The dual clip and the entropy bonus, and what half precision does to a ratio. The rest of `losses` is in test_losses.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_train.algorithms.losses import log_ratio
from agent_train.algorithms.policy_losses import ppo_clip

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
RATIOS = st.floats(0.01, 50.0)
ADVANTAGES = st.floats(-5.0, 5.0)


def at(ratio):
    return (torch.tensor([-1.0], dtype=torch.float64) + math.log(ratio)).requires_grad_()


OLD_T = torch.tensor([-1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (5.0, 1.0, -1.28, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_the_dual_clip_bounds_what_a_negative_advantage_can_cost(ratio, advantage, loss, gradient):
    logprobs_T = at(ratio)
    loss_T = ppo_clip(logprobs_T, OLD_T, torch.tensor([advantage]), LOW, HIGH, DUAL)
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs_T.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("wrong", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_that_would_cut_the_range_itself_is_refused(wrong):
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        ppo_clip(OLD_T, OLD_T, OLD_T, LOW, HIGH, wrong)


@given(RATIOS, ADVANTAGES, st.sampled_from([None, 1.5, DUAL]))
def test_ppo_is_its_definition_in_plain_numbers(ratio, advantage, dual):
    kept = min(max(ratio, 1 - LOW), 1 + HIGH)
    expected = -min(ratio * advantage, kept * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, -dual * advantage)
    advantages_T = torch.tensor([advantage], dtype=torch.float64)
    assert ppo_clip(at(ratio), OLD_T, advantages_T, LOW, HIGH, dual).item() == pytest.approx(expected, rel=1e-9)


@given(RATIOS, ADVANTAGES)
def test_no_clip_makes_the_loss_look_better_than_the_unclipped_one(ratio, advantage):
    advantages_T = torch.tensor([advantage], dtype=torch.float64)
    assert ppo_clip(at(ratio), OLD_T, advantages_T, LOW, HIGH).item() >= -ratio * advantage - 1e-9


def test_half_precision_is_left_before_the_ratio_is_taken():
    logprobs_T, old_T = torch.tensor([-3.0]).bfloat16(), torch.tensor([-3.015625]).bfloat16()
    assert log_ratio(logprobs_T, old_T).dtype == torch.float32
    # bf16 has no number between 1 and 1.0078: the ratio e^(1/64) would be off by a tenth of its distance from 1.
    assert ppo_clip(logprobs_T, old_T, torch.ones(1)).item() == pytest.approx(-math.exp(0.015625), abs=1e-7)
