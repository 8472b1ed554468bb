import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_train.algorithms.advantages import reward_spread
from agent_train.algorithms.selection import nucleus, uncertain


def of_spreads(*spreads):
    """A group with each of these spreads."""
    return [[0.0, 2 * spread] for spread in spreads]


SPREADS = of_spreads(0.1, 0.5, 0.0, 0.4)


@pytest.mark.parametrize(
    ("rewards", "spread"), [([1, 0, 0, 1], 0.5), ([3, 1], 1.0), ([3], 0.0), ([2, 2], 0.0), ([1, None], 0.0), ([], 0.0)]
)
def test_the_spread_of_a_group(rewards, spread):
    assert reward_spread(rewards) == spread


@pytest.mark.parametrize(
    ("share", "kept"), [(0.25, [1]), (0.26, [1, 3]), (0.5, [1, 3]), (0.75, [0, 1, 3]), (1, [0, 1, 2, 3])]
)
def test_starpo_s_keeps_a_share_of_the_groups(share, kept):
    assert uncertain(SPREADS, share) == kept


@pytest.mark.parametrize(
    ("share", "kept"), [(0.1, [1]), (0.5, [1]), (0.51, [1, 3]), (0.9, [1, 3]), (0.91, [0, 1, 3]), (1, [0, 1, 3])]
)
def test_top_p_keeps_a_share_of_the_spread(share, kept):
    assert nucleus(SPREADS, share) == kept


def test_equal_groups_are_kept_in_their_order():
    assert uncertain(of_spreads(*[1.0] * 10), 0.7) == list(range(7))
    assert nucleus(of_spreads(*[1.0] * 10), 0.7) == list(range(7))
    # 0.07 * 100 is a little over 7 in floating point.
    assert uncertain(of_spreads(*[1.0] * 100), 0.07) == list(range(7))


def test_where_nothing_differs_top_p_keeps_nothing():
    assert nucleus(of_spreads(0.0, 0.0), 1.0) == []
    assert uncertain([], 0.5) == nucleus([], 0.5) == []


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.floats(0.01, 1))
def test_no_dropped_group_is_wider_than_a_kept_one(spreads, share):
    for kept in (uncertain(of_spreads(*spreads), share), nucleus(of_spreads(*spreads), share)):
        assert kept == sorted(set(kept))
        dropped = [s for i, s in enumerate(spreads) if i not in kept]
        if kept and dropped:
            assert max(dropped) <= min(spreads[i] for i in kept)
    assert math.fsum(spreads[i] for i in kept) >= share * math.fsum(spreads) * (1 - 1e-6)
