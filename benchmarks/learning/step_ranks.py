"""Optimizer steps on several FSDP2 ranks over gloo, each a process with one thread. The last line of the output is JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as processes
from cases import read_case
from step_agentgym import groups_of, rows_with_advantages, settings

from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.worker import LearnerWorker


def one_rank(rank: int, world: int, port: int, folder: Path, steps: int, answers: Any) -> None:
    """Wall and CPU seconds of each step of this rank, and the most memory it took."""
    config = settings()
    config.learner.workers = world
    worker = LearnerWorker(rank, world, config, "cpu")
    worker.start("127.0.0.1", port, str(folder / "model"))
    groups, seconds = groups_of(read_case(folder)), []
    for _ in range(steps):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        worker.update([deal_to_ranks(rows_with_advantages(groups), config.learner)[rank]])
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    answers.put((rank, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, args.world, is_master=True, wait_for_workers=False)
    context = processes.get_context("spawn")
    answers = context.Queue()
    given = (args.world, int(store.port), args.folder, args.steps, answers)
    ranks = [context.Process(target=one_rank, args=(rank, *given)) for rank in range(args.world)]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=900) for _ in ranks]
    for each in ranks:
        each.join(60)
    walls = [max(step[0] for step in of_step) for of_step in zip(*(seconds for _, seconds, _ in found), strict=True)]
    cpus = [sum(step[1] for step in of_step) for of_step in zip(*(seconds for _, seconds, _ in found), strict=True)]
    print(json.dumps({"wall": walls, "cpu": cpus, "peak_mib": max(peak for _, _, peak in found)}))


if __name__ == "__main__":
    main()
