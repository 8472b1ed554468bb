"""What rollouts ahead of training gain at each bound of staleness, against turns, and whether what is trained is what was sampled.

The loop, the sampler and its places are the real ones. The simulated engine takes an answer's length in seconds, in one of its
places; with --engine vllm a real vLLM server samples that many tokens of a tiny model and loads its weights at every step. An
update is simulated: it takes as long as a rollout would if no place ever idled. Answers have log-normal lengths (sigma 1), longer
ones for difficult tasks, so in turns the longest of a step holds up all.

The limit is the time of the slower side alone. No bound reaches it: a step waits for its longest episode, which begins when the
bound lets it. The ceiling is what is left: the time of the same episodes under the same bound, if nothing but engine and updates
took time. Lengths and difficulties that were trained on are compared with fresh draws (Kolmogorov-Smirnov, of whole groups, which
are independent): nothing that takes long may be left out. `curves.py` has the reward after equal samples.

python benchmarks/asynchrony.py [--engine simulated|vllm] [--out FILE.json] [--steps N] [--groups N] [--staleness 0,1,2,4,8]
"""

import argparse
import asyncio
import heapq
import itertools
import math
import random
import sys
import tempfile
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

from conversation import Conversation, Talk
from found import write

from agent_train.config.schema import Config
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.engine.vllm import VllmEngine
from agent_train.learner.actor_group import Learner
from agent_train.learner.tiny import build_tiny
from agent_train.rollout.ahead import Rollouts
from agent_train.rollout.draws import pick_tasks
from agent_train.rollout.renderer import Rendered
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.schedule import derive_seed
from agent_train.weights.sync import sync
from agentgym import Task, TaskSet
from agentgym.core.messages import user
from agentgym.core.trajectory import Group

GROUP, PLACES, TURNS = 8, 64, 2
TOKEN_SECONDS, MEAN_TOKENS = 0.01, 24  # of the simulated engine, and of an answer
SIGMA, OF_TASK = 1.0, 0.6  # of the logarithm of a length, and the part of it that is the task's
TASKS = 200  # the first token of an episode is its task's number
SEED = 0
GOAL = 0.9
PACE_SECONDS = 5.0  # for which vLLM is measured with so many requests at a time, before each run:
PACES = (1, PLACES // 4, PLACES)
CONTEXT = 4096
FRESH = 4  # groups drawn afresh for each that was trained on


def difficulty(task: int) -> float:
    """What the task adds to the logarithm of a length; of all tasks together it is normal."""
    return OF_TASK * NormalDist().inv_cdf((task - 0.5) / TASKS)


def length(seed: int, task: int) -> int:
    """Tokens of an answer."""
    own = random.Random(seed).gauss(difficulty(task) - SIGMA**2 / 2, math.sqrt(SIGMA**2 - OF_TASK**2))
    return max(1, round(MEAN_TOKENS * math.exp(own)))


class Numbered(Conversation):
    """The first id of a prompt is the number of its task."""

    def prompt(self, messages, tools, previous):
        return super().prompt(messages, tools, previous) if previous else Rendered([int(messages[0]["content"])], "")


class Simulated(Engine):
    """A token takes as long however many requests there are."""

    max_model_len = 1 << 30
    paces = ((1, TOKEN_SECONDS),)

    async def measure_paces(self) -> None:
        """They are known."""

    async def generate(self, prompt_ids, sampling, episode=None):
        tokens, begun = length(sampling.seed, prompt_ids[0]), self.version
        await asyncio.sleep(tokens * TOKEN_SECONDS)
        return Completion([0] * tokens, [0.0] * tokens, [begun] * tokens, "stop")

    async def load(self, version: int) -> None:
        self.version = version


class Served(Engine):
    """A vLLM server and the learner that sends it weights. An answer's length is drawn, not asked for."""

    max_model_len = CONTEXT

    def __init__(self, engine: VllmEngine, learner: Learner):
        self.engine, self.learner, self.paces = engine, learner, ()

    async def generate(self, prompt_ids, sampling, episode=None):
        tokens = length(sampling.seed, prompt_ids[0])
        return await self.engine.generate(prompt_ids, replace(sampling, max_tokens=tokens, stop_token_ids=()), episode)

    async def load(self, version: int) -> None:
        await sync(self.learner, self.engine, version)
        self.version = version

    async def measure_paces(self) -> None:
        """Seconds of a token, with so many requests at a time."""
        found = []
        for places in PACES:
            end, tokens = time.perf_counter() + PACE_SECONDS, 0

            async def ask(place: int, end: float = end) -> None:
                nonlocal tokens
                for number in itertools.count():
                    answer = await self.generate([TASKS // 2], Sampling(8, seed=derive_seed(SEED, place, number)))
                    if time.perf_counter() > end:
                        return
                    tokens += len(answer.ids)

            await asyncio.gather(*map(ask, range(places)))
            found.append((places, places * PACE_SECONDS / tokens))
        self.paces = tuple(found)


def pace(paces: Sequence[tuple[int, float]], running: int) -> float:
    """Seconds of a token with so many requests at a time, between those that were measured."""
    above = next((place for place, (count, _) in enumerate(paces) if count >= running), len(paces) - 1)
    (few, fast), (many, slow) = paces[max(0, above - 1)], paces[above]
    return slow if many == few else fast + (slow - fast) * (min(running, many) - few) / (many - few)


def best(steps: Sequence[Sequence[int]], staleness: int, learning: float, paces: Sequence[tuple[int, float]]) -> float:
    """Wall seconds of steps whose episodes have so many tokens, if nothing takes time but these and the updates.

    A step's episodes may begin with the version `staleness` before theirs, and take places in their order.
    """
    waiting = deque((step, tokens) for step, own in enumerate(steps) for tokens in own)
    left = [len(own) for own in steps]
    running: list[tuple[float, int]] = []  # at which `said` each ends, and its step
    now, said, version, learnt = 0.0, 0.0, 0, math.inf  # said: tokens so far of a request that runs all the time
    while version < len(steps):
        while waiting and len(running) < PLACES and waiting[0][0] <= version + staleness:
            step, tokens = waiting.popleft()
            heapq.heappush(running, (said + tokens, step))
        if learnt == math.inf and not left[version]:
            learnt = now + learning
        seconds = pace(paces, len(running))
        ends = now + (running[0][0] - said) * seconds if running else math.inf
        said += (min(ends, learnt) - now) / seconds
        now = min(ends, learnt)
        if learnt <= ends:
            version, learnt = version + 1, math.inf
        else:
            said, step = heapq.heappop(running)
            left[step] -= 1
    return now


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
            yield Served(engine, learner)
        finally:
            learner.close()
            await engine.close()
            ray.shutdown()


async def train(engine: Simulated | Served, staleness: int, steps: int, groups: int) -> dict[str, float]:
    """Wall seconds of so many steps, limit and ceiling, and how far what was trained on is from fresh draws."""
    await engine.load(0)
    await engine.measure_paces()
    sampler = Sampler(
        partial(Talk, TURNS), engine, Numbered(), Sampling(8), group_size=GROUP, seed=SEED, concurrency=PLACES
    )
    tasks = TaskSet([Task(f"{n}", (user(f"{n}"),)) for n in range(1, TASKS + 1)])
    token = pace(engine.paces, PLACES) / PLACES  # seconds, when every place is in use
    learning = groups * GROUP * TURNS * MEAN_TOKENS * token

    def play(step: int):
        return sampler.collect([tasks[n] for n in pick_tasks(TASKS, step * groups, groups, SEED)], step)

    rollouts = Rollouts(play, staleness, steps)
    trained, lags, begun = [], [], time.perf_counter()
    for step in range(steps):
        trained.append(await rollouts.take(step))
        played = [t for group in trained[-1] for t in group.trajectories]
        assert not any(t.failed for t in played), played[0].error
        lags += [step - version for t in played for turn in t.turns for version in turn.tokens.versions]
        await asyncio.sleep(learning)
        await engine.load(step + 1)
        if staleness:
            rollouts.begin(step + 1)
    wall = time.perf_counter() - begun
    await rollouts.close()
    assert max(lags) <= staleness
    tokens = [[t.sampled_tokens for group in own for t in group.trajectories] for own in trained]
    return {
        "staleness": staleness,
        "step_seconds": wall / steps,
        "limit_seconds": max(learning, sum(map(sum, tokens)) * token / steps),
        "ceiling_seconds": best(tokens, staleness, learning, engine.paces) / steps,
        "mean_lag": sum(lags) / len(lags),
        **compared([group for own in trained for group in own]),
    }


def compared(groups: Sequence[Group]) -> dict[str, float]:
    """The chance that the mean lengths of these groups and the difficulties of their tasks are draws like any others."""
    rng = random.Random("fresh")
    fresh = [rng.randrange(1, TASKS + 1) for _ in range(FRESH * len(groups))]
    sampled = [sum(length(rng.getrandbits(48), task) for _ in range(GROUP * TURNS)) for task in fresh]
    lengths = [sum(t.sampled_tokens for t in group.trajectories) for group in groups]
    difficulties = [difficulty(int(group.task_id)) for group in groups]
    return {
        "ks_p_lengths": kolmogorov_smirnov(lengths, sampled),
        "ks_p_difficulties": kolmogorov_smirnov(difficulties, list(map(difficulty, fresh))),
    }


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> float:
    """The chance of a distance of the two distribution functions of at least this one, if they are equal (asymptotic)."""
    one, other = sorted(one), sorted(other)
    at = (abs(bisect_right(one, x) / len(one) - bisect_right(other, x) / len(other)) for x in {*one, *other})
    scaled = max(at) * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, tail)) if scaled > 0.1 else 1.0


def show(rows: list[dict[str, float]]) -> None:
    turns = rows[0]["step_seconds"]
    out = [
        "| staleness | s/step | speed-up | of the ceiling | ceiling | limit | mean lag | KS p of lengths, difficulties |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gained, most, limit = (turns / row[f"{name}_seconds"] for name in ("step", "ceiling", "limit"))
        out.append(
            f"| {row['staleness']} | {row['step_seconds']:.3f} | {gained:.2f} | {gained / most:.0%} | {most:.2f} |"
            f" {limit:.2f} | {row['mean_lag']:.2f} | {row['ks_p_lengths']:.2f}, {row['ks_p_difficulties']:.2f} |"
        )
    least = min(row["ceiling_seconds"] / row["step_seconds"] for row in rows[1:] or rows)
    out.append(f"least share of a ceiling: {least:.0%}, goal {GOAL:.0%}: {'met' if least >= GOAL else 'MISSED'}")
    sys.stdout.write("\n".join(out) + "\n")


ENGINES = {"simulated": simulated, "vllm": served}


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    async with ENGINES[args.engine]() as engine:
        return [await train(engine, int(each), args.steps, args.groups) for each in args.staleness.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="simulated")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=16, help=f"tasks of a step, each played {GROUP} times")
    parser.add_argument("--staleness", default="0,1,2,4,8")
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    show(rows)
    write(args.out, engine=args.engine, rows=rows)


if __name__ == "__main__":
    main()
