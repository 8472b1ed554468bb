import math

import pytest
import torch

from agent_train.algorithms.kl import ESTIMATORS, adapted, kl_loss

LP, REF = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
BOTH = torch.ones(2, dtype=torch.bool)
NUMBERS = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [0.106531, 0.718282], "abs": [0.5, 1.0]}
SLOPES = {"k1": [1.0, 1.0], "k2": [0.5, -1.0], "k3": [1 - math.exp(-0.5), 1 - math.e], "abs": [1.0, -1.0]}


def value_and_slope(old_T=LP, **settings):
    lp_T = LP.clone().requires_grad_()
    kl_T = kl_loss(lp_T, REF, old_T, BOTH, **settings)
    kl_T.sum().backward()
    return kl_T.tolist(), lp_T.grad.tolist()


@pytest.mark.parametrize("value", ESTIMATORS)
@pytest.mark.parametrize("gradient", [None, *ESTIMATORS])
def test_the_number_is_of_one_estimator_and_the_gradient_of_another(value, gradient):
    number, slope = value_and_slope(value=value, gradient=gradient)
    assert number == pytest.approx(NUMBERS[value], abs=1e-6)
    assert slope == pytest.approx(SLOPES[gradient or value], abs=1e-6)


def test_importance_multiplies_the_number_and_with_full_its_own_gradient_too():
    old_T = LP - math.log(2)
    for importance, extra in (("detached", 0.0), ("full", 1.0)):
        number, slope = value_and_slope(old_T, value="k3", importance=importance)
        assert number == pytest.approx([2 * x for x in NUMBERS["k3"]], abs=1e-5)
        expected = [2 * s + extra * 2 * x for s, x in zip(SLOPES["k3"], NUMBERS["k3"], strict=True)]
        assert slope == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("reference", [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
def test_the_full_importance_makes_the_gradient_that_of_the_reverse_kl(reference):
    """Over all tokens of a small vocabulary, sampled by b: the expectation is exact."""
    logits_V = torch.tensor([0.3, -0.5, 0.1], requires_grad=True)
    log_ref_V, log_b_V = torch.tensor(reference).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    lp_V = logits_V.log_softmax(0)
    exact = torch.autograd.grad((lp_V.exp() * (lp_V - log_ref_V)).sum(), logits_V, retain_graph=True)[0]
    estimate_V = kl_loss(lp_V, log_ref_V, log_b_V, torch.ones(3, dtype=torch.bool), importance="full")
    torch.testing.assert_close(torch.autograd.grad((log_b_V.exp() * estimate_V).sum(), logits_V)[0], exact)


def test_a_bound_holds_the_number_and_leaves_the_gradient():
    number, slope = value_and_slope(value="k3", max_value=0.5)
    assert number == pytest.approx([0.106531, 0.5], abs=1e-6)
    assert slope == pytest.approx(SLOPES["k3"], abs=1e-6)


@pytest.mark.parametrize("value", ESTIMATORS)
@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_masked_cells_hold_anything(value, hole):
    lp_T = torch.tensor([-1.0, hole, -2.0], requires_grad=True)
    ref_T = torch.tensor([-1.5, math.nan, -1.0])
    kl_T = kl_loss(lp_T, ref_T, ref_T, torch.tensor([True, False, True]), value=value, importance="full")
    kl_T.sum().backward()
    assert kl_T[1] == 0
    assert lp_T.grad.isfinite().all()
    assert lp_T.grad[1] == 0


@pytest.mark.parametrize(("kl", "expected"), [(0.1, 1.0), (0.11, 1.05), (9.0, 1.1), (0.0, 0.9)])
def test_the_coefficient_follows_the_kl(kl, expected):
    assert adapted(1.0, kl, target=0.1, samples=50, horizon=100) == pytest.approx(expected)
