"""Advantages against the numbers of their definitions: groups of rewards 1 0 0 1 and 3 1."""

import pytest

from agent_train.algorithms.advantages import group_advantages

A, B = [1.0, 0.0, 0.0, 1.0], [3.0, 1.0]


@pytest.mark.parametrize(
    ("std", "of_a", "of_b"),
    [
        ("sample", [0.866024, -0.866024, -0.866024, 0.866024], [0.707106, -0.707106]),
        ("population", [1.0, -1.0, -1.0, 1.0], [1.0, -1.0]),
        ("none", [0.5, -0.5, -0.5, 0.5], [1.0, -1.0]),
    ],
)
def test_each_standard_deviation_gives_its_published_numbers(std, of_a, of_b):
    assert group_advantages(A, std) == pytest.approx(of_a, abs=3e-6)
    assert group_advantages(B, std) == pytest.approx(of_b, abs=3e-6)


def test_dr_grpo_is_exact_and_takes_no_epsilon():
    assert group_advantages(A, "none", eps=0.5) == [0.5, -0.5, -0.5, 0.5]


def test_epsilon_is_added_to_the_standard_deviation():
    assert group_advantages([1.0, 0.0], "population", eps=0.5) == [0.5, -0.5]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("rewards", [[3.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [1e6, 1e6 + 0.01], []])
def test_a_group_of_one_or_without_spread_gets_exactly_zero(rewards, std):
    assert group_advantages(rewards, std) == [0.0] * len(rewards)


def test_a_small_but_real_spread_counts():
    assert group_advantages([1e-3, 2e-3], "none") == pytest.approx([-5e-4, 5e-4])


def test_a_failed_trajectory_is_in_no_baseline():
    assert group_advantages([3.0, None, 1.0], "none") == [1.0, 0.0, -1.0]
    assert group_advantages([3.0, None], "sample") == [0.0, 0.0]
    assert group_advantages([None, None], "sample") == [0.0, 0.0]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], "sample")
