"""What rollouts ahead of training gain: seconds per step at each bound of staleness, against turns and against the ceiling.

The loop, the sampler and its places are the real ones. The simulated engine takes an answer's length in seconds, in one of its
places; with --engine vllm a real vLLM server samples that many tokens of a tiny model and loads its weights at every step. An
update is simulated: it takes as long as a rollout would if no place ever idled. Answers have log-normal lengths (sigma 1), so in
turns the longest of a step holds up all. The ceiling is the time of the slower side alone. Then lengths that were trained on are
compared with fresh draws (Kolmogorov-Smirnov): nothing that takes long may be left out.

python benchmarks/asynchrony.py [--engine simulated|vllm] [--out FILE.json] [--steps N] [--groups N] [--staleness 0,1,2,4,8]
"""

import argparse
import asyncio
import itertools
import json
import math
import platform
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from conversation import Conversation, Talk

from agent_train.config.schema import Config
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.engine.vllm import VllmEngine
from agent_train.learner.actor_group import Learner
from agent_train.learner.tiny import build_tiny
from agent_train.rollout.ahead import Rollouts
from agent_train.rollout.draws import pick_tasks
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.schedule import derive_seed
from agent_train.weights.sync import sync
from agentgym import Task, TaskSet
from agentgym.core.messages import user

GROUP, PLACES, TURNS = 8, 64, 2
MEAN_SECONDS, MEAN_TOKENS = 0.06, 24  # of an answer, simulated and of vLLM
SIGMA = 1.0
SEED = 0
GOAL = 0.9
FULL_SECONDS = 15.0  # for which the rate of vLLM is measured
CONTEXT = 4096


def length(rng: random.Random) -> float:
    """Of an answer, in means."""
    return rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)


class Simulated(Engine):
    """An answer of n tokens takes n times as long as one of one token, however many are asked for at a time."""

    max_model_len = 1 << 30
    rate = PLACES / MEAN_SECONDS  # mean answers a second when every place is in use

    async def generate(self, prompt_ids, sampling, episode=None):
        await asyncio.sleep(MEAN_SECONDS * length(random.Random(sampling.seed)))
        return Completion([0], [0.0], [self.version], "stop")

    async def load(self, version: int) -> None:
        self.version = version


class Served(Engine):
    """A vLLM server and the learner that sends it weights. An answer's length is drawn, not asked for."""

    max_model_len = CONTEXT

    def __init__(self, engine: VllmEngine, learner: Learner):
        self.engine, self.learner, self.rate = engine, learner, math.nan

    async def generate(self, prompt_ids, sampling, episode=None):
        tokens = max(1, round(MEAN_TOKENS * length(random.Random(sampling.seed))))
        return await self.engine.generate(prompt_ids, replace(sampling, max_tokens=tokens, stop_token_ids=()), episode)

    async def load(self, version: int) -> None:
        await sync(self.learner, self.engine, version)
        self.version = version

    async def measure_rate(self) -> None:
        """Keep every place in use for a while, and count tokens once all have begun."""
        begun = time.perf_counter()
        tokens = 0

        async def ask(place: int) -> None:
            nonlocal tokens
            for number in itertools.count():
                seed = derive_seed(SEED, place, number)
                answer = await self.generate([1], Sampling(8, seed=seed))
                if time.perf_counter() > begun + FULL_SECONDS:
                    return
                if time.perf_counter() > begun + FULL_SECONDS / 3:
                    tokens += len(answer.ids)

        await asyncio.gather(*map(ask, range(PLACES)))
        self.rate = tokens / MEAN_TOKENS / (FULL_SECONDS * 2 / 3)


@asynccontextmanager
async def simulated() -> AsyncIterator[Simulated]:
    yield Simulated()


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    import ray

    config = Config()
    config.learner.workers, config.engine.max_model_len, config.engine.max_concurrent = 1, CONTEXT, PLACES
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(folder, ["begin", "go on"], config.model.tiny, CONTEXT, SEED)
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
        engine = await VllmEngine.start(config.engine, folder, folder, dtype="float32")
        learner = await Learner.start(folder, config)
        try:
            both = Served(engine, learner)
            await both.measure_rate()
            yield both
        finally:
            learner.close()
            await engine.close()
            ray.shutdown()


async def train(engine: Simulated | Served, staleness: int, steps: int, groups: int) -> dict[str, float]:
    """Wall seconds of so many steps, the ceiling, and how far the lengths that were trained on are from fresh ones."""
    await engine.load(0)
    sampler = Sampler(
        partial(Talk, TURNS), engine, Conversation(), Sampling(8), group_size=GROUP, seed=SEED, concurrency=PLACES
    )
    tasks = TaskSet([Task(f"t{n}", (user("begin"),)) for n in range(groups)])
    learning = groups * GROUP * TURNS / engine.rate

    def play(step: int):
        return sampler.collect([tasks[n] for n in pick_tasks(groups, step * groups, groups, SEED)], step)

    rollouts = Rollouts(play, staleness, steps)
    trained, lags, begun = [], [], time.perf_counter()
    for step in range(steps):
        played = [t for group in await rollouts.take(step) for t in group.trajectories]
        assert not any(t.failed for t in played), played[0].error
        lags += [step - version for t in played for turn in t.turns for version in turn.tokens.versions]
        trained += [length(random.Random(derive_seed(t.seed, "turn", n))) for t in played for n in range(len(t.turns))]
        await asyncio.sleep(learning)
        await engine.load(step + 1)
        if staleness:
            rollouts.begin(step + 1)
    wall = time.perf_counter() - begun
    await rollouts.close()
    assert max(lags) <= staleness
    distance, chance = kolmogorov_smirnov(trained, [length(random.Random(f"fresh {n}")) for n in range(len(trained))])
    own = max(learning, sum(trained) / steps / engine.rate)  # seconds of a step of the slower side, every place in use
    return {
        "staleness": staleness,
        "step_seconds": wall / steps,
        "ceiling_seconds": own,
        "mean_lag": sum(lags) / len(lags),
        "ks_distance": distance,
        "ks_p": chance,
    }


def kolmogorov_smirnov(one: list[float], other: list[float]) -> tuple[float, float]:
    """The largest distance of the two distribution functions, and the chance of it or more for equal ones (asymptotic)."""
    one, other, i, j, distance = sorted(one), sorted(other), 0, 0, 0.0
    while i < len(one) and j < len(other):
        if one[i] <= other[j]:
            i += 1
        else:
            j += 1
        distance = max(distance, abs(i / len(one) - j / len(other)))
    scaled = distance * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, tail))


def show(rows: list[dict[str, float]]) -> None:
    turns = rows[0]["step_seconds"]
    out = [
        "| staleness | s/step | speed-up | ceiling | share of it | mean lag | KS p of lengths |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gained, most = turns / row["step_seconds"], turns / row["ceiling_seconds"]
        out.append(
            f"| {row['staleness']} | {row['step_seconds']:.3f} | {gained:.2f} | {most:.2f} | {gained / most:.0%} |"
            f" {row['mean_lag']:.2f} | {row['ks_p']:.2f} |"
        )
    best = max(row["ceiling_seconds"] / row["step_seconds"] for row in rows[1:] or rows)
    out.append(f"best share of the ceiling: {best:.0%}, goal {GOAL:.0%}: {'met' if best >= GOAL else 'MISSED'}")
    sys.stdout.write("\n".join(out) + "\n")


ENGINES = {"simulated": simulated, "vllm": served}


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    async with ENGINES[args.engine]() as engine:
        return [await train(engine, int(each), args.steps, args.groups) for each in args.staleness.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="simulated")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16, help=f"tasks of a step, each played {GROUP} times")
    parser.add_argument("--staleness", default="0,1,2,4,8")
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    show(rows)
    if args.out:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "engine": args.engine}
        args.out.write_text(json.dumps({"rows": rows, **machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
