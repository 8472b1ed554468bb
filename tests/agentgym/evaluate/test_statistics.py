"""Means, intervals, pass@k, pass^k and paired differences: against counting by hand, and as properties."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.evaluate.statistics import (
    ClusteredMean,
    ks_of,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    passes,
    sign_test,
    success_interval,
)

FINITE = st.floats(-1e6, 1e6, allow_nan=False)
GROUPS = st.lists(st.lists(FINITE, min_size=1, max_size=6), min_size=1, max_size=12)
SUCCESSES = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=1, max_size=12)


# ---- the clustered mean


def test_with_one_episode_of_each_task_the_interval_is_the_usual_one_of_student():
    values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]
    error = statistics.stdev(values) / math.sqrt(8)
    low, high = ClusteredMean.of([[v] for v in values]).interval()
    assert (low, high) == pytest.approx((5 - 2.3646 * error, 5 + 2.3646 * error))


def test_the_clustered_variance_by_hand():
    """Tasks with totals 3, 0 and 2, of 2, 1 and 2 episodes: the mean is 1, the residuals 3 - 2, 0 - 1 and 2 - 2."""
    clustered = ClusteredMean.of([[1.0, 2.0], [0.0], [1.0, 1.0]])
    assert clustered.mean == 1.0
    assert clustered.variance == pytest.approx((1 + 1 + 0) / 25 * 3 / 2)
    assert clustered.interval() == pytest.approx((1 - 4.3027 * math.sqrt(0.12), 1 + 4.3027 * math.sqrt(0.12)))


def test_one_task_tells_no_interval_of_a_mean():
    assert ClusteredMean.of([[1.0, 5.0, 3.0]]).interval() is None
    assert ClusteredMean.of([]).interval() is None
    assert ClusteredMean().mean is None


def test_equal_numbers_have_an_interval_of_no_width_and_shares_of_one_have_a_width():
    assert ClusteredMean.of([[0.1] * 3] * 7).interval() == (0.1, 0.1)
    assert success_interval([[1.0] * 4] * 10) == pytest.approx((0.722, 1.0), abs=0.01)
    assert success_interval([[0.0] * 4] * 10) == pytest.approx((0.0, 0.278), abs=0.01)


def test_wilson_by_hand():
    """8 of 10 independent episodes: the textbook's interval, for the variance with n - 1."""
    low, high = success_interval([[1.0]] * 8 + [[0.0]] * 2)
    n, p, z = 9, 0.8, 1.959964  # 0.8 * 0.2 / (0.16 / 9)
    middle, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2),
    )
    assert (low, high) == pytest.approx((middle - half, middle + half))


def test_no_episode_has_no_interval():
    with pytest.raises(ValueError, match="at least one episode"):
        success_interval([])


def test_samples_of_one_task_tell_less_than_tasks():
    same = success_interval([[1.0] * 8, [0.0] * 8] * 10)
    apart = success_interval([[1.0], [0.0]] * 80)
    assert same[1] - same[0] > 2 * (apart[1] - apart[0])


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984), (20_000, 1.960)]
)
def test_the_quantile_of_student(freedom, t):
    """Against tables, by the width of an interval."""
    values = [1.0 if i % 2 else -1.0 for i in range(freedom + 1)]
    low, high = ClusteredMean.of([[v] for v in values]).interval()
    error = math.sqrt(statistics.variance(map(int, values)) / (freedom + 1))
    assert (high - low) / 2 == pytest.approx(t * error, rel=1e-3)


@settings(deadline=None, max_examples=60)
@given(GROUPS)
def test_sums_kept_one_by_one_say_what_two_passes_say(groups):
    clustered = ClusteredMean.of(groups)
    values = [v for group in groups for v in group]
    mean = math.fsum(values) / len(values)
    residuals = math.fsum((math.fsum(g) - len(g) * mean) ** 2 for g in groups)
    tasks = len(groups)
    spread = max(values) - min(values)
    assert clustered.mean == pytest.approx(mean, rel=1e-9, abs=1e-6)
    expected = residuals / len(values) ** 2 * tasks / max(tasks - 1, 1)
    assert clustered.variance == pytest.approx(expected, rel=1e-6, abs=1e-9 * (1 + spread**2))


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.randoms(use_true_random=False))
def test_neither_the_order_of_tasks_nor_of_episodes_matters(groups, rng):
    shuffled = [rng.sample(group, len(group)) for group in rng.sample(groups, len(groups))]
    one, other = ClusteredMean.of(groups).interval(), ClusteredMean.of(shuffled).interval()
    assert (one is None) == (other is None)
    if one is not None:
        assert other == pytest.approx(one, rel=1e-4, abs=1.0)


@settings(deadline=None, max_examples=60)
@given(GROUPS)
def test_an_interval_holds_its_mean(groups):
    clustered = ClusteredMean.of(groups)
    if (interval := clustered.interval()) is not None:
        assert interval[0] <= clustered.mean <= interval[1]


@settings(deadline=None, max_examples=60)
@given(SUCCESSES)
def test_an_interval_of_shares_lies_within_0_and_1_and_holds_the_share(groups):
    low, high = success_interval(groups)
    share = ClusteredMean.of(groups).mean
    assert 0 <= low <= share <= high <= 1
    assert low < high


def test_a_large_common_part_of_all_rewards_does_not_drown_their_spread():
    assert ClusteredMean.of([[1e9], [1e9 + 1], [1e9 + 2]]).interval() == pytest.approx(
        (1e9 + 1 - 2.484, 1e9 + 1 + 2.484), abs=0.01
    )


def test_numbers_too_large_to_be_squared_have_no_interval():
    assert ClusteredMean.of([[0.0], [1e200]]).interval() is None


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_about_95_times_in_100(samples):
    """Tasks with chances of their own, of mean 1/2: success by Wilson, and a reward that is worth more on some tasks."""
    rng = random.Random(samples)
    rounds, tasks = 400, 40
    shares = rewards = 0
    for _ in range(rounds):
        chances = [rng.betavariate(1, 1) for _ in range(tasks)]
        groups = [[float(rng.random() < p) for _ in range(samples)] for p in chances]
        low, high = success_interval(groups)
        shares += low <= 0.5 <= high
        low, high = ClusteredMean.of([[3 * x + rng.gauss(0, 0.2) for x in group] for group in groups]).interval()
        rewards += low <= 1.5 <= high
    assert 0.92 <= shares / rounds <= 0.98
    assert 0.92 <= rewards / rounds <= 0.98


def test_an_interval_that_takes_episodes_for_independent_would_be_too_narrow():
    """The check of the check above: the same data without clusters misses the truth far more often."""
    rng = random.Random(1)
    inside = 0
    for _ in range(200):
        groups = [[float(rng.random() < p)] * 8 for p in (rng.betavariate(0.3, 0.3) for _ in range(30))]
        low, high = success_interval([[x] for group in groups for x in group])
        inside += low <= 0.5 <= high
    assert inside / 200 < 0.75


# ---- pass@k and pass^k


def test_passes_are_the_shares_of_draws_with_a_success_and_with_nothing_else():
    for n in range(1, 6):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
                assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize("function", [pass_at_k, pass_hat_k])
@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_impossible_draws_are_mistakes(function, n, c, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        function(n, c, k)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_more_draws_raise_pass_at_k_and_lower_pass_hat_k(draw):
    n, c, k = draw
    assert 0 <= pass_hat_k(n, c, k) <= pass_at_k(n, c, k) + 1e-12 <= 1 + 1e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n) == pytest.approx(pass_hat_k(n, c, 1))
    if k > 1:
        assert pass_at_k(n, c, k) >= pass_at_k(n, c, k - 1) - 1e-12
        assert pass_hat_k(n, c, k) <= pass_hat_k(n, c, k - 1) + 1e-12
    assert pass_at_k(n, c, k) == pytest.approx(1 - pass_hat_k(n, n - c, k))


def test_passes_are_told_for_powers_of_two_and_for_what_was_asked():
    assert [ks_of(samples) for samples in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


def test_passes_are_means_over_the_tasks_with_enough_episodes():
    at, hat, *_ = passes([(2, 1), (1, 1), (2, 2)], 4)
    assert at == {1: pytest.approx((0.5 + 1 + 1) / 3), 2: 1.0}
    assert hat == {1: pytest.approx((0.5 + 1 + 1) / 3), 2: 0.5}
    assert passes([], 2) == ({}, {}, {}, {})


# ---- pairs


def test_a_paired_difference_by_hand():
    """b - a is 1, 0, 0.5, -0.5, 1: mean 0.4, standard deviation sqrt(1.7 / 4)."""
    found = paired_difference([(0, 1), (1, 1), (0, 0.5), (1, 0.5), (0, 1)])
    half = 2.7764 * math.sqrt(0.425 / 5)
    assert (found.tasks, found.a, found.b, found.mean) == (5, 0.4, pytest.approx(0.8), pytest.approx(0.4))
    assert (found.low, found.high) == pytest.approx((0.4 - half, 0.4 + half))
    assert (found.wins, found.ties, found.losses) == (3, 1, 1)
    assert found.p == pytest.approx(2 * (1 + 4) / 16)


def test_pairing_sees_what_two_intervals_hide():
    """Tasks of very different difficulty, b better on each of them by a little."""
    rng = random.Random(0)
    a = [rng.random() for _ in range(30)]
    found = paired_difference([(x, x + 0.02 + rng.gauss(0, 0.01)) for x in a])
    assert found.low > 0
    low, high = ClusteredMean.of([[x] for x in a]).interval()
    assert high - low > 5 * (found.high - found.low)


def test_nothing_in_common_is_a_mistake():
    with pytest.raises(ValueError, match="at least one task"):
        paired_difference([])


def test_rounding_makes_no_winner():
    found = paired_difference([(0.1 + 0.2, 0.3)] * 4)
    assert (found.wins, found.ties, found.losses, found.p) == (0, 4, 0, 1.0)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (9, 1, 22 / 1024), (7, 7, 1.0)]
)
def test_the_sign_test_counts_coin_throws(wins, losses, p):
    assert sign_test(wins, losses) == pytest.approx(p)
    assert sign_test(losses, wins) == pytest.approx(p)


def test_the_sign_test_of_many_tasks_is_a_number():
    assert sign_test(25_000, 25_000) == pytest.approx(1.0)
    assert sign_test(30_000, 20_000) < 1e-100


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_exchanging_the_two_runs_exchanges_everything(pairs):
    one, other = paired_difference(pairs), paired_difference([(b, a) for a, b in pairs])
    assert one.mean == pytest.approx(-other.mean, abs=1e-12)
    assert (one.wins, one.ties, one.losses, one.p) == (other.losses, other.ties, other.wins, other.p)
    assert one.wins + one.ties + one.losses == one.tasks
