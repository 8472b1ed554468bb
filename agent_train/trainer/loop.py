"""The training loop of every mode: take a step, measure, save. `rl.py` and `offline/context.py` say what a step is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_train.config.schema import Config
from agent_train.learner.actor_group import Learner
from agent_train.learner.tiny import build_tiny
from agent_train.report.tracking import Tracker
from agent_train.trainer.checkpoint import Checkpoint, Checkpoints, Progress
from agent_train.trainer.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """The open parts of a run, and what its mode does with them."""

    config: Config
    folder: RunFolder
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

    async def save(self, progress: Progress) -> None:
        await self.checkpoints.save(progress, {learner.role: learner for learner in self.learners})


async def train(context: TrainerContext) -> None:
    """Train until the last step; all measurements go to the tracker. If a part fails for good, the last checkpoint stays usable."""
    settings = context.config.trainer
    progress = context.resumed or Progress(kl_coef=context.config.algorithm.kl.coef)
    await context.begin(progress)
    if context.resumed is None:
        await context.measure(0)
        await context.save(progress)
    while progress.step < context.steps:
        progress = await context.take_step(progress)
        step, is_last = progress.step, progress.step == context.steps
        if is_last or step % settings.eval_every == 0:
            await context.measure(step)
        if is_last or step % settings.save_every == 0:
            await context.save(progress)
    await context.checkpoints.finish()


def find_model(config: Config, folder: RunFolder, tracker: Tracker, texts: Callable[[], Sequence[str]]) -> Path:
    """The folder of `model.path`, or a tiny model built into the run folder, its tokenizer made for the texts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be drawn over the display of the run
    if config.model.path:
        return Path(config.model.path).expanduser().absolute()
    target = folder.path / "model"
    if not (target / "tokenizer.json").is_file():  # written last
        tracker.phase("building the tiny model")
        build_tiny(target, texts(), config.model.tiny, config.engine.max_model_len, config.trainer.seed)
    return target


@asynccontextmanager
async def open_parts(
    config: Config,
    folder: RunFolder,
    tracker: Tracker,
    checkpoint: Checkpoint | None,
    learners: Sequence[Learner],
    steps: int,
) -> AsyncIterator[dict[str, Any]]:
    """The fields of `TrainerContext`. The state of `checkpoint`, if there is one, is loaded into the learners."""
    if checkpoint is not None:
        tracker.phase("loading the checkpoint", checkpoint.path.name)
        await asyncio.gather(*(learner.load_state(checkpoint.state(learner.role)) for learner in learners))
    keep, timeout = config.trainer.keep_checkpoints, config.learner.timeout
    async with Checkpoints(folder, keep, timeout, tracker.note, lambda: tracker.elapsed) as checkpoints:
        parts = {"config": config, "folder": folder, "tracker": tracker, "checkpoints": checkpoints}
        yield parts | {"learners": learners, "steps": steps, "resumed": checkpoint and checkpoint.progress}
