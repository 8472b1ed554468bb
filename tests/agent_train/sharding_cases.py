"""Runs of one learner step on several gloo ranks, in processes that are started once for many cases."""

import contextlib
import dataclasses
import multiprocessing
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from learner_cases import gradients_of, make_config, make_rows, numbers_of, recorded
from torch.distributed.tensor import DTensor

import agent_train.learner.fsdp as fsdp
from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.state import make_optimizer
from agent_train.learner.worker import LearnerWorker

BUDGET = 30
SECONDS = 240
# Loaded once, in the process that the ranks are forked from: that takes longer than all cases.
LOADED_BEFORE = [
    "agent_train.learner.worker",
    "peft",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]


@dataclass(frozen=True)
class Case:
    """What one group of ranks does.

    Attributes:
        name: of the case.
        world: ranks.
        model: folder of the model, below that of all cases.
        learner: settings.
        lora: rank of the adapters.
        role: of the worker.
        state: whether the whole state is saved at the end, for a run to go on from.
    """

    name: str
    world: int
    model: str = "tied"
    learner: dict = field(default_factory=dict)
    lora: int = 0
    role: str = "policy"
    state: bool = False

    def config(self, world=None):
        config = make_config(
            workers=world or self.world, microbatch_tokens=BUDGET, **(self.learner if world is None else {})
        )
        config.lora.rank = self.lora
        return config


def spread_adapter(name, shape, seed):
    """An adapter whose B is not zero either, so that it changes what the model says."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2


def rows():
    """Of one group, with a prompt in common, which some cases compute once."""
    every = make_rows(group="g")
    return [
        dataclasses.replace(
            row,
            ids=[*every[0].ids[:4], *row.ids[4:]],
            values=[0.1 * (i % 7) if sampled else 0.0 for i, sampled in enumerate(row.mask)],
            targets=[0.3 * (i % 5) - 0.5 if sampled else 0.0 for i, sampled in enumerate(row.mask)],
        )
        for row in every
    ]


def measure(worker, case, config, folder):
    """What is compared: weights before, metrics, gradients, what the worker says of the rows, what it saves, and after a step."""
    share = deal_to_ranks(rows(), config.learner)[worker.rank]
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in worker.module.parameters())
    weights = {name: whole.clone() for name, whole in fsdp.full_tensors(worker.module)}
    said = worker.values(share) if case.role == "critic" else worker.logprobs(share)
    (worker.save_adapter if case.lora else worker.save)(str(folder / case.name))
    if case.role == "critic":
        metrics, gradients = recorded(worker, lambda: worker.update_critic([share]))
    elif case.lora:
        metrics, gradients = lora_gradients(worker, share)
    else:
        metrics, gradients = gradients_of(worker, share)
    after, sent = None, 0.0
    if case.role == "policy":
        with counted_traffic() as traffic:
            worker.update([share], lr_scale=0.1)
        sent = sum(traffic) / len(share.micro_batches)
        after = worker.logprobs(share)
    later = save_state(worker, folder / f"{case.name} state") if case.state else None
    mine = {
        "held": held,
        "sent": sent,
        "states": held * 4
        + sum(local(value).nbytes for of in worker.optimizer.state.values() for value in of.values()),
        "decays": decaying(worker, config),
        "metrics": numbers_of(metrics),
        "manifest": worker.manifest(),
    }
    return mine | {"weights": weights, "gradients": gradients, "said": said, "after": after, "later": later}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def counted_traffic():
    """The bytes that FSDP's collectives send from this rank: a list that grows."""
    sent, gather, scatter = [], dist.all_gather_single, dist.reduce_scatter_single

    def gathering(output_tensor, input_tensor, *more, **options):
        sent.append(output_tensor.nbytes - input_tensor.nbytes)
        return gather(output_tensor, input_tensor, *more, **options)

    def scattering(output, input, **options):
        sent.append(input.nbytes - output.nbytes)
        return scatter(output=output, input=input, **options)

    dist.all_gather_single, dist.reduce_scatter_single = gathering, scattering
    try:
        yield sent
    finally:
        dist.all_gather_single, dist.reduce_scatter_single = gather, scatter


def decaying(worker, config):
    """The names of what an optimizer with weight decay makes smaller."""
    settings = dataclasses.replace(config.learner, weight_decay=0.1)
    groups = make_optimizer(worker.module.named_parameters(), settings).param_groups
    shrinks = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    return {name for name, p in worker.module.named_parameters() if id(p) in shrinks}


def save_state(worker, folder):
    """Write what a resumed run reads, and return the whole weights that are in it."""
    worker.save_state(str(folder))
    while (said := worker.state_saved()) is None:
        time.sleep(0.02)
    assert said == ""
    return {name: whole.clone() for name, whole in fsdp.full_tensors(worker.module)}


def lora_gradients(worker, share):
    found = {}

    def record():
        for name, parameter in worker.module.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.full_tensor().clone()

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, worker.optimizer, "step", worker.optimizer.step)
        worker.optimizer.step = record
        return worker.update([share]), found


def run_rank(rank, jobs, folder):
    """One process: its part of every case that has so many ranks. Writes what it measured, or the error."""
    fsdp.initial_adapter = spread_adapter
    answers = {}
    for case, port in jobs:
        if rank >= case.world:
            continue
        config = case.config()
        worker = LearnerWorker(rank, case.world, config, "cpu", case.role)
        worker.start("127.0.0.1", port, str(folder / case.model))
        answers[case.name] = measure(worker, case, config, folder / "saved")
        dist.barrier()
        dist.destroy_process_group()
    torch.save(answers, folder / f"rank-{rank}.pt")


def run_cases(cases, folder: Path):
    """Every case on its ranks: name -> one record for each rank. Raises where a rank fails or does not end."""
    (folder / "saved").mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED_BEFORE)
    stores = [dist.TCPStore("127.0.0.1", 0, case.world, is_master=True, wait_for_workers=False) for case in cases]
    jobs = [(case, store.port) for case, store in zip(cases, stores, strict=True)]
    world = max(case.world for case in cases)
    processes = [context.Process(target=run_rank, args=(rank, jobs, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, f"the ranks ended with {codes}, None for those that took too long"
    answers = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]
    return {case.name: [answers[rank][case.name] for rank in range(case.world)] for case in cases}
