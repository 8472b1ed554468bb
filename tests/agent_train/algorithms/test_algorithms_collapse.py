import pytest

from agent_train.algorithms.collapse import CollapseMetrics, health, repetition
from agentgym.core.messages import assistant
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def played(reward, ids, end="terminated"):
    tokens = Tokens([0], ids, [-1.0] * len(ids), [0] * len(ids))
    error = "broke" if end == "error" else None
    return Trajectory("t/0", "e", "t", 0, turns=[Turn([], assistant(""), reward, tokens=tokens)], end=end, error=error)


def test_the_diagnostics_of_a_step():
    cut = played(0, [4, 4, 4, 4, 4], end="max_turns")
    found = health(
        [
            Group("a", [played(1, [1, 2, 3]), played(0, [1, 2, 3]), cut, played(1, [5])]),
            Group("b", [played(2, [6, 6]), played(2, [7]), played(9, [7], end="error")]),
            Group("c", [played(9, [8])]),
            Group("d", []),
        ],
        entropy=1.5,
        n=2,
    )
    assert found == CollapseMetrics(
        reward_spread=0.25,
        flat_groups=0.5,
        entropy=1.5,
        repetition=pytest.approx(0.75 / 7),
        same=pytest.approx(1 / 7),
        length=pytest.approx(16 / 7),
        length_max=5,
        truncated=pytest.approx(1 / 7),
    )


def test_a_step_whose_episodes_all_failed_has_no_diagnostics():
    assert health([Group("a", [played(1, [1], end="error")])], 1.0) is None


@pytest.mark.parametrize(
    ("ids", "n", "share"),
    [([1, 2, 1, 2, 1, 2], 2, 3 / 5), ([1, 2, 3, 4], 4, 0), ([1, 1, 1], 4, 0), ([], 1, 0), ([7, 7, 7, 7], 1, 3 / 4)],
)
def test_repetition_counts_ngrams_that_stood_before(ids, n, share):
    assert repetition(ids, n) == pytest.approx(share)
