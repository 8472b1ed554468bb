"""Packing: how rows are dealt to ranks and micro-batches, and what a micro-batch holds."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.data.packing import batch_of, check_sample, rank_batches, split_steps
from agent_train.data.samples import TrainingSample


def rows_of_sizes(sizes):
    return [
        TrainingSample(ids=list(range(n)), mask=[False] + [True] * (n - 1), logprobs=[0.0] * n, trajectory=str(i))
        for i, n in enumerate(sizes)
    ]


def ranks(rows, parts):
    return [list(chain(*share.micro_batches)) for share in rank_batches(rows, parts, 10_000)]


def names(lists):
    return [[row.trajectory for row in rows] for rows in lists]


SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@given(sizes=SIZES, parts=st.integers(1, 5))
@settings(deadline=None)
def test_every_row_goes_to_exactly_one_rank_and_no_rank_is_a_row_ahead(sizes, parts):
    rows = rows_of_sizes(sizes)
    dealt = ranks(rows, parts)
    assert sorted(chain(*names(dealt))) == sorted(row.trajectory for row in rows)
    loads = [sum(len(row.ids) for row in part) for part in dealt]
    assert max(loads) - min(loads) <= max(sizes)
    assert names(ranks(rows, parts)) == names(dealt)


@given(sizes=SIZES, budget=st.integers(1, 60))
@settings(deadline=None)
def test_micro_batches_keep_to_the_budget_except_for_a_row_that_is_longer_alone(sizes, budget):
    rows = rows_of_sizes(sizes)
    bins = rank_batches(rows, 1, budget)[0].micro_batches
    assert sorted(chain(*names(bins))) == sorted(row.trajectory for row in rows)
    for rows_of_bin in bins:
        assert sum(len(row.ids) for row in rows_of_bin) <= budget or len(rows_of_bin) == 1


@given(sizes=SIZES, world=st.integers(1, 4), budget=st.integers(5, 60))
@settings(deadline=None)
def test_all_ranks_have_as_many_micro_batches_and_the_same_denominator(sizes, world, budget):
    rows = rows_of_sizes(sizes)
    dealt = rank_batches(rows, world, budget)
    assert len({len(share.micro_batches) for share in dealt}) == 1
    assert {share.n_tokens for share in dealt} == {sum(n - 1 for n in sizes)}
    assert {share.packed_tokens for share in dealt} == {sum(sizes)}


@given(sizes=SIZES, world=st.integers(1, 4), budget=st.integers(5, 60))
@settings(deadline=None)
def test_the_weights_of_all_sampled_tokens_sum_to_one(sizes, world, budget):
    dealt = rank_batches(rows_of_sizes(sizes), world, budget)
    batches = [batch_of(rows) for share in dealt for rows in share.micro_batches]
    assert sum(batch.weights_T[batch.mask_T].double().sum().item() for batch in batches) == pytest.approx(1.0, abs=1e-6)


def test_a_micro_batch_lays_rows_end_to_end_and_restarts_positions():
    rows = [
        TrainingSample(
            [5, 6, 7], [False, True, True], [0.0, -1.0, -2.0], advantages=[0.0, 0.5, 0.25], temperature=0.7, weight=0.25
        ),
        TrainingSample([8, 9], [False, True], [0.0, -3.0], versions=[-1, 4], reference=[0.0, -2.5], weight=0.5),
    ]
    batch = batch_of(rows)
    assert batch.ids_T.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.mask_T.tolist() == [False, True, True, False, True]
    assert batch.behaviour_logprobs_T.tolist() == [0.0, -1.0, -2.0, 0.0, -3.0]
    assert batch.advantages_T.tolist() == [0.0, 0.5, 0.25, 0.0, 0.0]
    assert batch.versions_T.tolist() == [-1, -1, -1, -1, 4]
    assert batch.reference_T.tolist() == [0.0, 0.0, 0.0, 0.0, -2.5]
    assert batch.values_T.tolist() == batch.targets_T.tolist() == [0.0] * 5
    assert batch.segment_T.tolist() == [0, 0, 0, 1, 1]
    assert batch.previous_T.tolist() == [0, 0, 1, 3, 3]
    assert batch.temperature_T.tolist() == pytest.approx([0.7, 0.7, 0.7, 1.0, 1.0])
    assert batch.weights_T.tolist() == [0.25, 0.25, 0.25, 0.5, 0.5]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths == (3, 2)


def test_a_micro_batch_without_rows_has_one_token_that_no_loss_sees():
    batch = batch_of([])
    assert len(batch.ids_T) == 1
    assert not batch.mask_T.any()
    assert batch.cu_seqlens.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (TrainingSample([1, 2], [False], [0.0, 0.0], trajectory="x/1"), "2 ids, 1 mask values"),
        (TrainingSample([1, 2], [True, True], [0.0, 0.0], trajectory="x/1"), "first token"),
        (TrainingSample([1, 2], [False, True], [0.0, 0.0], trajectory="x/1", temperature=0.0), "temperature"),
        (TrainingSample([], [], [], trajectory="x/1"), "0 ids"),
        (
            TrainingSample([1, 2], [False, True], [0.0, 0.0], trajectory="x/1", advantages=[1.0]),
            "2 ids and 1 advantages",
        ),
    ],
)
def test_a_malformed_row_is_refused_by_the_name_of_its_trajectory(row, problem):
    with pytest.raises(ValueError, match=f"x/1.*{problem}"):
        check_sample(row)


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="nothing to train on"):
        rank_batches([TrainingSample([1, 2], [False, False], [0.0, 0.0])], 1, 100)


@given(
    sizes=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=4), min_size=1, max_size=8), parts=st.integers(1, 4)
)
@settings(deadline=None)
def test_optimizer_steps_tear_no_trajectory_apart_and_lose_no_row(sizes, parts):
    rows = [
        TrainingSample(list(range(n)), [False] + [True] * (n - 1), [0.0] * n, trajectory=f"t{t}", group=f"g{t // 2}")
        for t, own in enumerate(sizes)
        for n in own
    ]
    steps = split_steps(rows, parts)
    assert sorted(id(row) for step in steps for row in step) == sorted(map(id, rows))
    assert len(steps) == min(parts, len(sizes))
    of_steps = [{row.trajectory for row in step} for step in steps]
    assert sum(map(len, of_steps)) == len(sizes)
    assert [names([step]) for step in split_steps(rows[::-1], parts)] == [names([step]) for step in steps]
    # Whole groups, where there are enough of them.
    by_group = [{row.group for row in step} for step in split_steps(rows, parts, groups_whole=True)]
    groups = (len(sizes) + 1) // 2
    assert groups < parts or sum(map(len, by_group)) == groups


def test_rows_that_sampled_nothing_make_no_optimizer_step():
    silent = TrainingSample([1, 2], [False, False], [0.0, 0.0])
    (only,) = split_steps([silent, *rows_of_sizes([3])], 2)
    assert [row.trajectory for row in only] == ["0"]
    assert split_steps([silent], 2) == [[silent]]
