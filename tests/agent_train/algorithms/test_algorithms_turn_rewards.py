"""Where rewards of turns and episodes lie, and the advantages of turns."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.returns import return_to_go
from agent_train.algorithms.turn_rewards import fold_silent_turns, place, turn_advantages, turn_returns, turn_segments


def booleans(text):
    """a is a sampled token, o is one of an observation."""
    return torch.tensor([letter == "a" for letter in text], dtype=torch.bool)


def test_a_score_lies_on_the_last_sampled_token_not_on_the_last():
    mask_T, segment_T = booleans("oaaoo" + "oao" + "a"), torch.tensor([0] * 5 + [1] * 3 + [2])
    assert place(torch.tensor([1.0, 2, 3]), mask_T, segment_T).tolist() == [0, 0, 1, 0, 0, 0, 2, 0, 3]


def test_a_trajectory_without_sampled_tokens_puts_its_score_nowhere():
    mask_T, segment_T = booleans("oaa" + "ooo" + "oa"), torch.tensor([0] * 3 + [1] * 3 + [2] * 2)
    assert place(torch.tensor([1.0, 9, 3]), mask_T, segment_T).tolist() == [0, 0, 1, 0, 0, 0, 0, 3]
    assert not place(torch.ones(1), booleans("ooo"), torch.zeros(3, dtype=torch.int64)).any()
    assert place(torch.tensor([]), booleans(""), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_rewards_of_turns_lie_on_the_ends_of_turns():
    mask_T = booleans("ooaaoaooa")
    turn_T = turn_segments([6, 3], [[4, 6], [3]])
    assert turn_T.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert place(torch.tensor([0.5, 0.0, 2.0]), mask_T, turn_T).tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 2]


def test_turns_may_follow_one_another_without_an_observation():
    assert turn_segments([5], [[2, 4]]).tolist() == [0, 0, 1, 1, 1]


def test_a_sample_without_turns_takes_a_number_of_its_own():
    assert turn_segments([2, 2, 3], [[2], [], [1, 3]]).tolist() == [0, 0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("ends", [[2, 2], [0], [3, 2], [5], [-1]])
def test_impossible_ends_of_turns_are_refused(ends):
    with pytest.raises(ValueError, match="sample 0 of 4 tokens"):
        turn_segments([4], [ends])


def test_the_reward_of_a_turn_that_sampled_nothing_goes_to_the_turn_before():
    assert fold_silent_turns([1.0, 2.0, 4.0, 8.0], [3, 0, 5, 0]) == [3.0, 12.0]
    assert fold_silent_turns([1.0, 2.0], [0, 4]) == [3.0]
    assert fold_silent_turns([1.0], [0]) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 2)), min_size=1))
def test_no_reward_is_lost_on_the_way_to_the_tokens(turns):
    rewards, sampled = [float(r) for r, _ in turns], [n for _, n in turns]
    if not any(sampled):
        return
    mask_T = booleans("".join("o" + "a" * n for n in sampled if n))
    spoken = [n for n in sampled if n]
    ends = [sum(spoken[: k + 1]) + k + 1 for k in range(len(spoken))]
    turn_T = turn_segments([len(mask_T)], [ends])
    rewards_T = place(torch.tensor(fold_silent_turns(rewards, sampled)), mask_T, turn_T)
    returns_T = return_to_go(rewards_T, mask_T, torch.zeros_like(turn_T))
    assert float(returns_T[1]) == sum(rewards)


def test_returns_of_turns():
    assert turn_returns([0.0, 1.0], 0.95) == [0.95, 1.0]
    assert turn_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert turn_returns([]) == []


def test_process_supervision_normalises_all_turns_of_a_group_together():
    # 1 0 1 | 0 0: mean .4, squares 1.2; each turn sums its own and what follows.
    scale = math.sqrt(1.2 / 5)
    first, second = turn_advantages([[1.0, 0.0, 1.0], [0.0, 0.0]], std="population", eps=0.0)
    assert first == pytest.approx([0.8 / scale, 0.2 / scale, 0.6 / scale])
    assert second == pytest.approx([-0.8 / scale, -0.4 / scale])


def test_turns_without_spread_or_without_siblings_get_exactly_zero():
    assert turn_advantages([[1.0, 0.0]]) == [[0.0, 0.0]]
    assert turn_advantages([[1.0, 1.0], [1.0]]) == [[0.0, 0.0], [0.0]]
    assert turn_advantages([]) == []
