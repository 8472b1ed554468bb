"""Samples on their way to the ranks: packed and put into Ray's object store once a step, for every model of the same cost.

What differs from call to call, the weights in the loss and the numbers that models and advantages give to tokens, is sent with
each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from agent_train.config.schema import Config
from agent_train.data.balance import Cost
from agent_train.data.packing import RankBatch, check_sample
from agent_train.data.samples import TrainingSample, by_id
from agent_train.learner.parallel import rank_shares, replica_size


@dataclass(frozen=True)
class Shipped:
    """The batch of each rank, and what an actor is given to get it: a reference into the object store."""

    samples: list[TrainingSample]
    cost: Cost
    batches: list[RankBatch]
    references: list[Any]


@dataclass
class Shipper:
    """Packs samples for the ranks. The models of a run share one.

    Attributes:
        config: of the run.
        put: makes a batch available to the ranks.
    """

    config: Config
    put: Callable[[RankBatch], Any] = ray.put
    _shipped: deque[Shipped] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Those of a step: one to score all samples, one for each optimizer step; twice, since a critic may have another cost.
        self._shipped = deque(maxlen=2 * (1 + self.config.algorithm.updates_per_step))

    def ship(self, samples: Sequence[TrainingSample], cost: Cost) -> Shipped:
        """The samples dealt to the ranks, as before if the same samples were shipped before, whatever their numbers are now.

        Raises:
            ValueError: a sample is malformed, two have the same id, or none has a sampled token.
        """
        by_id(samples)
        for sample in samples:
            check_sample(sample)
        bare = [_bare(sample) for sample in samples]
        for known in self._shipped:
            if known.cost == cost and known.samples == bare:
                return known
        batches = rank_shares(bare, self.config.learner, cost=cost)
        replica = replica_size(self.config.learner)  # neighbouring ranks, which have the same batch
        references = [reference for batch in batches[::replica] for reference in [self.put(batch)] * replica]
        shipped = Shipped(bare, cost, batches, references)
        self._shipped.append(shipped)
        return shipped


def _bare(sample: TrainingSample) -> TrainingSample:
    """The sample without what is sent with each call, or is not for the ranks."""
    return replace(
        sample,
        temperature=1.0,
        weight=0.0,
        rewards=[],
        in_loss=True,
        advantages=[],
        reference=[],
        values=[],
        targets=[],
        prm=[],
        teacher=[],
    )
