"""Returns that see sampled tokens only, and whitening over a training step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.advantages import group_advantages
from agent_train.algorithms.returns import decayed_sum, moments, reinforce_pp_baseline, return_to_go, whiten
from agent_train.algorithms.turn_rewards import place

NAN = math.nan
A, B = [1.0, 0.0, 0.0, 1.0], [3.0, 1.0]
LENGTHS_A, LENGTHS_B = [2, 4, 3, 1], [2, 2]
# a a o o a: two sampled tokens, an observation of two, one sampled token.
TURNS = torch.tensor([True, True, False, False, True])
ONE = torch.zeros(5, dtype=torch.int64)


def example():
    """The six trajectories of both groups: mask, trajectory of each token, rewards on the last tokens."""
    segment_T = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS_A + LENGTHS_B))
    mask_T = torch.ones_like(segment_T, dtype=torch.bool)
    return mask_T, segment_T, place(torch.tensor(A + B), mask_T, segment_T)


def of_trajectories(values_T, segment_T):
    """The one number that every token of a trajectory has."""
    firsts = [values_T[segment_T == s] for s in range(int(segment_T.max()) + 1)]
    assert all((part == part[0]).all() for part in firsts)
    return [float(part[0]) for part in firsts]


def test_a_return_goes_back_over_an_observation():
    rewards_T = torch.tensor([0, 0, NAN, NAN, 1])
    assert return_to_go(rewards_T, TURNS, ONE).tolist() == [1, 1, 0, 0, 1]


def test_the_discount_counts_sampled_tokens_only():
    rewards_T = torch.tensor([0, 0, NAN, NAN, 1])
    assert return_to_go(rewards_T, TURNS, ONE, gamma=0.9).tolist() == pytest.approx([0.81, 0.9, 0, 0, 1])


def test_a_return_stays_in_its_trajectory():
    mask_T, segment_T, rewards_T = example()
    assert of_trajectories(return_to_go(rewards_T, mask_T, segment_T), segment_T) == A + B


def test_reinforce_pp_whitens_by_tokens():
    mask_T, segment_T, rewards_T = example()
    returns_T = return_to_go(rewards_T, mask_T, segment_T)
    totals = moments(returns_T, mask_T)
    assert totals.tolist() == [14, 11, 23]
    whitened_T = whiten(returns_T, mask_T, totals)
    expected = [0.203906, -0.747657, -0.747657, 0.203906, 2.107033, 0.203906]
    assert of_trajectories(whitened_T, segment_T) == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize(
    ("std", "of_a", "of_b"),
    [
        ("population", [0.964901, -0.536056, -0.536056, 0.964901], [1.715380, -1.286535]),
        ("sample", [0.929802, -0.516557, -0.516557, 0.929802], [1.652982, -1.239736]),
    ],
)
def test_reinforce_pp_baseline_has_its_published_numbers(std, of_a, of_b):
    a, b = reinforce_pp_baseline([A, B], [LENGTHS_A, LENGTHS_B], std)
    assert a == pytest.approx(of_a, abs=3e-6)
    assert b == pytest.approx(of_b, abs=3e-6)


def test_reinforce_pp_baseline_of_trajectories_is_that_of_tokens():
    mask_T, segment_T, _ = example()
    centred_T = torch.tensor(group_advantages(A, "none") + group_advantages(B, "none"))[segment_T]
    whitened_T = whiten(centred_T, mask_T, moments(centred_T, mask_T))
    a, b = reinforce_pp_baseline([A, B], [LENGTHS_A, LENGTHS_B])
    assert of_trajectories(whitened_T, segment_T) == pytest.approx(a + b, rel=1e-6)


def test_groups_that_teach_nothing_are_as_if_they_had_been_left_out():
    alone = reinforce_pp_baseline([A, B], [LENGTHS_A, LENGTHS_B])
    a, same, one, b = reinforce_pp_baseline(
        [[*A, None, 9.0], [2.0, 2.0], [7.0], B], [[*LENGTHS_A, 3, 0], [8, 1], [50], LENGTHS_B]
    )
    assert (same, one, a[4:]) == ([0.0, 0.0], [0.0], [0.0, 0.0])
    assert [a[:4], b] == alone


def test_nothing_to_whiten_is_nothing():
    assert reinforce_pp_baseline([[1.0, 1.0], [None]], [[3, 3], [0]]) == [[0.0, 0.0], [0.0]]
    assert reinforce_pp_baseline([], []) == []


def test_moments_of_the_ranks_are_added():
    mask_T, segment_T, rewards_T = example()
    returns_T = return_to_go(rewards_T, mask_T, segment_T)
    whole = whiten(returns_T, mask_T, moments(returns_T, mask_T))
    ranks = [slice(0, 6), slice(6, 6), slice(6, 14)]
    totals = torch.stack([moments(returns_T[part], mask_T[part]) for part in ranks]).sum(0)
    assert torch.equal(torch.cat([whiten(returns_T[part], mask_T[part], totals) for part in ranks]), whole)


@pytest.mark.parametrize(
    "values", [[0.3], [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3], [0.0, 0.0], [1e6, 1e6 + 0.01], [1.0, 1.0 + 1e-7], []]
)
@pytest.mark.parametrize("std", ["sample", "population"])
def test_values_that_do_not_differ_are_whitened_to_exactly_zero(values, std):
    values_T = torch.tensor(values, dtype=torch.float64)
    mask_T = torch.ones_like(values_T, dtype=torch.bool)
    assert whiten(values_T, mask_T, moments(values_T, mask_T), std).tolist() == [0.0] * len(values)


def test_what_was_not_sampled_is_never_read():
    values_T = torch.tensor([1.0, NAN, math.inf, 3.0])
    mask_T = torch.tensor([True, False, False, True])
    whitened_T = whiten(values_T, mask_T, moments(values_T, mask_T), "population", eps=0.0)
    assert whitened_T.tolist() == [-1, 0, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(-2, 2, width=32)), max_size=40),
    st.floats(0, 1, width=32),
)
def test_a_return_is_what_one_pass_from_the_right_gives(cells, gamma):
    cells.sort(key=lambda cell: cell[0])
    segment_T = torch.tensor([s for s, _, _ in cells], dtype=torch.int64)
    mask_T = torch.tensor([m for _, m, _ in cells], dtype=torch.bool)
    rewards_T = torch.tensor([r if m else NAN for _, m, r in cells])
    expected, carried = [], {}
    for segment, sampled, reward in reversed(cells):
        if sampled:
            carried[segment] = reward + gamma * carried.get(segment, 0.0)
        expected.append(carried[segment] if sampled else 0.0)
    returns_T = return_to_go(rewards_T, mask_T, segment_T, gamma)
    assert returns_T.tolist() == pytest.approx(expected[::-1], abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=30))
def test_whitened_values_have_mean_0_and_deviation_1(values):
    values_T = torch.tensor(values)
    whitened_T = whiten(
        values_T, torch.ones_like(values_T, dtype=torch.bool), moments(values_T, values_T == values_T), eps=0.0
    )
    if whitened_T.any():
        assert float(whitened_T.double().mean()) == pytest.approx(0, abs=1e-5)
        assert float(whitened_T.double().std()) == pytest.approx(1, abs=1e-5)


def test_the_sum_with_decays_lets_gradients_through():
    values_M = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    decayed_sum(values_M, torch.tensor([0.5, 0.5, 0.5]))[0].backward()
    assert values_M.grad.tolist() == [1, 0.5, 0.25]
