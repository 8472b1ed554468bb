"""The training loop of every mode: take a step, measure, save. `rl.py` and `offline/context.py` say what a step is."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agent_train.cluster.files import RunFiles
from agent_train.cluster.lost import side_by_side
from agent_train.cluster.placement import PlacementError, own_ray_cpus, parts_asked, parts_that_fit
from agent_train.cluster.ray_cluster import start_ray
from agent_train.config.schema import Config
from agent_train.learner.actor_group import Learner
from agent_train.learner.tiny import build_tiny
from agent_train.report.tracking import Tracker
from agent_train.trainer.checkpoint import Checkpoint, Checkpoints, Progress
from agent_train.trainer.run_folder import RunFolder


class Watched(Protocol):
    async def watch(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """The open parts of a run, and what its mode does with them."""

    config: Config
    folder: RunFolder
    files: RunFiles
    tracker: Tracker
    learners: Sequence[Learner]  # what a checkpoint holds, the trained model first
    checkpoints: Checkpoints
    steps: int  # training steps of the whole run
    resumed: Progress | None  # where the run continues; None for a new run

    async def begin(self, progress: Progress) -> None:
        """Do what comes before the first step and the first evaluation."""

    async def take_step(self, progress: Progress) -> Progress:
        raise NotImplementedError

    async def measure(self, step: int) -> None:
        """Evaluate the present weights."""
        raise NotImplementedError

    def watched(self) -> Sequence[Watched]:
        """The parts whose processes the run needs: they are watched during the steps, and an error ends the training."""
        return self.learners

    async def save(self, progress: Progress) -> None:
        await self.checkpoints.save(progress, self.learners)


async def train(context: TrainerContext) -> None:
    """Train until the last step; all measurements go to the tracker. If a part fails for good, the last checkpoint stays usable."""
    async with side_by_side() as beside:
        watches = [context.files.watch, *(each.watch for each in context.watched())]
        watching = [beside.create_task(watch()) for watch in watches]
        await _take_steps(context)
        for watch in watching:
            watch.cancel()


async def _take_steps(context: TrainerContext) -> None:
    settings, timeline = context.config.trainer, context.tracker.timeline
    progress = context.resumed or Progress(kl_coef=context.config.algorithm.kl.coef)
    with timeline.span("start"):
        await context.begin(progress)
    if context.resumed is None:
        with timeline.span("evaluation"):
            await context.measure(0)
        with timeline.span("checkpoint"):
            await context.save(progress)
    elif progress.step == context.steps and not context.tracker.measured(progress.step):
        with timeline.span("evaluation"):  # trainer.steps was lowered to a step that is done
            await context.measure(progress.step)
    while progress.step < context.steps:
        progress = await context.take_step(progress)
        step, is_last = progress.step, progress.step == context.steps
        if is_last or step % settings.eval_every == 0:
            with timeline.span("evaluation"):
                await context.measure(step)
        if is_last or step % settings.save_every == 0 or step + 1 in settings.dump:
            with timeline.span("checkpoint"):
                await context.save(progress)
    await context.checkpoints.finish()


def model_folder(config: Config, folder: RunFolder) -> Path:
    """The folder of the model that a run trains, whether it is there yet or not."""
    return Path(config.model.path).expanduser().absolute() if config.model.path else folder.path / "model"


def find_model(config: Config, folder: RunFolder, tracker: Tracker, texts: Callable[[], Sequence[str]]) -> Path:
    """The folder of `model.path`, or a tiny model built into the run folder, its tokenizer made for the texts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be drawn over the display of the run
    target = model_folder(config, folder)
    if not config.model.path and not (target / "tokenizer.json").is_file():  # written last
        tracker.phase("building the tiny model")
        build_tiny(target, texts(), config.model.tiny, config.engine.max_model_len, config.trainer.seed)
    return target


@dataclass(frozen=True)
class Joined:
    """A run in its cluster: its settings there, the vLLM servers that start first, and the way of its files."""

    config: Config
    servers: int
    files: RunFiles


async def join_cluster(
    config: Config, folder: RunFolder, model_dir: Path, tracker: Tracker, stack: AsyncExitStack
) -> Joined:
    """Start or join Ray. A run that began before goes on with as many parts as the cluster still has room for."""
    import ray

    tracker.phase("starting Ray")
    await start_ray(own_ray_cpus(config), stack)
    given = [each for each in (model_dir, folder.start) if folder.path in each.parents and each.is_dir()]
    # These may be made later; what is not there is not copied.
    given += [folder.past_weights(0).parent, folder.reference_weights(0).parent]
    files = RunFiles(folder.path, model_dir, given, tracker.note)
    await files.look()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asked, fitting = parts_asked(config), parts_that_fit(config, nodes)
    if fitting is None:
        there = ", ".join(f"{sum(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in ("CPU", "GPU"))
        raise PlacementError(
            f"the cluster has {there}, no room for a rank, a server and an environment worker: add nodes"
        )
    if fitting != asked:
        room = f"the cluster has room for {fitting.of(asked)}"
        if not folder.began_before():
            raise PlacementError(f"{room}: ask for less, or add nodes")
        tracker.note(f"{room}, and the run goes on with these")
    config = replace(config, learner=replace(config.learner, workers=fitting.ranks))
    config = replace(config, env=replace(config.env, workers=fitting.env_workers))
    if config.engine.placement == "colocated":  # a server has its place beside a rank
        config = replace(config, engine=replace(config.engine, replicas=fitting.servers))
    return Joined(config, fitting.servers, files)


async def open_parts(
    joined: Joined,
    folder: RunFolder,
    tracker: Tracker,
    checkpoint: Checkpoint | None,
    learners: Sequence[Learner],
    steps: int,
    stack: AsyncExitStack,
) -> dict[str, Any]:
    """The fields of `TrainerContext`. The state of `checkpoint`, if there is one, is loaded into the learners."""
    for learner in learners:
        learner.files = joined.files
    if checkpoint is not None:
        tracker.phase("loading the checkpoint", checkpoint.path.name)
        await asyncio.gather(*(learner.load_state(checkpoint.state(learner.name)) for learner in learners))
    trainer, timeout = joined.config.trainer, joined.config.learner.timeout
    saving = Checkpoints(folder, trainer.keep_checkpoints, timeout, tracker.note, lambda: tracker.elapsed, trainer.dump)
    return {
        "config": joined.config,
        "folder": folder,
        "files": joined.files,
        "tracker": tracker,
        "learners": learners,
        "checkpoints": await stack.enter_async_context(saving),
        "steps": steps,
        "resumed": checkpoint and checkpoint.progress,
    }
