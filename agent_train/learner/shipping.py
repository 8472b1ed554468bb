"""Samples on their way to the ranks: packed and put into Ray's object store once a step, for every model of the same cost.

The weights in the loss and the numbers that models and advantages give to tokens differ from call to call and are sent
with each.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from agent_train.config.schema import Config
from agent_train.data.balance import Cost
from agent_train.data.packing import RankBatch, check_sample
from agent_train.data.samples import TrainingSample
from agent_train.learner.parallel import deal_to_ranks, replica_size

# The batch of each rank, and references into the object store that give it to an actor.
Ship = Callable[[Sequence[TrainingSample], Cost], tuple[list[RankBatch], list[Any]]]


def shipping(config: Config, put: Callable[[RankBatch], Any] = ray.put) -> Ship:
    """A function that deals samples to the ranks, the same way if they were shipped before, whatever their numbers are now.

    The models of a run share it. It raises ValueError if a sample is malformed, two have the same id, or none has a
    sampled token. `put` makes a batch available to the ranks.
    """
    # Those of a step: one to score all samples, one for each optimizer step; twice, since a critic may have another cost.
    known = deque[tuple[list[TrainingSample], Cost, tuple[list[RankBatch], list[Any]]]](
        maxlen=2 * (1 + config.algorithm.updates_per_step)
    )

    def ship(samples: Sequence[TrainingSample], cost: Cost) -> tuple[list[RankBatch], list[Any]]:
        for sample in samples:
            check_sample(sample)
        if twice := [name for name, count in Counter(sample.id for sample in samples).items() if count > 1]:
            raise ValueError(f"two samples have the id {twice[0]!r}; ids must be unique within a step")
        bare = [_bare(sample) for sample in samples]
        for earlier, its_cost, shipped in known:
            if its_cost == cost and earlier == bare:
                return shipped
        batches = deal_to_ranks(bare, config.learner, cost=cost)
        replica = replica_size(config.learner)  # neighbouring ranks, which have the same batch
        references = [reference for batch in batches[::replica] for reference in [put(batch)] * replica]
        known.append((bare, cost, (batches, references)))
        return known[-1][-1]

    return ship


def _bare(sample: TrainingSample) -> TrainingSample:
    """The sample without what is sent with each call, or is not for the ranks."""
    empty: dict[str, Any] = {
        name: [] for name in ("rewards", "advantages", "reference", "values", "targets", "prm", "teacher")
    }
    return replace(sample, temperature=1.0, weight=0.0, in_loss=True, **empty)
