"""PRIME: rewards of tokens, advantages from them and the outcome, and what the reward model learns."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.advantages import rloo_advantages
from agent_train.algorithms.prime import outcome_loss, prime_advantages, process_rewards

NAN = math.nan


def tensors(*trajectories):
    """Process rewards of trajectories, None for a token of an observation -> process_T, mask_T, segment_T."""
    cells = [value for trajectory in trajectories for value in trajectory]
    process_T = torch.tensor([NAN if value is None else value for value in cells])
    mask_T = torch.tensor([value is not None for value in cells], dtype=torch.bool)
    sizes = torch.tensor([len(trajectory) for trajectory in trajectories], dtype=torch.int64)
    return process_T, mask_T, torch.arange(len(trajectories)).repeat_interleave(sizes)


def advantages(trajectories, outcomes, groups, gamma=1.0):
    given_T = tensors(*trajectories)
    return prime_advantages(*given_T, torch.tensor(outcomes), torch.tensor(groups), gamma).tolist()


def test_process_rewards_are_scaled_log_ratios_with_gradient():
    logprobs_T = torch.tensor([-1.0, NAN, -2.0], requires_grad=True)
    mask_T = torch.tensor([True, False, True])
    reference_T = torch.tensor([-2.0, NAN, -1.5], requires_grad=True)
    process_T = process_rewards(logprobs_T, reference_T, mask_T, beta=0.1)
    assert process_T.tolist() == pytest.approx([0.1, 0, -0.05])
    process_T.sum().backward()
    assert logprobs_T.grad.tolist() == pytest.approx([0.1, 0, 0.1])
    assert reference_T.grad is None


def test_advantages_of_two_siblings():
    # Means .2 and .6, each the other's baseline; outcomes 1 and 0 give +-1.
    # First, from the right: .3 - .6 = -.3; .1 - .6 + .5 * -.3 = -.65. Second: .6 - .2 = .4.
    trajectories = [[0.1, None, 0.3], [0.6]]
    assert advantages(trajectories, [1.0, 0.0], [0, 0], gamma=0.5) == pytest.approx([0.35, 0, 0.7, -0.6])


def test_three_siblings_leave_one_out():
    # Means 1, 2, 6: baselines 4, 3.5, 1.5.
    result = advantages([[1.0], [2.0], [4.0, 8.0]], [1.0, 1.0, 1.0], [0, 0, 0])
    assert result == pytest.approx([-3, -1.5, 2.5 + 6.5, 6.5])


def test_advantages_carry_no_gradient():
    process_T, mask_T, segment_T = tensors([0.1, 0.3], [0.6])
    process_T.requires_grad_()
    outcomes_S = torch.tensor([1.0, 0.0])
    assert not prime_advantages(process_T, mask_T, segment_T, outcomes_S, torch.tensor([0, 0])).requires_grad


def test_without_process_rewards_it_is_rloo():
    outcomes = [1.0, 0.0, 0.0, 1.0, 3.0, 1.0]
    expected = rloo_advantages(outcomes[:4]) + rloo_advantages(outcomes[4:])
    assert advantages([[0.0]] * 6, outcomes, [0, 0, 0, 0, 1, 1]) == pytest.approx(expected)


def test_groups_need_not_lie_together():
    assert advantages([[0.1], [0.5]], [1.0, 0.0], [7, 7]) == advantages([[0.1], [0.5]], [1.0, 0.0], [0, 0])
    together = advantages([[0.1], [0.3, 0.2], [0.5], [0.9]], [1.0, 0.0, 2.0, 5.0], [0, 0, 1, 1])
    apart = advantages([[0.1], [0.5], [0.3, 0.2], [0.9]], [1.0, 2.0, 0.0, 5.0], [0, 1, 0, 1])
    assert [apart[i] for i in (0, 2, 3, 1, 4)] == pytest.approx(together)


def test_a_trajectory_alone_or_without_spread_gets_exactly_zero():
    assert advantages([[0.4, 0.8]], [3.0], [0]) == [0.0, 0.0]
    assert advantages([[0.1, 0.1, 0.1], [0.1]], [0.7, 0.7], [0, 0]) == [0.0] * 4
    assert advantages([[0.1], [], [0.4]], [3.0, 1.0, 2.0], [0, 0, 1]) == [0.0, 0.0]
    assert advantages([[None], [None, None]], [3.0, 1.0], [0, 1]) == [0.0] * 3


def test_rounding_is_no_difference_between_siblings():
    # In fp64 the mean of three times .1 is not .1, and that of six times is another number.
    _, mask_T, segment_T = tensors([0.0] * 3, [0.0] * 6, [0.0])
    process_T = torch.full((10,), 0.1, dtype=torch.float64)
    outcomes_S = torch.full((3,), 0.1, dtype=torch.float64)
    result_T = prime_advantages(process_T, mask_T, segment_T, outcomes_S, torch.zeros(3, dtype=torch.int64))
    assert result_T.tolist() == [0.0] * 10


def test_a_trajectory_without_sampled_tokens_shifts_no_baseline():
    with_silent = advantages([[0.1], [None], [0.4, 0.2]], [1.0, 50.0, 0.0], [0, 0, 0])
    assert [with_silent[0], *with_silent[2:]] == advantages([[0.1], [0.4, 0.2]], [1.0, 0.0], [0, 0])
    assert with_silent[1] == 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5), st.integers(0, 1), st.integers(0, 2)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_advantages_are_what_the_definition_says(samples, gamma):
    expected = []
    for number, (process, outcome, group) in enumerate(samples):
        siblings = [s for other, s in enumerate(samples) if s[2] == group and other != number]
        values = [r for s in samples if s[2] == group for r in s[0]]
        differ = max(values) - min(values) > 1e-6 * max(map(abs, values))
        baseline = sum(sum(s[0]) / len(s[0]) for s in siblings) / max(len(siblings), 1)
        level = outcome - sum(s[1] for s in siblings) / len(siblings) if siblings else 0.0
        relative = [r - baseline if siblings and differ else 0.0 for r in process]
        later = [sum(gamma**k * r for k, r in enumerate(relative[t:])) for t in range(len(relative))]
        expected += [level + x for x in later]
    result = advantages([s[0] for s in samples], [float(s[1]) for s in samples], [s[2] for s in samples], gamma)
    assert result == pytest.approx(expected, abs=1e-4)


def test_the_reward_model_learns_the_outcome_from_the_sum():
    process_T, mask_T, segment_T = tensors([0.25, None, 0.75], [2.0], [None])
    process_T.requires_grad_()
    loss_S = outcome_loss(process_T, mask_T, segment_T, torch.tensor([1.0, 0.0, 1.0]))
    # -log sigmoid(1), -log(1 - sigmoid(2)), and nothing.
    assert loss_S.tolist() == pytest.approx([0.313262, 2.126928, 0.0], abs=1e-6)
    loss_S.sum().backward()
    down, up = 1 / (1 + math.exp(-1)) - 1, 1 / (1 + math.exp(-2))
    assert process_T.grad.tolist() == pytest.approx([down, 0, down, up, 0])
