"""Rollouts of a small embedded model with a journal of their turns."""

import asyncio
import json
from pathlib import Path

from agent_train.config.schema import EngineConfig, TinyConfig
from agent_train.engine.base import Completion, Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.rollout.journal import Journal
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agentgym.core.registration import spec
from agentgym_envs.games.frozen_lake import FrozenLake

SAMPLING = Sampling(max_tokens=6, temperature=0.8)


def build(folder: Path, context: int = 512) -> Path:
    texts = texts_of_env("frozen_lake", n=16)
    build_tiny(folder, texts, TinyConfig(hidden=64, layers=2, heads=2, intermediate=96), context, seed=0)
    return folder


def refuse(line: str) -> None:
    raise AssertionError(line)


async def collect(
    folder,
    path,
    make_env=FrozenLake,
    tasks=None,
    *,
    sampling=SAMPLING,
    context=512,
    memory=None,
    before=None,
    play=None,
    **kept,
):
    """Play two tasks, three episodes each, with the journal `path`: the groups, the journal, and how often the engine answered.

    `before` is awaited before each answer; `kept` are the weights that the journal knows. `play` plays otherwise, by the sampler, the
    tasks and the journal.
    """
    answered: list[Completion] = []

    class Counted(EmbeddedEngine):
        async def generate(self, *given):
            if before is not None:
                await before()
            answered.append(await super().generate(*given))
            return answered[-1]

    config = EngineConfig("embedded", max_model_len=context, request_timeout=60)
    engine = await Counted.start(config, folder, folder, dtype="float32", deterministic=True)
    with Journal(path, refuse, **kept) as journal:
        renderer = Renderer.of_folder(folder)
        sampler = Sampler(make_env, engine, renderer, sampling, group_size=3, seed=11, memory=memory)
        problems = tasks or list(spec("frozen_lake").tasks("train").take(2))
        playing = sampler.collect(problems, 0, journal=journal) if play is None else play(sampler, problems, journal)
        groups = await asyncio.wait_for(playing, 120)
        assert engine.live_sessions == 0
    await engine.close()
    return groups, journal, len(answered)


def rollout(*given, **more):
    return asyncio.run(collect(*given, **more))


def exactly(groups):
    """All that the episodes said, were told and earned, to the last bit."""
    return [
        [t.id, t.seed, t.end, t.error, t.messages()]
        + [[getattr(each, "reward", None), vars(each.tokens)] for each in t.calls()]
        for t in episodes_of(groups)
    ]


def episodes_of(groups):
    return [t for group in groups for t in group.trajectories]


def failures(groups) -> list[int]:
    """How often each episode failed before its last try."""
    return [len(t.metadata.get("errors", ())) for t in episodes_of(groups)]


def count_calls(groups) -> int:
    return sum(len(t.calls()) for t in episodes_of(groups))


def lines_of(path):
    """What a journal's lines hold, without times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [[{name: value for name, value in turn.items() if name != "schedule"} for turn in line] for line in lines]
