"""The critic's loss, losses of preferences, and distillation: numbers, gradients, masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_train.algorithms.kl import distillation_advantages
from agent_train.algorithms.losses import value_loss
from agent_train.algorithms.preferences import dpo, ipo, kto, kto_reference, reward_model

NUMBERS = st.floats(-5.0, 5.0)
ONE_T = torch.tensor([True])


def number(value):
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


def slope(loss, at):
    return torch.autograd.grad(loss.sum(), at)[0].item()


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient"),
    [
        (1.0, 0.0, 0.5, 0.5, 0.125, 0.5),
        (1.0, 0.0, 2.0, 0.5, 1.125, 0.0),
        (1.0, 0.0, 2.0, None, 0.5, -1.0),
        (-1.0, 0.0, -2.0, 0.5, 1.125, 0.0),
        (0.3, 0.0, 2.0, 0.5, 1.445, -1.7),
    ],
)
def test_a_value_is_held_back_where_it_runs_ahead_and_still_pays_for_being_wrong(
    value, old, target, clip, loss, gradient
):
    value_T = number(value)
    loss_T, clipped_T = value_loss(value_T, torch.tensor([old]), torch.tensor([target]), ONE_T, clip)
    assert loss_T.item() == pytest.approx(loss, abs=1e-6)
    assert slope(loss_T, value_T) == pytest.approx(gradient, abs=1e-6)
    assert clipped_T.item() == (gradient == 0.0)


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0.01, 2.0))
def test_the_clipped_value_loss_is_never_below_the_plain_one(value, old, target, clip):
    args = (torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), ONE_T)
    assert value_loss(*args, clip)[0].item() >= value_loss(*args)[0].item()


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_rubbish_in_masked_values_reaches_neither_loss_nor_gradient(rubbish, clip):
    mask_T = torch.tensor([True, False])
    values_T = torch.tensor([1.0, rubbish], requires_grad=True)
    other_T = torch.tensor([0.5, rubbish])
    loss_T, _ = value_loss(values_T, other_T, other_T, mask_T, clip)
    loss_T.sum().backward()
    assert loss_T.tolist() == [0.125, 0.0]
    assert values_T.grad.tolist() == [0.5, 0.0]


def test_dpo():
    chosen, rejected = number(2.0), number(-1.0)
    loss = dpo(chosen, rejected, beta=0.1)
    assert loss.item() == pytest.approx(0.554355, abs=1e-6)
    # beta * sigmoid(-beta * gap), down for the chosen and up for the rejected.
    expected = 0.1 / (1 + math.exp(0.3))
    assert slope(dpo(chosen, rejected, beta=0.1), chosen) == pytest.approx(-expected)
    assert slope(loss, rejected) == pytest.approx(expected)


def test_dpo_of_answers_that_are_alike_is_that_of_a_coin():
    assert dpo(number(0.3), number(0.3)).item() == pytest.approx(math.log(2))


def test_dpo_stays_finite_far_out():
    assert dpo(number(-1e5), number(1e5)).item() == pytest.approx(2e4)
    assert dpo(number(1e5), number(-1e5)).item() == 0.0


def test_ipo_has_a_target_and_does_not_run_past_it():
    gap = number(3.0)
    assert ipo(gap, torch.zeros(1), beta=0.1).item() == pytest.approx(4.0)
    assert slope(ipo(gap, torch.zeros(1), beta=0.1), gap) == pytest.approx(-4.0)
    past = number(7.0)
    assert slope(ipo(past, torch.zeros(1), beta=0.1), past) == pytest.approx(4.0)


def test_kto_judges_each_answer_against_the_reference_point():
    margin_R = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss_R = kto(margin_R, torch.tensor([True, False]), torch.tensor(1.0), beta=0.1, disliked_weight=1.5)
    # 1 - sigmoid(.1) = .475021; 1.5 * (1 - sigmoid(-.1)) = 1.5 * .524979.
    assert loss_R.tolist() == pytest.approx([0.475021, 0.787469], abs=1e-6)
    loss_R.sum().backward()
    steep = 0.1 * 0.475021 * 0.524979
    assert margin_R.grad.tolist() == pytest.approx([-steep, 1.5 * steep], abs=1e-6)


def test_the_reference_point_of_kto_is_a_divergence_so_never_negative_and_has_no_gradient():
    mismatched_R = torch.tensor([1.0, 2.0], requires_grad=True)
    assert kto_reference(mismatched_R).item() == 1.5
    assert not kto_reference(mismatched_R).requires_grad
    assert kto_reference(-mismatched_R).item() == 0.0


def test_reward_model():
    chosen, rejected = number(1.5), number(0.5)
    assert reward_model(chosen, rejected).item() == pytest.approx(0.313262, abs=1e-6)
    assert slope(reward_model(chosen, rejected), chosen) == pytest.approx(-0.268941, abs=1e-6)
    assert reward_model(chosen, chosen).item() == pytest.approx(math.log(2))


def test_distillation_pays_what_the_teacher_finds_likelier():
    logprobs_T = torch.tensor([-1.0, -2.0, math.nan, -1.0], requires_grad=True)
    teacher_T = torch.tensor([-1.5, -1.0, 3.0, -math.inf])
    advantages_T = distillation_advantages(logprobs_T, teacher_T, torch.tensor([True, True, False, True]), coef=2.0)
    assert advantages_T.tolist() == [-1.0, 2.0, 0.0, -40.0]
    assert not advantages_T.requires_grad


def test_distillation_leaves_a_student_that_is_its_teacher_alone():
    logprobs_T = torch.tensor([-1.0, -2.0])
    assert not distillation_advantages(logprobs_T, logprobs_T, torch.tensor([True, True])).any()


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_divergence():
    # One token, three words: sum over words of p * (-A) * grad log p against the derivative of KL(p || teacher).
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(0)
    divergence = (log_p.exp() * (log_p - teacher)).sum()
    expected = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    advantages = distillation_advantages(log_p, teacher, torch.ones(3, dtype=torch.bool))
    surrogate = -(log_p.exp().detach() * advantages * log_p).sum()
    assert torch.allclose(torch.autograd.grad(surrogate, logits)[0], expected, atol=1e-12)
