"""A policy that is a table, to try the objective of the policy on: exact numbers, through the worker's own optimizer step."""

import contextlib
import dataclasses
import math

import torch
from learner_cases import make_config

from agent_train.config import AlgorithmConfig
from agent_train.packing import shares
from agent_train.rows import Row

BIG = 10_000
# Losses whose ratio divides by the engine's policy, which no proximal policy may come between.
OF_BEHAVIOUR = ("dppo", "aipo", "m2po")


class Table(torch.nn.Module):
    """A log-probability and an entropy for each token id, both weights. That of id 0, which no row samples, is NaN."""

    def __init__(self, logprobs, entropy):
        super().__init__()
        self.logprobs = torch.nn.Parameter(torch.tensor([math.nan, *logprobs]))
        self.entropy = torch.nn.Parameter(torch.tensor([math.nan, *entropy]))

    def forward(self, batch):
        return self.logprobs[batch.ids_T], self.entropy[batch.ids_T]


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What an update gave: its metrics, and for each optimizer step the gradient of each sampled token's log-probability."""

    metrics: object
    grads: list
    entropy_grads: list


def row_of(behaviour, advantages, first=1, **fields):
    """A row of one prompt token and of the sampled ids `first`, `first` + 1, ...; what is not sampled is NaN."""
    count = len(behaviour)
    return Row(
        ids=[0, *range(first, first + count)],
        mask=[False] + [True] * count,
        logprobs=[math.nan, *behaviour],
        advantages=[math.nan, *advantages],
        **fields,
    )


def settings(loss="ppo", **fields):
    """Of an algorithm, with the proximal policy that the loss can have."""
    proximal = "behaviour" if loss in OF_BEHAVIOUR else "recomputed"
    return AlgorithmConfig(**{"loss": loss, "proximal": proximal, **fields})


@contextlib.contextmanager
def as_table(worker, logprobs, entropy, algorithm, lr):
    """The worker with a table for its model and plain gradient descent, and what it was put back after."""
    kept = {name: getattr(worker, name) for name in ("config", "module", "_optimizer", "_objective")}
    worker.config = dataclasses.replace(make_config(lr=lr), algorithm=algorithm)
    worker.module = Table(logprobs, entropy)
    worker._optimizer = torch.optim.SGD(worker.module.parameters(), lr=lr)
    worker._objective = None
    try:
        yield worker
    finally:
        for name, value in kept.items():
            setattr(worker, name, value)


def learn(worker, rows, logprobs, algorithm, *, entropy=None, budget=BIG, updates=1, lr=0.0, **given):
    """One update, whose optimizer steps all see the same rows, of a table that begins with these log-probabilities."""
    grads, entropy_grads = [], []
    with as_table(worker, logprobs, entropy or [1.0] * len(logprobs), algorithm, lr) as worker:
        optimizer_step = worker._optimizer.step

        def step():
            grads.append(worker.module.logprobs.grad[1:].tolist())
            entropy_grads.append([] if worker.module.entropy.grad is None else worker.module.entropy.grad[1:].tolist())
            # The weights of id 0 are NaN and have a gradient of 0.
            optimizer_step()

        worker._optimizer.step = step
        share = shares(rows, 1, budget, algorithm.reduction, algorithm.reduction_length)[0]
        metrics = worker.update([share] * updates, **given)
    return Learnt(metrics, grads, entropy_grads)


def doubled(logprobs_T, advantages_T, *, factor=2.0):
    """A loss of one's own."""
    return -factor * advantages_T * logprobs_T
