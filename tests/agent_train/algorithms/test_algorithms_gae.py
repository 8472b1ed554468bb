"""GAE with a critic: no observation leaks in, turns are told by their boundaries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.returns import adaptive_lambda, bilevel_gae, gae, return_to_go

NAN = math.nan
TURNS = torch.tensor([True, True, False, False, True])
ONE = torch.zeros(5, dtype=torch.int64)


def everywhere(size):
    return torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)


@pytest.mark.parametrize("observed", [9.0, 0.0, NAN, math.inf])
def test_the_value_of_an_observation_never_leaks_in(observed):
    rewards_T = torch.tensor([0, 0, observed, observed, 1])
    values_T = torch.tensor([0.1, 0.2, observed, observed, 0.5])
    advantages_T = gae(rewards_T, values_T, TURNS, ONE, gamma=1.0, lam=0.5)
    assert advantages_T.tolist() == pytest.approx([0.375, 0.55, 0, 0, 0.5])


def test_the_discount_counts_sampled_tokens_only():
    rewards_T, values_T = torch.tensor([0.0, 0, 0, 0, 1]), torch.zeros(5)
    assert gae(rewards_T, values_T, TURNS, ONE, gamma=0.9, lam=1.0).tolist() == pytest.approx([0.81, 0.9, 0, 0, 1])


def test_a_trajectory_ends_where_the_next_begins():
    mask_T, segment_T = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    rewards_T, values_T = torch.tensor([0.0, 1, 0, 0]), torch.tensor([0.5, 0.5, 7, 8])
    expected = gae(rewards_T[:2], values_T[:2], mask_T[:2], segment_T[:2], 0.9, 0.8).tolist()
    assert gae(rewards_T, values_T, mask_T, segment_T, 0.9, 0.8).tolist()[:2] == expected


def test_advantages_carry_no_gradient():
    values_T = torch.rand(5, requires_grad=True)
    assert not gae(torch.zeros(5), values_T, TURNS, ONE).requires_grad
    assert not bilevel_gae(torch.zeros(5), values_T, TURNS, ONE, ONE).requires_grad


def test_advantage_and_value_together_are_the_return_at_lambda_1():
    rewards_T, values_T = torch.tensor([0.5, 0, NAN, NAN, 1]), torch.tensor([3.0, -2, NAN, NAN, 9])
    targets_T = (gae(rewards_T, values_T, TURNS, ONE, gamma=0.9) + values_T)[TURNS]
    assert targets_T.tolist() == pytest.approx(return_to_go(rewards_T, TURNS, ONE, 0.9)[TURNS].tolist(), abs=1e-5)


def test_bilevel_gae_of_two_turns_of_two_tokens():
    rewards_T, values_T = torch.tensor([0.0, 1, 0, 2]), torch.tensor([0.5, 0.4, 0.3, 0.2])
    turn_T = torch.tensor([0, 0, 1, 1])
    advantages_T = bilevel_gae(rewards_T, values_T, *everywhere(4), turn_T, gamma=0.9, lam=0.8, turn_gamma=0.5)
    assert advantages_T.tolist() == pytest.approx([0.8824, 1.42, 1.176, 1.8])


def test_bilevel_gae_of_two_turns_of_five_tokens():
    rewards_T = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    values_T = torch.arange(1, 11) / 10
    turn_T = torch.arange(2).repeat_interleave(5)
    advantages_T = bilevel_gae(rewards_T, values_T, *everywhere(10), turn_T, 1.0, 1.0, turn_gamma=0.95)
    assert advantages_T.tolist() == pytest.approx([1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0], abs=1e-6)


def test_a_turn_without_reward_is_still_a_turn():
    values_T = torch.tensor([0.5, 0.4, 0.3, 0.2])
    turn_T = torch.tensor([0, 0, 1, 1])
    advantages_T = bilevel_gae(torch.zeros(4), values_T, *everywhere(4), turn_T, 1.0, 1.0, turn_gamma=0.5, turn_lam=0.0)
    # B_2 = -.2 and B_1 = .5 * .2 - .4 = -.3; inside, the end's B + V less the token's own value.
    assert advantages_T.tolist() == pytest.approx([-0.4, -0.3, -0.3, -0.2], abs=1e-6)


def test_bilevel_gae_sees_no_observation_and_no_other_trajectory():
    # a a o o a a | a a: the first four sampled tokens are the example of two turns.
    mask_T = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    rewards_T = torch.tensor([0.0, 1, NAN, NAN, 0, 2, 5, 5])
    values_T = torch.tensor([0.5, 0.4, NAN, math.inf, 0.3, 0.2, 6, 6])
    segment_T, turn_T = torch.tensor([0] * 6 + [1] * 2), torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    advantages_T = bilevel_gae(rewards_T, values_T, mask_T, segment_T, turn_T, 0.9, 0.8, turn_gamma=0.5)
    assert advantages_T.tolist()[:6] == pytest.approx([0.8824, 1.42, 0, 0, 1.176, 1.8])


def test_turns_may_be_numbered_in_each_trajectory():
    mask_T, segment_T = torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 1])
    rewards_T, values_T = torch.rand(5), torch.rand(5)
    of_trajectories = bilevel_gae(rewards_T, values_T, mask_T, segment_T, torch.tensor([0, 0, 0, 1, 1]), turn_lam=0.5)
    of_batch = bilevel_gae(rewards_T, values_T, mask_T, segment_T, torch.tensor([0, 0, 1, 2, 2]), turn_lam=0.5)
    assert torch.equal(of_trajectories, of_batch)


def test_bilevel_gae_with_one_turn_is_gae():
    rewards_T, values_T = torch.rand(6), torch.rand(6)
    mask_T, segment_T = everywhere(6)
    two_levels_T = bilevel_gae(rewards_T, values_T, mask_T, segment_T, segment_T, 0.9, 0.7, turn_gamma=0.1)
    assert two_levels_T.tolist() == pytest.approx(
        gae(rewards_T, values_T, mask_T, segment_T, 0.9, 0.7).tolist(), abs=1e-6
    )


@pytest.mark.parametrize(("length", "expected"), [(100, 0.8), (1000, 0.98), (20, 0.0), (3, 0.0)])
def test_lambda_grows_with_the_length(length, expected):
    lam_T = adaptive_lambda(*everywhere(length), alpha=0.05)
    assert lam_T.tolist() == pytest.approx([expected] * length)


def test_the_length_for_lambda_counts_sampled_tokens_of_one_trajectory():
    mask_T = torch.tensor([1, 0, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    segment_T = torch.tensor([4, 4, 4, 9, 9, 9, 9, 11])
    assert adaptive_lambda(mask_T, segment_T, alpha=1.0).tolist() == pytest.approx([0.5] * 3 + [2 / 3] * 4 + [0.0])


def test_lambda_may_differ_between_trajectories():
    mask_T, segment_T = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    rewards_T, values_T = torch.tensor([0.0, 1, 0, 1]), torch.full((4,), 0.5)
    lam_T = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert gae(rewards_T, values_T, mask_T, segment_T, 1.0, lam_T).tolist() == [0.0, 0.5, 0.5, 0.5]


def test_a_lambda_of_each_trajectory_is_that_of_its_turns_too():
    # Two trajectories of two turns of two tokens, the second with an observation, in which lambda is not read.
    mask_T = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    segment_T, turn_T = torch.tensor([0] * 4 + [1] * 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])
    rewards_T, values_T = torch.rand(9), torch.rand(9)
    lam_T = torch.tensor([0.25] * 4 + [0.75] * 2 + [NAN] + [0.75] * 2)
    given = (rewards_T, values_T, mask_T, segment_T, turn_T, 0.9)
    first_T, second_T = (bilevel_gae(*given, lam, turn_gamma=0.5) for lam in (0.25, 0.75))
    wanted = [*first_T.tolist()[:4], *second_T.tolist()[4:]]
    assert bilevel_gae(*given, lam_T, turn_gamma=0.5).tolist() == pytest.approx(wanted, abs=1e-6)


def naive_gae(cells, gamma, lam):
    """One pass from the right: at an unsampled token keep both what is carried."""
    out, carried = [], {}
    for segment, sampled, reward, value in reversed(cells):
        if sampled:
            next_value, total = carried.get(segment, (0.0, 0.0))
            total = reward + gamma * next_value - value + gamma * lam * total
            carried[segment] = (value, total)
            out.append(total)
        else:
            out.append(0.0)
    return out[::-1]


CELLS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(CELLS, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_what_one_pass_from_the_right_gives(cells, gamma, lam):
    cells.sort(key=lambda cell: cell[0])
    segment_T = torch.tensor([cell[0] for cell in cells], dtype=torch.int64)
    mask_T = torch.tensor([cell[1] for cell in cells], dtype=torch.bool)
    rewards_T = torch.tensor([cell[2] if cell[1] else NAN for cell in cells])
    values_T = torch.tensor([cell[3] if cell[1] else math.inf for cell in cells])
    advantages_T = gae(rewards_T, values_T, mask_T, segment_T, gamma, lam)
    assert advantages_T.tolist() == pytest.approx(naive_gae(cells, gamma, lam), abs=1e-3)


def test_a_long_trajectory_is_as_exact_as_fp32_allows():
    size = 20_000
    values_T, rewards_T = torch.rand(size), torch.rand(size) - 0.5
    advantages_T = gae(rewards_T, values_T, *everywhere(size), 0.999, 0.95)
    cells = list(zip([0] * size, [True] * size, rewards_T.tolist(), values_T.tolist(), strict=True))
    assert advantages_T.tolist() == pytest.approx(naive_gae(cells, 0.999, 0.95), abs=1e-5)
