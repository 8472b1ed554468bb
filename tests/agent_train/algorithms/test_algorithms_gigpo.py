"""GiGPO: episodes are compared, and steps that began in the same state."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.advantages import group_advantages
from agent_train.algorithms.turn_rewards import gigpo_advantages, state_key

REWARDS = [[0.0, 1.0], [0.0, 0.0]]
STATES = [["s0", "s1"], ["s0", "s2"]]


def test_two_episodes_that_share_a_state():
    first, second = gigpo_advantages(REWARDS, STATES)
    assert first == pytest.approx([0.975, 0.5])
    assert second == pytest.approx([-0.975, -0.5])


def test_the_same_divided_by_standard_deviations():
    first, second = gigpo_advantages(REWARDS, STATES, std="sample")
    assert first == pytest.approx([1.414212, 0.707106], abs=3e-6)
    assert second == pytest.approx([-1.414212, -0.707106], abs=3e-6)


def test_steps_weigh_what_is_asked():
    assert gigpo_advantages(REWARDS, STATES, step_weight=0.0) == [[0.5, 0.5], [-0.5, -0.5]]
    assert gigpo_advantages(REWARDS, STATES, step_weight=2.0)[0] == pytest.approx([1.45, 0.5])


def test_a_long_episode_weighs_no_more_than_a_short_one():
    long, short = gigpo_advantages([[0.0] * 9 + [1.0], [0.0]], [list(range(10)), [99]])
    assert (long, short) == ([0.5] * 10, [-0.5])


def test_a_state_met_twice_in_one_episode_compares_its_two_steps():
    # Returns .5 * 1 and 1 from the same state; the other episode never meets it.
    first, second = gigpo_advantages([[0.0, 1.0], [0.0]], [["s", "s"], ["t"]], gamma=0.5)
    assert first == pytest.approx([0.5 - 0.25, 0.5 + 0.25])
    assert second == [-0.5]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=5), st.sampled_from(["none", "sample", "population"]))
def test_without_shared_states_it_is_the_comparison_of_episodes(rewards, std):
    states = [[(number, step) for step in range(len(steps))] for number, steps in enumerate(rewards)]
    episodes = group_advantages([float(sum(steps)) for steps in rewards], std)
    expected = [[advantage] * len(steps) for advantage, steps in zip(episodes, rewards, strict=True)]
    assert gigpo_advantages(rewards, states, std=std) == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=4), max_size=5))
def test_the_part_of_the_steps_sums_to_zero_over_the_group(episodes):
    rewards = [[float(r) for r, _ in episode] for episode in episodes]
    states = [[s for _, s in episode] for episode in episodes]
    with_steps = gigpo_advantages(rewards, states)
    without = gigpo_advantages(rewards, states, step_weight=0.0)
    differences = [a - b for x, y in zip(with_steps, without, strict=True) for a, b in zip(x, y, strict=True)]
    assert math.fsum(differences) == pytest.approx(0.0, abs=1e-9)


def test_every_step_needs_its_state():
    with pytest.raises(ValueError, match="episode 1 of the group: 2 rewards and 1 states"):
        gigpo_advantages(REWARDS, [["s0", "s1"], ["s0"]])


def test_equal_messages_have_one_key():
    one = [{"role": "user", "content": "at (0, 1)"}]
    assert state_key(one) == state_key([{"content": "at (0, 1)", "role": "user"}])
    assert state_key(one) != state_key([{"role": "user", "content": "at (1, 0)"}])
    assert state_key([{"role": "user", "content": "\ud800"}]) != state_key([])
