import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_train.algorithms.shaping import Decision, informative, mask_truncated, overlong_penalty, sample_again


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (6, 0), (7, -0.25), (8, -0.5), (10, -1), (12, -1), (999, -1)])
def test_the_overlong_penalty_falls_in_a_line_and_has_a_floor(length, penalty):
    assert overlong_penalty(length, limit=10, buffer=4) == penalty
    assert overlong_penalty(length, limit=10, buffer=4, factor=0.5) == 0.5 * penalty


@pytest.mark.parametrize("numbers", [(10, 0, 1.0), (10, 11, 1.0), (10, 4, -1.0)])
def test_a_penalty_that_makes_no_sense_is_refused(numbers):
    with pytest.raises(ValueError, match="1 <= buffer <= limit"):
        overlong_penalty(5, *numbers)


@pytest.mark.parametrize(("in_baseline", "rewards"), [(True, [1.0, 0.0, None]), (False, [1.0, None, None])])
def test_cut_trajectories_are_in_no_loss_and_in_the_baseline_as_asked(in_baseline, rewards):
    masked = mask_truncated([1.0, 0.0, None], [False, True, False], in_baseline)
    assert masked.in_loss == [True, False, False]
    assert masked.rewards == rewards


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [([1, 0], True), ([1, 1], False), ([1], False), ([1, None], False), ([], False), ([1, None, 0], True)],
)
def test_a_group_teaches_where_its_rewards_differ(rewards, teaches):
    assert informative(rewards) is teaches


@pytest.mark.parametrize(
    ("counts", "decision"),
    [
        ((0, 0, 8, 32), Decision("sample", 8)),
        ((4, 8, 8, 32), Decision("sample", 8)),
        ((7, 8, 8, 32), Decision("sample", 2)),
        ((0, 8, 8, 32), Decision("sample", 8)),
        ((4, 28, 8, 32), Decision("sample", 4)),
        ((8, 20, 8, 32), Decision("train")),
        ((9, 20, 8, 32), Decision("train")),
        ((5, 32, 8, 32), Decision("train", short=3)),
    ],
)
def test_dynamic_sampling_asks_for_what_is_likely_to_suffice(counts, decision):
    assert sample_again(*counts) == decision


@given(st.integers(1, 30), st.integers(0, 90), st.data())
def test_dynamic_sampling_ends_at_its_bound(wanted, more, data):
    most, kept, sampled = wanted + more, 0, 0
    while (decision := sample_again(kept, sampled, wanted, most)).action == "sample":
        assert 1 <= decision.groups <= min(wanted, most - sampled)
        sampled += decision.groups
        kept += data.draw(st.integers(0, decision.groups))
    assert sampled <= most
    assert decision.short == max(wanted - kept, 0)
    assert decision.short == 0 or sampled == most


@pytest.mark.parametrize("counts", [(3, 2, 8, 32), (-1, 2, 8, 32), (0, 0, 8, 7), (0, 0, 0, 7)])
def test_counts_that_contradict_one_another_are_refused(counts):
    with pytest.raises(ValueError, match="cannot have kept"):
        sample_again(*counts)
