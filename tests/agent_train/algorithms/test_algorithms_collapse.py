import pytest

from agent_train.algorithms.collapse import Health, Sample, health, repetition


def test_the_diagnostics_of_a_step():
    found = health(
        [
            [Sample(1, [1, 2, 3]), Sample(0, [1, 2, 3]), Sample(0, [4, 4, 4, 4, 4], truncated=True), Sample(1, [5])],
            [Sample(2, [6, 6]), Sample(2, [7])],
            [Sample(9, [8])],
            [],
        ],
        entropy=1.5,
        n=2,
    )
    assert found == Health(
        reward_spread=0.25,
        flat_groups=0.5,
        entropy=1.5,
        repetition=pytest.approx(0.75 / 7),
        same=pytest.approx(1 / 7),
        length=pytest.approx(16 / 7),
        length_max=5,
        truncated=pytest.approx(1 / 7),
    )


@pytest.mark.parametrize(
    ("ids", "n", "share"),
    [([1, 2, 1, 2, 1, 2], 2, 3 / 5), ([1, 2, 3, 4], 4, 0), ([1, 1, 1], 4, 0), ([], 1, 0), ([7, 7, 7, 7], 1, 3 / 4)],
)
def test_repetition_counts_ngrams_that_stood_before(ids, n, share):
    assert repetition(ids, n) == pytest.approx(share)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="no trajectories"):
        health([[]], 1.0)
    with pytest.raises(ValueError, match="at least 1 token"):
        repetition([1], 0)
