"""Rows that share a prompt hold it once, and train exactly as rows that do not."""

import dataclasses
import random
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import VOCAB, assert_same, gradients_of, make_config, one_rank, write_model

from agent_train.data.balance import Cost
from agent_train.data.packing import LEAST_SHARED, batch_of, prefix_groups_of, rank_batches
from agent_train.data.samples import TrainingSample
from agent_train.learner.worker import LearnerWorker


def row_of(prompt, size, rng, group="g", turns=1):
    """A row that begins with `prompt`; further turns have a stretch that was not sampled before each."""
    ids, mask = list(prompt), [False] * len(prompt)
    for turn in range(turns):
        bridge = 2 if turn else 0
        ids += [rng.randrange(VOCAB) for _ in range(bridge + size)]
        mask += [False] * bridge + [True] * size
    advantage = rng.gauss(0, 1)
    return TrainingSample(
        ids=ids,
        mask=mask,
        logprobs=[rng.uniform(-5, -1) if sampled else 0.0 for sampled in mask],
        trajectory=f"{group}/{rng.random()}",
        group=group,
        temperature=rng.choice([0.7, 1.0]),
        advantages=[advantage if sampled else 0.0 for sampled in mask],
    )


def group_of(name, prompt, sizes, rng, **kwargs):
    ids = [rng.randrange(VOCAB) for _ in range(prompt)]
    return [row_of(ids, size, rng, name, **kwargs) for size in sizes]


def mixed_rows(seed=0):
    """Several groups with prompts of other lengths, rows of several turns, a group of one, and one whose rows share nothing."""
    rng = random.Random(seed)
    rows = group_of("a", 12, [3, 3, 5, 3], rng) + group_of("b", 5, [4, 2, 6], rng, turns=2)
    rows += group_of("one", 7, [4], rng) + group_of("turns", 9, [2, 2], rng, turns=3)
    rows += [row_of([i, 1, 2], 4, rng, "unlike") for i in range(3)]
    system = [rng.randrange(VOCAB) for _ in range(LEAST_SHARED)]
    rows += [row_of([*system, i], 3, rng, f"alone {i}") for i in range(3)]
    # A trajectory that went on in a second row, with a prompt that begins as the group's.
    rows += [row_of([*rows[0].ids, 3, 1], 3, rng, "a")]
    rng.shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, tied, kv_heads in (("tied", True, 2), ("untied", False, 1)):
        made[name] = write_model(tmp_path_factory.mktemp(name), tied=tied, kv_heads=kv_heads)
    return made


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_loss_gradients_and_measures_are_those_of_the_rows_by_themselves(folders, model, checkpointing, reduction):
    rows = mixed_rows()
    config = make_config(gradient_checkpointing=checkpointing)
    with one_rank(folders[model], config) as worker:
        (naive,) = rank_batches(rows, 1, 10_000, reduction)
        expected, grads = gradients_of(worker, naive)
        for budget in (10_000, 40):
            (shared,) = rank_batches(rows, 1, budget, reduction, shared_prefix=True)
            metrics, found = gradients_of(worker, shared)
            assert_same(found, grads, 1e-6)
            for name, value in vars(metrics).items():
                if isinstance(value, float) and "second" not in name:
                    assert value == pytest.approx(vars(expected).get(name, value), abs=1e-6, rel=1e-5), name


def test_sequence_losses_see_the_right_rows(folders):
    rows = mixed_rows(1)
    config = make_config()
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, loss="gspo"))
    with one_rank(folders["tied"], config) as worker:
        _, grads = gradients_of(worker, rank_batches(rows, 1, 10_000)[0])
        _, found = gradients_of(worker, rank_batches(rows, 1, 10_000, shared_prefix=True)[0])
    assert_same(found, grads, 1e-6)


def test_each_row_gets_its_own_log_probabilities_as_long_as_itself(folders):
    rows = mixed_rows(2)
    with one_rank(folders["tied"]) as worker:
        found = []
        for shared in (False, True):
            (share,) = rank_batches(rows, 1, 60, shared_prefix=shared)
            scored = chain.from_iterable(worker.logprobs(share))
            found.append({row.trajectory: own for row, own in zip(chain(*share.micro_batches), scored, strict=True)})
    for row in rows:
        naive, own = (of_rows[row.trajectory] for of_rows in found)
        assert len(own) == len(row.ids)
        assert own == pytest.approx(naive, abs=1e-5)
        assert [x != 0 for x in own] == row.mask


def two_ranks(rank, port, folder, rows, out):
    torch.set_num_threads(1)
    worker = LearnerWorker(rank, 2, make_config(workers=2, timeout=300.0), "cpu")
    worker.start("127.0.0.1", port, str(folder))
    _, grads = gradients_of(worker, rank_batches(rows, 2, 40, shared_prefix=True)[rank])
    if rank == 0:
        torch.save(grads, out)
    dist.barrier()
    dist.destroy_process_group()


def fork_ranks(_, *arguments):
    """Run in a new process, which has imported what the ranks need and in which nothing runs that may not be forked."""
    torch.multiprocessing.start_processes(two_ranks, arguments, nprocs=2, start_method="fork")


def test_two_ranks_with_trees_give_the_gradients_of_one_without(folders, tmp_path):
    rows = mixed_rows(3)
    with one_rank(folders["tied"]) as worker:
        _, grads = gradients_of(worker, rank_batches(rows, 1, 10_000)[0])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False)
    arguments = (store.port, folders["tied"], rows, tmp_path / "grads")
    torch.multiprocessing.spawn(fork_ranks, arguments)
    assert_same(torch.load(tmp_path / "grads"), grads, 1e-6)


def test_the_first_token_of_a_continuation_is_predicted_by_the_last_of_the_prompt():
    rng = random.Random(0)
    rows = group_of("a", 4, [2, 3], rng)
    (share,) = rank_batches(rows, 1, 100, shared_prefix=True)
    (batch,) = share.batches()
    longer, shorter = share.micro_batches[0]
    assert batch.ids_T.tolist() == longer.ids + shorter.ids[4:]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5]
    assert batch.previous_T.tolist() == [0, 0, 1, 2, 3, 4, 5, 3, 7]
    assert batch.segment_T.tolist() == [0] * 7 + [1] * 2
    assert batch.lengths == (7, 2)
    assert batch.cu_seqlens.tolist() == [0, 7, 9]
    assert batch.mask_T.tolist() == [False] * 4 + [True] * 5


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 6) | st.integers(30, 40), st.integers(1, 9)),
    min_size=1,
    max_size=14,
)


def drawn_rows(shape):
    """Groups of rows whose prompts are alike as far as they go, or differ from their first token."""
    rows = []
    for number, (group, kind, prompt, size) in enumerate(shape):
        ids = [kind] * prompt + [VOCAB + number] * size
        mask = [False] * prompt + [True] * size
        rows.append(
            TrainingSample(ids, mask, [0.0] * len(ids), trajectory=str(number), group=f"g{group}" if group else "")
        )
    return rows


@given(shape=ROWS)
@settings(deadline=None, max_examples=40)
def test_trees_hold_every_row_once_and_share_only_what_is_common_and_not_sampled(shape):
    rows = drawn_rows(shape)
    trees = prefix_groups_of(rows)
    assert sorted(row.trajectory for tree in trees for row in tree.samples) == sorted(row.trajectory for row in rows)
    for tree in trees:
        assert len({row.group for row in tree.samples}) == 1 or tree.prefix >= LEAST_SHARED
        assert len({tuple(row.ids[: tree.prefix]) for row in tree.samples}) == 1
        assert not any(any(row.mask[: tree.prefix]) for row in tree.samples)
        assert (tree.prefix > 0) == (len(tree.samples) > 1)
        assert tree.tokens <= sum(len(row.ids) for row in tree.samples)
    assert prefix_groups_of(rows[::-1]) == trees


@given(shape=ROWS, world=st.integers(1, 3), budget=st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_budget_counts_the_prompt_once_and_no_row_is_lost_or_doubled(shape, world, budget):
    rows = drawn_rows(shape)
    dealt = rank_batches(rows, world, budget, cost=Cost(10, 3, 1), shared_prefix=True)
    packed = [row.trajectory for share in dealt for own in share.micro_batches for row in own]
    assert sorted(packed) == sorted(row.trajectory for row in rows)
    assert len({len(share.micro_batches) for share in dealt}) == 1
    for share in dealt:
        for own, batch in zip(share.micro_batches, share.batches(), strict=True):
            assert len(batch.ids_T) <= budget or len(own) == 1
    again = rank_batches(
        random.Random(0).sample(rows, len(rows)), world, budget, cost=Cost(10, 3, 1), shared_prefix=True
    )
    assert [share.micro_batches for share in again] == [share.micro_batches for share in dealt]


@given(shape=ROWS)
@settings(deadline=None, max_examples=40)
def test_every_token_of_a_row_can_be_walked_back_to_its_start(shape):
    rows = drawn_rows(shape)
    (share,) = rank_batches(rows, 1, 10_000, shared_prefix=True)
    (batch,) = share.batches()
    for place, row in enumerate(share.micro_batches[0]):
        token, ids = int(batch.cu_seqlens[place + 1]) - 1, []
        while True:
            ids.append(int(batch.ids_T[token]))
            if batch.previous_T[token] == token:
                break
            assert batch.positions_T[token] == batch.positions_T[batch.previous_T[token]] + 1
            token = int(batch.previous_T[token])
        assert ids[::-1] == row.ids
        assert int((batch.mask_T & (batch.segment_T == place)).sum()) == row.sampled


def test_samples_of_other_groups_share_a_system_prompt_and_not_a_few_tokens():
    rng = random.Random(0)
    for length, shared in ((LEAST_SHARED, LEAST_SHARED), (LEAST_SHARED - 1, 0)):
        system = [rng.randrange(VOCAB) for _ in range(length)]
        rows = [row_of([*system, number, number], 3, rng, f"task {number}") for number in range(4)]
        (share,) = rank_batches(rows, 1, 1000, shared_prefix=True)
        (batch,) = share.batches()
        assert len(batch.ids_T) == 4 * (length + 5) - 3 * shared


def test_a_group_costs_its_prompt_once():
    rng = random.Random(0)
    rows = [row for name in "abcd" for row in group_of(name, 40, [10] * 8, rng)]
    (share,) = rank_batches(rows, 1, 120, shared_prefix=True)
    assert [len(batch.ids_T) for batch in share.batches()] == [120] * 4
    assert share.packed_tokens == 4 * 8 * 50


def test_a_tree_that_is_too_long_becomes_prefix_groups_of_fewer_rows():
    rng = random.Random(0)
    (share,) = rank_batches(group_of("a", 40, [10] * 8, rng), 1, 80, shared_prefix=True)
    assert [len(batch.ids_T) for batch in share.batches()] == [80, 80]
    assert [[prefix.samples for prefix in own] for own in share.prefixes] == [[4], [4]]


def test_a_row_that_is_too_long_for_a_micro_batch_goes_alone_and_the_others_share():
    rng = random.Random(0)
    rows = group_of("a", 40, [10] * 4 + [200], rng)
    (share,) = rank_batches(rows, 1, 120, shared_prefix=True)
    assert sorted(len(batch.ids_T) for batch in share.batches()) == [80, 240]


def test_one_group_on_two_ranks_is_divided_among_them():
    rng = random.Random(0)
    dealt = rank_batches(group_of("a", 8, [10] * 8, rng), 2, 1000, shared_prefix=True)
    assert [[len(own) for own in share.micro_batches] for share in dealt] == [[4], [4]]


def test_ranks_keep_groups_whole_where_they_come_out_even():
    rng = random.Random(0)
    rows = [row for name in "abcd" for row in group_of(name, 20, [5] * 4, rng)]
    parts = [share.micro_batches[0] for share in rank_batches(rows, 2, 1000, shared_prefix=True)]
    assert [len({row.group for row in part}) for part in parts] == [2, 2]
    assert len(batch_of(parts[0]).ids_T) == 2 * 4 * 25
