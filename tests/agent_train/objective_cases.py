"""A policy that is a table, to try the objective of the policy on: exact numbers, through the worker's own optimizer step."""

import contextlib
import dataclasses
import math

import torch
import torch.distributed as dist
import torch.multiprocessing
from learner_cases import gradients_of, make_config

from agent_train.config.schema import AlgorithmConfig, TrainerConfig
from agent_train.data.packing import rank_batches
from agent_train.data.samples import TrainingSample
from agent_train.learner.worker import LearnerWorker

BIG = 10_000
# Losses whose ratio divides by the engine's policy, which no proximal policy may come between.
OF_BEHAVIOUR = ("dppo", "aipo", "m2po")


class Table(torch.nn.Module):
    """A log-probability and an entropy for each token id, both weights. That of id 0, which no row samples, is NaN."""

    def __init__(self, logprobs, entropy):
        super().__init__()
        self.logprobs = torch.nn.Parameter(torch.tensor([math.nan, *logprobs]))
        self.entropy = torch.nn.Parameter(torch.tensor([math.nan, *entropy]))

    def reshard(self):
        """As of a module that FSDP shards: here nothing is gathered."""

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
    return TrainingSample(
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
def as_table(worker, logprobs, entropy, algorithm, lr, staleness=0):
    """The worker with a table for its model and plain gradient descent, and what it was put back after."""
    kept = {name: getattr(worker, name) for name in ("config", "module", "optimizer", "objective")}
    worker.config = dataclasses.replace(
        make_config(lr=lr), algorithm=algorithm, trainer=TrainerConfig(staleness=staleness)
    )
    worker.module = Table(logprobs, entropy)
    worker.optimizer = torch.optim.SGD(worker.module.parameters(), lr=lr)
    worker.objective = None
    try:
        yield worker
    finally:
        for name, value in kept.items():
            setattr(worker, name, value)


def learn(worker, rows, logprobs, algorithm, *, entropy=None, budget=BIG, updates=1, lr=0.0, staleness=0, **given):
    """One update, whose optimizer steps all see the same rows, of a table that begins with these log-probabilities."""
    grads, entropy_grads = [], []
    with as_table(worker, logprobs, entropy or [1.0] * len(logprobs), algorithm, lr, staleness) as worker:
        optimizer_step = worker.optimizer.step

        def step():
            grads.append(worker.module.logprobs.grad[1:].tolist())
            entropy_grads.append([] if worker.module.entropy.grad is None else worker.module.entropy.grad[1:].tolist())
            # The weights of id 0 are NaN and have a gradient of 0.
            optimizer_step()

        worker.optimizer.step = step
        share = rank_batches(rows, 1, budget, algorithm.reduction, algorithm.reduction_length)[0]
        metrics = worker.update([share] * updates, **given)
    return Learnt(metrics, grads, entropy_grads)


def doubled(logprobs_T, advantages_T, *, factor=2.0):
    """A loss of one's own."""
    return -factor * advantages_T * logprobs_T


def gradients_by(worker, algorithm, rows, rank, world, budget, kl_coef):
    """What `gradients_of` finds for one rank's share of the rows, with these settings of the algorithm."""
    worker.config = dataclasses.replace(worker.config, algorithm=algorithm, trainer=TrainerConfig(staleness=2))
    worker.objective = None
    share = rank_batches(rows, world, budget, algorithm.reduction, algorithm.reduction_length)[rank]
    return gradients_of(worker, share, kl_coef=kl_coef, version=2)


def gradients_of_worlds(rank, ports, model_dir, cases, budget, kl_coef, folder):
    """One process of the largest of some worlds, which it joins one after another: `gradients_by` of each case, in each world.

    Args:
        ports: of the store that the parent serves for each number of ranks, the largest first.
        cases: algorithm and rows of each.
        folder: where rank 0 writes what it found, a file for each world.
    """
    for world, port in ports.items():
        if rank >= world:
            return
        worker = LearnerWorker(rank, world, make_config(workers=world, timeout=300.0), "cpu")
        worker.start("127.0.0.1", port, str(model_dir))
        found = [gradients_by(worker, *case, rank, world, budget, kl_coef) for case in cases]
        if rank == 0:
            torch.save([(vars(metrics), grads) for metrics, grads in found], folder / f"{world}.pt")
        dist.barrier()
        dist.destroy_process_group()


def fork_worlds(_, *arguments):
    """`gradients_of_worlds` in as many processes as the largest world has ranks.

    Run in a new process: what is imported here is not imported by each of them again, and nothing runs here that may not be
    forked.
    """
    torch.multiprocessing.start_processes(gradients_of_worlds, arguments, nprocs=max(arguments[0]), start_method="fork")
