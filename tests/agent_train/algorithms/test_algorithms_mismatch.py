import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.kl import mismatch, mismatch_sums


def panel(log_ratios, mask=None):
    mask = [True] * len(log_ratios) if mask is None else mask
    return of(mismatch_sums(torch.tensor(log_ratios), torch.tensor(mask, dtype=torch.bool)))


def of(sums):
    """The panel, with the number of tokens."""
    total = {name: x.item() for name, x in sums.items()}
    return mismatch(total) | {"tokens": total["tokens"]}


def test_hand_numbers():
    found = panel([math.log(3.0), math.log(0.8), math.nan, math.log(0.1)], [True, True, False, True])
    assert found["k1"] == pytest.approx(-math.log(0.24) / 3, abs=1e-6)
    assert found["k3"] == pytest.approx((3.9 - 3 - math.log(0.24)) / 3, abs=1e-6)
    assert found["chi_square"] == pytest.approx((4 + 0.04 + 0.81) / 3, abs=1e-6)
    assert found["ess"] == pytest.approx(3.9**2 / (3 * 9.65), abs=1e-6)
    assert found["tokens"] == 3


def test_equal_policies_are_not_apart():
    assert panel([0.0, 0.0]) == {**dict.fromkeys(("k1", "k3", "chi_square", "abs"), 0.0), "ess": 1.0, "tokens": 2}


@pytest.mark.parametrize("log_ratios", [[], [math.nan]])
def test_no_tokens_give_no_distance(log_ratios):
    found = panel(log_ratios, [False] * len(log_ratios))
    assert (found["k3"], found["ess"], found["tokens"]) == (0, 1, 0)


def test_ratios_that_fp32_cannot_hold_stay_finite():
    found = panel([200.0, -200.0])
    assert all(map(math.isfinite, found.values()))


RATIOS = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(RATIOS, st.integers(1, 4))
def test_sums_of_parts_are_the_sums_of_the_whole(log_ratios, parts):
    pieces = [torch.tensor(log_ratios[i::parts]) for i in range(parts)]
    sums = [mismatch_sums(p, torch.ones(len(p), dtype=torch.bool)) for p in pieces]
    found = of({name: sum(own[name] for own in sums) for name in sums[0]})
    whole = panel(log_ratios)
    assert found == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert found["k3"] >= 0
    assert found["chi_square"] >= 0
    assert 0 < found["ess"] <= 1 + 1e-9
