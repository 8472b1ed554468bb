"""Baselines of groups against the numbers of their definitions, and what holds for all of them."""

import math
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.advantages import (
    best_of_advantages,
    group_advantages,
    level_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)

A, B = [1.0, 0.0, 0.0, 1.0], [3.0, 1.0]
LENGTHS_A, LENGTHS_B = [2, 4, 3, 1], [2, 2]


def opo_equal_lengths(rewards):
    return opo_advantages(rewards, [5] * len(rewards))


OF_THE_GROUP = {
    "grpo": group_advantages,
    "grpo population": partial(group_advantages, std="population"),
    "dr_grpo": partial(group_advantages, std="none"),
    "rloo": rloo_advantages,
    "opo": opo_equal_lengths,
    "maxrl": maxrl_advantages,
    "best_of": best_of_advantages,
}
every_baseline = pytest.mark.parametrize("advantages", OF_THE_GROUP.values(), ids=OF_THE_GROUP)
rewards_of_groups = st.lists(st.one_of(st.none(), st.integers(0, 4).map(lambda n: n / 4)), max_size=8)


def test_rloo_compares_with_the_mean_of_the_others():
    assert rloo_advantages(A) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert rloo_advantages(B) == [2.0, -2.0]


def test_opo_weighs_the_baseline_by_length():
    assert opo_advantages(A, LENGTHS_A) == pytest.approx([0.7, -0.3, -0.3, 0.7])
    assert opo_advantages(B, LENGTHS_B) == [1.0, -1.0]


def test_opo_gives_a_trajectory_without_tokens_no_say_in_the_baseline():
    assert opo_advantages([1.0, 0.0, 5.0], [1, 3, 0]) == pytest.approx([0.75, -0.25, 4.75])
    assert opo_advantages([1.0, 0.0], [0, 0]) == [0.0, 0.0]


def test_maxrl_divides_by_the_mean():
    assert maxrl_advantages(A) == [1.0, -1.0, -1.0, 1.0]
    assert maxrl_advantages([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]


def test_the_best_of_a_group_gets_its_lead_and_the_others_nothing():
    assert best_of_advantages(B) == [2.0, 0.0]
    assert best_of_advantages([1.0, None, 4.0, 2.5]) == [0.0, 0.0, 1.5, 0.0]
    assert best_of_advantages(A) == [0.0] * 4
    assert best_of_advantages([-5.0, 0.3, 0.1 + 0.2]) == [0.0] * 3


@pytest.mark.parametrize(("mean_level", "std_level", "same"), [("group", "group", "sample"), ("group", "none", "none")])
def test_levels_of_the_group_are_grpo_and_dr_grpo(mean_level, std_level, same):
    assert level_advantages([A, B], mean_level, std_level) == [group_advantages(A, same), group_advantages(B, same)]


def test_lite_ppo_takes_the_mean_of_the_group_and_the_deviation_of_the_batch():
    # 1 0 0 1 3 1: mean 1, squares 6, over 5 (or 6) of them.
    scale = math.sqrt(6 / 5)
    a, b = level_advantages([A, B], "group", "batch", eps=0.0)
    assert a == pytest.approx([0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale])
    assert b == pytest.approx([1 / scale, -1 / scale])
    assert level_advantages([A, B], "group", "batch", "population", 0.0)[1] == [1.0, -1.0]


def test_the_mean_of_the_batch_and_no_mean():
    assert level_advantages([A, B], "batch", "none") == [[0.0, -1.0, -1.0, 0.0], [2.0, 0.0]]
    assert level_advantages([A, [1.0]], "none", "none") == [A, [1.0]]


def test_a_group_without_spread_gets_zero_beside_groups_with_spread():
    assert level_advantages([A, [5.0, 5.0], [7.0]], "group", "batch")[1:] == [[0.0, 0.0], [0.0]]
    assert level_advantages([A, [5.0, 5.0]], "none", "group")[1] == [0.0, 0.0]
    assert level_advantages([[1.0, 1.0], [1.0]], "batch", "none") == [[0.0, 0.0], [0.0]]
    assert level_advantages([[0.3], [0.1 + 0.2]], "batch", "batch") == [[0.0], [0.0]]
    assert level_advantages([[None], []], "batch", "batch") == [[0.0], []]


@every_baseline
@pytest.mark.parametrize("rewards", [[], [3.0], [2.0, 2.0, 2.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [None, 4.0], [None]])
def test_a_group_of_one_or_without_spread_gets_exactly_zero(advantages, rewards):
    assert advantages(rewards) == [0.0] * len(rewards)


@every_baseline
@settings(max_examples=30, deadline=None)
@given(rewards_of_groups)
def test_a_failed_trajectory_changes_nothing_for_the_others(advantages, rewards):
    without = iter(advantages([r for r in rewards if r is not None]))
    assert advantages(rewards) == [0.0 if r is None else next(without) for r in rewards]


@every_baseline
@settings(max_examples=30, deadline=None)
@given(rewards_of_groups)
def test_a_better_reward_never_has_a_smaller_advantage(advantages, rewards):
    pairs = sorted((r, a) for r, a in zip(rewards, advantages(rewards), strict=True) if r is not None)
    assert all(a <= b + 1e-12 for (_, a), (_, b) in pairwise(pairs))


@pytest.mark.parametrize("name", ["grpo", "grpo population", "dr_grpo", "rloo", "opo", "maxrl"])
@settings(max_examples=30, deadline=None)
@given(rewards_of_groups)
def test_what_subtracts_the_mean_of_the_group_sums_to_zero(name, rewards):
    assert math.fsum(OF_THE_GROUP[name](rewards)) == pytest.approx(0.0, abs=1e-9)


@every_baseline
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(advantages, wrong):
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, wrong])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        maxrl_advantages([1.0, -1.0])
    with pytest.raises(ValueError, match="finite"):
        rloo_advantages([1.0, math.nan])
