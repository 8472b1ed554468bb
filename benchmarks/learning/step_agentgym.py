"""Optimizer steps by our learner, in this process, on one rank, through FSDP2. The last line of the output is JSON."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import read_case, reward_of, tokens_of

from agent_train.algorithms.advantages import group_advantages
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.engine.base import Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.worker import LearnerWorker
from agent_train.weights.sync import TensorInfo, WeightAddress, free_port, sync
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def settings(shared_prefix: bool = False) -> Config:
    """The defaults, and what the other side is told too: no warm-up, a learning rate, GRPO with clip-higher."""
    config = Config()
    learner = dataclasses.replace(config.learner, workers=1, lr=1e-3, warmup_steps=0, shared_prefix=shared_prefix)
    algorithm = dataclasses.replace(config.algorithm, loss_settings={"clip_low": 0.2, "clip_high": 0.28})
    return dataclasses.replace(config, learner=learner, algorithm=algorithm)


def groups_of(case: dict[str, Any]) -> list[Group]:
    """The case's rows as the trajectories that a rollout leaves."""
    found = []
    for number, group in enumerate(case["groups"]):
        samples = enumerate(zip(group["completions"], group["rewards"], strict=True))
        found.append(Group(str(number), [trajectory(number, i, group["ids"], ids, r) for i, (ids, r) in samples]))
    return found


def trajectory(group: int, sample: int, prompt: list[int], ids: list[int], reward: float) -> Trajectory:
    tokens = Tokens(prompt, ids, [0.0] * len(ids), [0] * len(ids))
    turn = Turn([user("")], assistant(""), reward=reward, tokens=tokens)
    return Trajectory(f"{group}-{sample}", "benchmark", str(group), sample, turns=[turn])


def rows_with_advantages(groups: Sequence[Group]) -> list[TrainingSample]:
    """What the loop does between the rollout and the update."""
    rows = []
    for group in groups:
        advantages = group_advantages([t.reward for t in group.trajectories], "sample", 1e-4)
        for each, advantage in zip(group.trajectories, advantages, strict=True):
            for row in samples_of(each):
                rows.append(dataclasses.replace(row, advantages=row.spread(advantage)))
    return rows


def train(worker: LearnerWorker, groups: Sequence[Group]) -> Any:
    """One step: advantages, rows, packing, forward, backward, optimizer. Returns the update's metrics."""
    return worker.update([deal_to_ranks(rows_with_advantages(groups), worker.config.learner)[0]])


def start_worker(model: Path, config: Config) -> LearnerWorker:
    worker = LearnerWorker(0, 1, config, "cpu")
    worker.start("127.0.0.1", worker.open_store("127.0.0.1"), str(model))
    return worker


def keep_gradients(worker: LearnerWorker, path: Path) -> None:
    """Before the first optimizer step, write the (clipped) gradients."""

    def write(*_: Any) -> None:
        if not path.exists():
            named = worker.module.model.named_parameters()
            torch.save({name: p.grad.full_tensor() for name, p in named}, path)

    worker.optimizer.register_step_pre_hook(write)


class Sender:
    """The worker as the weight sync wants its learner."""

    def __init__(self, worker: LearnerWorker):
        self.worker = worker

    def manifest(self) -> list[TensorInfo]:
        return self.worker.manifest()

    async def send_weights(self) -> dict[str, int]:
        return await asyncio.to_thread(self.worker.send_weights)


async def sampled(engine: EmbeddedEngine, case: dict[str, Any], most: int, step: int) -> list[Group]:
    """As many completions of each prompt as the case has, all of them in one batch of the engine."""
    count = sum(len(group["completions"]) for group in case["groups"])

    async def one(number: int, sample: int, prompt: list[int]) -> Trajectory:
        sampling = Sampling(most, stop_token_ids=(case["eos"],), seed=step * count + number * 1000 + sample)
        done = await engine.generate(prompt, sampling)
        tokens = Tokens(prompt, done.ids, done.logprobs, done.versions, done.finish_reason)
        turn = Turn([user("")], assistant(""), reward=reward_of(done.ids), tokens=tokens)
        return Trajectory(f"{number}-{sample}", "benchmark", str(number), sample, turns=[turn])

    plays = [
        [one(number, i, group["ids"]) for i in range(len(group["completions"]))]
        for number, group in enumerate(case["groups"])
    ]
    found = await asyncio.gather(*(play for group in plays for play in group))
    size = len(plays[0])
    return [Group(str(n), list(found[n * size : (n + 1) * size])) for n in range(len(plays))]


async def whole_steps(
    worker: LearnerWorker, folder: Path, case: dict[str, Any], steps: int, most: int
) -> dict[str, Any]:
    """CPU seconds of steps that generate, train and hand the weights to the engine, and the tokens they sampled."""
    count = sum(len(group["completions"]) for group in case["groups"])
    engine = EmbeddedEngine(folder / "model", 1024, max_concurrent=count, request_timeout=600.0)
    address = WeightAddress("127.0.0.1", free_port(), 2)
    await asyncio.gather(asyncio.to_thread(worker.connect_weights, address), engine.connect_weights(address))
    seconds, tokens = [], []
    for step in range(steps):
        began = time.process_time()
        groups = await sampled(engine, case, most, step)
        train(worker, groups)
        await sync(Sender(worker), engine, step + 1)
        seconds.append(time.process_time() - began)
        tokens.append(sum(t.sampled_tokens for group in groups for t in group.trajectories))
    await engine.close()
    return {"seconds": seconds, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gradients", type=Path)
    parser.add_argument("--generate", type=int, default=0, help="most tokens of a completion; 0: the case's rows")
    parser.add_argument("--shared-prefix", action="store_true")
    args = parser.parse_args()
    case = read_case(args.folder)
    worker = start_worker(args.folder / "model", settings(args.shared_prefix))
    case["eos"] = json.loads((args.folder / "model" / "config.json").read_text())["eos_token_id"]
    if args.gradients:
        keep_gradients(worker, args.gradients)
    if args.generate:
        found = asyncio.run(whole_steps(worker, args.folder, case, args.steps, args.generate))
    else:
        seconds, groups = [], groups_of(case)
        for _ in range(args.steps):
            began = time.process_time()
            metrics = train(worker, groups)
            seconds.append(time.process_time() - began)
        found = {"seconds": seconds, "tokens": [tokens_of(case["groups"])] * args.steps, "grad_norm": metrics.grad_norm}
    dist.destroy_process_group()
    print(json.dumps({**found, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
