"""Losses against the numbers of their definitions."""

import math

import pytest
import torch

from agent_train.algorithms.losses import k3, keep, log_ratio, running_sum, weighted_sum
from agent_train.algorithms.policy_losses import ppo_clip

LOW, HIGH = 0.2, 0.28


def ppo(ratio, advantage):
    old_T = torch.tensor([-1.0])
    return ppo_clip(old_T + math.log(ratio), old_T, torch.tensor([advantage]), LOW, HIGH).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.5, 1.0, -1.28), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (0.5, -1.0, 0.8)]
)
def test_ppo_clips_on_the_side_that_the_advantage_pushes_to(ratio, advantage, loss):
    assert ppo(ratio, advantage) == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "held"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, 1.0, False), (0.5, -1.0, True), (1.27, 1.0, False)],
)
def test_a_clipped_token_has_no_gradient(ratio, advantage, held):
    old_T = torch.tensor([-1.0])
    logprobs_T = (old_T + math.log(ratio)).requires_grad_()
    ppo_clip(logprobs_T, old_T, torch.tensor([advantage]), LOW, HIGH).sum().backward()
    assert (logprobs_T.grad.item() == 0.0) == held


def test_the_log_ratio_is_clamped_so_that_no_ratio_overflows():
    far_T = log_ratio(torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0]))
    assert far_T.tolist() == [20.0, -20.0]
    assert torch.isfinite(far_T.exp()).all()


def test_token_mean_is_the_same_however_the_samples_are_split():
    # Sample 1 has the token 4, sample 2 the tokens 1 2 3: 2.5, where a mean of means would give 3.
    first, second = torch.tensor([4.0]), torch.tensor([1.0, 2.0, 3.0])

    def part(loss_T):
        return weighted_sum(loss_T, torch.full_like(loss_T, 0.25), torch.ones_like(loss_T, dtype=torch.bool)).item()

    assert part(torch.cat([first, second])) == 2.5
    assert part(first) + part(second) == 2.5


def test_a_masked_cell_counts_for_nothing():
    loss_T = torch.tensor([4.0, 1.0, 2.0, 3.0, 100.0])
    mask_T = torch.tensor([True, True, True, True, False])
    assert weighted_sum(loss_T, torch.full((5,), 0.25), mask_T).item() == 2.5


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_rubbish_in_masked_cells_reaches_neither_loss_nor_gradient(rubbish):
    mask_T = torch.tensor([True, False])
    logprobs_T = torch.tensor([-1.0, rubbish], requires_grad=True)
    other_T = torch.tensor([1.0, rubbish])
    loss_T = ppo_clip(
        keep(logprobs_T, mask_T), keep(torch.tensor([-1.0, rubbish]), mask_T), keep(other_T, mask_T), LOW, HIGH
    )
    loss = weighted_sum(loss_T, other_T, mask_T)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs_T.grad.tolist() == [-1.0, 0.0]


def test_k3_has_its_published_values_and_is_never_negative():
    assert k3(torch.tensor([-0.5, 1.0])).tolist() == pytest.approx([0.106531, 0.718282], abs=1e-6)
    assert k3(torch.tensor([1e-4, -1e-4, 0.0])).min() >= 0


def test_a_running_sum_is_cumsum():
    """On a GPU a deterministic run has it computed on the host, which no test here can try."""
    values = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 0.0]])
    assert running_sum(values, -1).tolist() == [[1.0, 3.0, 7.0], [0.5, 0.75, 0.75]]
    assert running_sum(values, 0).tolist() == [[1.0, 2.0, 4.0], [1.5, 2.25, 4.0]]
