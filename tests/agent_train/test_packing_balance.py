"""Balance: equal cost for ranks and micro-batches, the same whatever order rows come in."""

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_train.data.balance import TOKENS, Cost, balance, model_cost, spread
from agent_train.data.packing import rank_batches
from agent_train.data.samples import TrainingSample

COST = Cost(token=100, sampled=20, pair=1)
COSTS = st.lists(st.integers(0, 1000), max_size=40)
SIZES = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def rows_of_sizes(sizes):
    return [
        TrainingSample(ids=list(range(n)), mask=[False] + [True] * (n - 1), logprobs=[0.0] * n, trajectory=str(i))
        for i, n in enumerate(sizes)
    ]


def cost_of(rows):
    return sum(COST.of(len(row.ids), row.sampled) for row in rows)


def longest_first(costs, parts):
    """The greedy way: the largest to the least loaded."""
    dealt = [[] for _ in range(parts)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        min(dealt, key=lambda own: sum(costs[i] for i in own)).append(place)
    return dealt


@given(costs=COSTS, parts=st.integers(1, 7))
@example(costs=[], parts=3)
@settings(deadline=None, max_examples=40)
def test_every_cost_is_dealt_once_and_the_spread_is_not_above_longest_first(costs, parts):
    dealt = balance(costs, parts)
    assert len(dealt) == parts
    assert sorted(place for own in dealt for place in own) == list(range(len(costs)))
    assert spread(costs, dealt) <= spread(costs, longest_first(costs, parts))
    sums = [sum(costs[place] for place in own) for own in dealt]
    assert sums == sorted(sums, reverse=True)


def test_largest_differencing_finds_what_longest_first_misses():
    costs = [8, 7, 6, 5, 4]
    assert spread(costs, longest_first(costs, 2)) == 4
    assert spread(costs, balance(costs, 2)) == 2


@given(costs=COSTS, parts=st.integers(1, 5), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_the_sums_do_not_depend_on_the_order(costs, parts, seed):
    shuffled = random.Random(seed).sample(costs, len(costs))
    sums = [[sum(of[place] for place in own) for own in balance(of, parts)] for of in (costs, shuffled)]
    assert sums[0] == sums[1]


@given(sizes=SIZES, world=st.integers(1, 4), budget=st.integers(2, 120), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_shares_are_the_same_whatever_order_rows_come_in(sizes, world, budget, seed):
    rows = rows_of_sizes(sizes)
    shuffled = random.Random(seed).sample(rows, len(rows))
    dealt, again = (
        [share.micro_batches for share in rank_batches(own, world, budget, cost=COST)] for own in (rows, shuffled)
    )
    assert again == dealt


@given(sizes=SIZES, world=st.integers(1, 4), budget=st.integers(2, 120))
@settings(deadline=None, max_examples=40)
def test_ranks_and_micro_batches_are_level_and_keep_to_the_budget(sizes, world, budget):
    rows = rows_of_sizes(sizes)
    dealt = rank_batches(rows, world, budget, cost=COST)
    packed = [row.trajectory for share in dealt for own in share.micro_batches for row in own]
    assert sorted(packed) == sorted(row.trajectory for row in rows)
    ranks = [[row for own in share.micro_batches for row in own] for share in dealt]
    loads = [cost_of(own) for own in ranks]
    assert max(loads) - min(loads) <= max(cost_of([row]) for row in rows)
    # As many micro-batches as the rank that needs most of them, and no more.
    assert {len(share.micro_batches) for share in dealt} == {max(micro_batches(own, budget) for own in ranks)}
    for share in dealt:
        assert all(len(own) < 2 or sum(len(row.ids) for row in own) <= budget for own in share.micro_batches)
        costs = [cost_of(own) for own in share.micro_batches]
        assert costs == sorted(costs, reverse=True)


def micro_batches(rows, budget):
    return len(rank_batches(rows, 1, budget)[0].micro_batches) if rows else 0


def rows_of_ranks(rows, cost=TOKENS):
    return [sum(len(own) for own in share.micro_batches) for share in rank_batches(rows, 2, 1000, cost=cost)]


def test_long_rows_weigh_more_than_their_tokens():
    rows = rows_of_sizes([60, 20, 20, 20])
    squares = Cost(token=1, pair=100)
    assert sorted(rows_of_ranks(rows)) == [1, 3]
    assert sorted(rows_of_ranks(rows, squares)) == [1, 3]
    rows = rows_of_sizes([40, 40, 20, 20, 20, 20])
    assert sorted(rows_of_ranks(rows, squares)) == [3, 3]
    rows = rows_of_sizes([60, 30, 30, 30])
    assert rows_of_ranks(rows, squares) == [1, 3]
    assert sorted(rows_of_ranks(rows)) == [2, 2]


def test_a_rank_without_rows_gets_as_many_micro_batches():
    dealt = rank_batches(rows_of_sizes([9, 9]), 3, 9)
    assert [[len(own) for own in share.micro_batches] for share in dealt] == [[1], [1], [0]]
    assert [len(share.batches()[0].ids_T) for share in dealt] == [9, 9, 1]


def test_pairs_count_what_attention_sees():
    assert Cost(token=0, pair=1).of(4, 4) == 1 + 2 + 3 + 4
    assert Cost(token=0, pair=1).of(2, 2, before=3) == 4 + 5
    assert Cost(token=7, sampled=3).of(4, 2) == 28 + 6


SHAPE = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 10, "vocab_size": 50}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SHAPE, Cost(3 * (4 * 64 + 240), 400, 3 * 2 * 8)),
        ({"text_config": SHAPE}, Cost(3 * (4 * 64 + 240), 400, 3 * 2 * 8)),
        ({**SHAPE, "head_dim": 16, "num_key_value_heads": 1}, Cost(3 * (8 * 16 * 6 + 240), 400, 3 * 2 * 32)),
        ({**SHAPE, "num_experts_per_tok": 2, "moe_intermediate_size": 4}, Cost(3 * (4 * 64 + 192), 400, 3 * 2 * 8)),
        ({"hidden_size": 8}, TOKENS),
    ],
)
def test_the_cost_comes_from_the_shape_in_the_config(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_cost(tmp_path) == expected


def test_a_folder_without_config_counts_tokens(tmp_path):
    assert model_cost(tmp_path) == TOKENS
