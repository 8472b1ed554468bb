"""Samples are packed and sent to the ranks once, whoever asks for them and whatever numbers they have by then."""

import dataclasses

import pytest
from learner_cases import make_config, make_rows

from agent_train.data.balance import TOKENS, Cost
from agent_train.learner.actor_group import shipping


def shipper(**learner):
    """A function that ships, and what it has put into the store."""
    store = []

    def put(batch):
        store.append(batch)
        return len(store) - 1

    return shipping(make_config(microbatch_tokens=30, **learner), put), store


def test_samples_that_got_scores_and_advantages_are_not_sent_again():
    ship, store = shipper(workers=2)
    samples = make_rows()
    first = ship(samples, TOKENS)
    scored = [dataclasses.replace(s, reference=s.spread(-1.0), advantages=s.spread(2.0), weight=0.5) for s in samples]
    assert ship(scored, TOKENS) is first
    assert (first[1], len(store)) == ([0, 1], 2)
    assert sorted(s.id for batch in store for part in batch.micro_batches for s in part) == [s.id for s in samples]


def test_a_part_of_the_samples_and_a_model_of_another_cost_have_a_packing_of_their_own():
    ship, store = shipper()
    samples = make_rows()
    whole = ship(samples, TOKENS)
    assert ship(samples[:3], TOKENS) is not whole
    assert ship(samples, Cost(10, 3, 1)) is not whole
    assert ship(samples, TOKENS) is whole
    assert len(store) == 3


def test_samples_of_a_later_step_are_not_taken_for_those_of_an_earlier_one_with_the_same_ids():
    ship, _ = shipper()
    first, later = ship(make_rows(seed=0), TOKENS), ship(make_rows(seed=1), TOKENS)
    assert first[0] != later[0]


def test_the_ranks_of_a_replica_get_one_copy():
    ship, store = shipper(workers=4, sequence_parallel=2)
    assert ship(make_rows(), TOKENS)[1] == [0, 0, 1, 1]
    assert len(store) == 2


def test_the_numbers_of_a_call_are_joined_to_the_samples_by_their_ids():
    ship, store = shipper()
    samples = make_rows()
    ship(samples, TOKENS)
    numbers = {s.id: {"weight": float(k), "advantages": s.spread(float(k))} for k, s in enumerate(samples)}
    filled = [s for part in store[0].with_numbers(numbers).micro_batches for s in part]
    assert {s.id: (s.weight, s.advantages) for s in filled} == {
        name: (own["weight"], own["advantages"]) for name, own in numbers.items()
    }
    assert all(s.weight != 5.0 and not s.advantages for part in store[0].micro_batches for s in part)


def test_two_samples_with_one_id_and_malformed_numbers_are_refused():
    ship, _ = shipper()
    one, other = make_rows()[:2]
    with pytest.raises(ValueError, match="two samples have the id 't0#0'"):
        ship([one, dataclasses.replace(other, id=one.id)], TOKENS)
    with pytest.raises(ValueError, match="9 ids and 1 advantages"):
        ship([dataclasses.replace(one, advantages=[1.0])], TOKENS)
    with pytest.raises(ValueError, match="temperature must be positive"):
        ship([dataclasses.replace(one, temperature=0.0)], TOKENS)
