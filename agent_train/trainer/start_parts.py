"""Starts what a run samples and learns with: its models, and the engines of its policies and of players of the past."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent_train.cluster.lost import side_by_side
from agent_train.cluster.placement import gpu_share
from agent_train.config.extensions import engines
from agent_train.config.schema import EngineConfig
from agent_train.engine.base import Engine
from agent_train.learner.actor_group import shared_devices
from agent_train.learner.role_start import Models, start_models
from agent_train.learner.roles import own_players, sends_adapters
from agent_train.report.tracking import Tracker
from agent_train.rollout.past import Past, past_players
from agent_train.trainer.loop import Joined
from agent_train.trainer.policies import LearningPolicy, learning_policies
from agent_train.trainer.run_folder import RunFolder

CLOSE_SECONDS = 5.0


async def start_parts(
    joined: Joined, folder: RunFolder, model_dir: Path, tracker: Tracker, stack: AsyncExitStack
) -> tuple[list[LearningPolicy], Models, Past | None]:
    """Start engines and learner side by side; whichever has started is closed with the stack even if another fails.

    A colocated engine starts first and gives its memory back, since both want the same. One with half of the only GPU starts
    first, too.
    """
    config = joined.config

    async def open_engine(settings: EngineConfig = config.engine, logs: Path = folder.logs, **own: Any) -> Engine:
        engine: Engine = await engines.load(settings.name)(
            settings,
            model_dir,
            logs,
            dtype=config.model.dtype,
            seed=config.trainer.seed,
            deterministic=config.trainer.deterministic,
            on_progress=lambda line, seconds: tracker.phase(
                "starting the engine", f"{seconds:.0f} s{line and f': {line}'}"
            ),
            **own,
        )
        stack.push_async_callback(_close_in_time, engine)
        return engine

    rank = config.lora.rank if sends_adapters(config) else 0
    given: dict[str, Any] = {"adapter_rank": rank, "timeline": tracker.timeline}
    begin = folder.start if folder.start.is_dir() else model_dir
    if config.engine.placement == "colocated":
        bundles = await shared_devices(config)
        alone = await open_engine(bundles=bundles, **given)
        await alone.sleep()
        models = await start_models(config, model_dir, begin, stack, tracker.timeline, bundles)
        return learning_policies(config, folder, models, alone, {}), models, None
    earlier: asyncio.Task[Engine] | None = None
    beside = replace(config.engine, port=0, adaptive=False)
    tracker.phase("starting engine and learner")
    async with side_by_side() as parts:
        few: dict[str, Any] = {"first": joined.servers} if joined.servers < config.engine.replicas else {}
        engine = parts.create_task(open_engine(**few, **given))
        own: dict[str, asyncio.Task[Engine]] = {}
        for player in own_players(config):
            opening = open_engine(beside, folder.logs / "players" / player, adapter_rank=rank, **few)
            own[player] = parts.create_task(opening)
        models_of = partial(start_models, config, model_dir, begin, stack, tracker.timeline)
        starting = parts.create_task(_after(engine, config.engine, models_of))
        if past_players(config):
            of_past = replace(beside, replicas=1, weights="disk")
            earlier = parts.create_task(open_engine(of_past, folder.logs / "past"))
        others = [*own.values(), *([earlier] if earlier else [])]
        await asyncio.wait([engine, *others])
        if not starting.done():
            tracker.phase("starting the learner")
    for other in others:
        other.result().play_beside(engine.result())
    models = starting.result()
    playing = {player: task.result() for player, task in own.items()}
    policies = learning_policies(config, folder, models, engine.result(), playing)
    return policies, models, Past(config, folder, earlier.result()) if earlier else None


async def _after(
    engine: asyncio.Task[Engine], settings: EngineConfig, start: Callable[[], Awaitable[Models]]
) -> Models:
    """Start the learner; once the engine has started or failed, if they share a GPU."""
    if shares_gpu(settings):
        await asyncio.wait([engine])
    return await start()


def shares_gpu(engine: EngineConfig) -> bool:
    """True if a rank and a vLLM server have half each of the cluster's only GPU.

    What the rank allocates as vLLM measures the memory that it has, vLLM would take for its own.
    """
    if engine.name != "vllm" or engine.placement != "own":
        return False
    import ray

    return 0 < gpu_share(int(ray.cluster_resources().get("GPU", 0)), engine.name, engine.placement) < 1


async def _close_in_time(engine: Engine) -> None:
    """Close the engine, but not for longer than a stop may take: Ray's end takes its processes too."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.close(), CLOSE_SECONDS)
