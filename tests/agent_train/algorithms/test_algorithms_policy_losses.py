"""Losses token by token against the numbers of FORMULAS.md, gradients by autograd."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_train.algorithms.policy_losses import (
    aipo,
    cispo,
    dppo,
    kimi,
    m2po,
    m2po_drift,
    m2po_limit,
    raft_pp,
    reinforce,
    sapo,
    topr,
)

OLD_T = torch.tensor([-1.0, -1.0])


def at(*ratios, old_T=OLD_T):
    """Log-probabilities with these ratios to the old ones."""
    return (old_T + torch.tensor(ratios).log()).requires_grad_()


def gradient(loss, logprobs_T):
    return torch.autograd.grad(loss, logprobs_T)[0].tolist()


def numbers(*values):
    return pytest.approx(list(values), abs=1e-6)


def test_reinforce_is_the_likelihood_times_the_advantage():
    logprobs_T = at(2.0, 0.605)
    loss_T = reinforce(logprobs_T, torch.tensor([2.0, -1.0]))
    assert loss_T.tolist() == numbers(-2 * (-1 + math.log(2)), -1 + math.log(0.605))
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-2.0, 1.0)


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token():
    logprobs_T = at(2.0, 0.605)
    loss = cispo(logprobs_T, OLD_T, torch.ones(2), clip_low=0.2, clip_high=0.28).mean()
    assert loss.item() == pytest.approx(0.797397, abs=1e-6)
    assert gradient(loss, logprobs_T) == numbers(-0.64, -0.4)


def test_cispo_has_no_lower_bound_unless_it_is_asked_for():
    logprobs_T = at(2.0, 0.605)
    loss = cispo(logprobs_T, OLD_T, torch.ones(2), clip_high=4.0).mean()
    assert gradient(loss, logprobs_T) == numbers(-1.0, -0.3025)


def test_sapo_fades_a_token_out_instead_of_clipping_it():
    logprobs_T = at(2.0, 0.605)
    loss = sapo(logprobs_T, OLD_T, torch.tensor([1.0, -1.0])).mean()
    assert loss.item() == pytest.approx(-0.704453, abs=1e-6)
    assert gradient(loss, logprobs_T) == numbers(-0.786448, 0.289855)


def test_topr_takes_what_is_good_whole_and_what_is_bad_by_its_ratio_up_to_one():
    old_T = torch.full((4,), -1.0)
    logprobs_T = at(2.0, 0.605, 2.0, 0.605, old_T=old_T)
    loss_T = topr(logprobs_T, old_T, torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-1.0, -1.0, 1.0, 0.605)
    assert loss_T.tolist() == numbers(0.306853, 1.502527, -0.306853, -0.909029)


def test_raft_learns_from_successes_only():
    old_T = torch.full((4,), -1.0)
    logprobs_T = at(1.1, 1.5, 1.1, 0.5, old_T=old_T)
    loss_T = raft_pp(logprobs_T, old_T, torch.tensor([1.0, 1.0, -1.0, 0.0]), clip_low=0.2, clip_high=0.28)
    assert loss_T.tolist() == numbers(-1.1, -1.28, 0.0, 0.0)
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-1.1, 0.0, 0.0, 0.0)


def test_kimi_pulls_back_harder_the_farther_the_policy_went():
    logprobs_T = torch.tensor([-0.5, -41.0], requires_grad=True)
    loss_T = kimi(logprobs_T, OLD_T, torch.tensor([1.0, 0.0]), tau=0.4)
    assert loss_T.tolist() == numbers(0.5 + 0.2 * 0.25, 0.2 * 1600)
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-1.0 + 0.4 * 0.5, -16.0)


def test_dppo_drops_by_probability_not_by_ratio():
    behaviour_T = torch.tensor([0.4, 0.3, 0.5]).log()
    logprobs_T = torch.tensor([0.5, 0.3, 0.2]).log().requires_grad_()
    advantages_T = torch.tensor([1.0, 1.0, -1.0])
    loss = dppo(logprobs_T, behaviour_T, advantages_T, low=0.2, high=0.2, tau=1e-3).sum()
    assert loss.item() == pytest.approx(-2.249111, abs=1e-6)
    # The dropped token is still pulled back: 2 * tau * log(0.2 / 0.5).
    assert gradient(loss, logprobs_T) == numbers(-1.25 + 2e-3 * math.log(1.25), -1.0, 2e-3 * math.log(0.4))


def test_dppo_lets_a_rare_token_treble():
    behaviour_T, logprobs_T = torch.tensor([1e-4]).log(), torch.tensor([3e-4]).log()
    assert dppo(logprobs_T, behaviour_T, torch.ones(1), tau=0.0).item() == pytest.approx(-3.0, rel=1e-5)


def test_aipo_caps_the_weight_and_keeps_the_gradient():
    logprobs_T = at(8.0, 0.5)
    loss_T = aipo(logprobs_T, OLD_T, torch.tensor([1.0, -1.0]), cap=4.0)
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-4.0, 0.5)


def test_m2po_drops_the_farthest_of_the_tokens_that_a_clip_could_hold():
    # Counted are the first four: squares .09 .01 1 .04, means of the smallest .01 .025 .0467. Two of them stay within .04.
    behaviour_T = torch.full((6,), -1.0)
    logprobs_T = torch.tensor([-0.7, -0.9, 0.0, -1.2, -3.0, 0.0], requires_grad=True)
    advantages_T = torch.tensor([1.0, 1.0, 1.0, -2.0, 1.0, -1.0])
    limit = m2po_limit(m2po_drift(logprobs_T, behaviour_T, advantages_T))
    assert limit.item() == pytest.approx(0.3)
    loss_T = m2po(logprobs_T, behaviour_T, advantages_T, drift_limit=limit)
    expected = numbers(0.0, -math.exp(0.1), 0.0, 2 * math.exp(-0.2), -math.exp(-2.0), math.e)
    assert loss_T.tolist() == expected
    assert gradient(loss_T.sum(), logprobs_T) == expected


def test_m2po_keeps_what_brings_the_policy_back_however_far_it_has_gone():
    behaviour_T, advantages_T = torch.full((2,), -4.0), torch.tensor([1.0, -1.0])
    logprobs_T = torch.tensor([-9.0, -0.5], requires_grad=True)
    limit = m2po_limit(m2po_drift(logprobs_T, behaviour_T, advantages_T))
    assert limit.item() == math.inf
    # Far tokens that do not count leave no more room, or less, for those that do.
    assert m2po_limit(torch.tensor([0.0] * 50 + [0.3])) == m2po_limit(torch.tensor([0.3])) == torch.tensor(0.3)
    loss_T = m2po(logprobs_T, behaviour_T, advantages_T, drift_limit=torch.tensor(0.1))
    assert gradient(loss_T.sum(), logprobs_T) == numbers(-math.exp(-5.0), math.exp(3.5))


def test_m2po_drops_nothing_near_and_everything_far():
    assert m2po_limit(torch.tensor([0.19, 0.2])).item() == math.inf
    assert m2po_limit(torch.tensor([0.5, 0.6])).item() == 0.5
    assert m2po_limit(torch.tensor([])).item() == math.inf


@given(st.lists(st.floats(0.0, 2.0, width=32), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_what_m2po_keeps_is_within_the_budget_as_large_as_possible_and_blind_to_order(drift, random):
    limit = m2po_limit(torch.tensor(drift))
    kept = [d for d in drift if 0 < d < limit]
    dropped = sorted(d for d in drift if not d < limit)
    assert math.fsum(d * d for d in kept) <= 0.04 * len(kept) * (1 + 1e-9) + 1e-12
    if dropped:
        ties = [d for d in dropped if d == dropped[0]]
        assert math.fsum(d * d for d in [*kept, *ties]) > 0.04 * (len(kept) + len(ties)) * (1 - 1e-9)
    random.shuffle(drift)
    assert m2po_limit(torch.tensor(drift)) == limit
