"""The open resources of a run on files: Ray, learner, samples. Opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_train.cluster.placement import own_ray_cpus
from agent_train.cluster.ray_cluster import start_ray
from agent_train.config.schema import Config
from agent_train.learner.roles import roles_of, start_of
from agent_train.learner.tiny import build_tiny
from agent_train.learner.vocabulary import check_folder
from agent_train.report.tracking import Tracker
from agent_train.trainer.checkpoint import Checkpoint, Checkpoints
from agent_train.trainer.offline.objectives import Objective, objective_of, with_reference
from agent_train.trainer.offline.records import DataError, Example, form_of, read_examples
from agent_train.trainer.offline.samples import TokenizedExample, texts_of, tokenize_examples
from agent_train.trainer.offline.validation import longest_row
from agent_train.trainer.progress import Progress
from agent_train.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from agent_train.learner.actor_group import Learner

TOKENIZER_EXAMPLES = 1000


@dataclass(frozen=True)
class FileJob:
    """The open parts of a run. `open_file_job` makes one and closes everything in it."""

    learner: Learner
    objective: Objective
    train: list[TokenizedExample]
    test: list[TokenizedExample]
    checkpoints: Checkpoints
    resumed: Progress | None = None

    async def save(self, progress: Progress) -> None:
        """Begin to keep the state after a step as a checkpoint."""
        await self.checkpoints.save(progress, {self.learner.role: self.learner})


@asynccontextmanager
async def open_file_job(
    config: Config, folder: RunFolder, tracker: Tracker, checkpoint: Checkpoint | None = None
) -> AsyncIterator[FileJob]:
    """Read the files, build or find the model, start Ray and the learner, and ask the reference.

    On leaving, by whatever way, the ranks are killed and Ray is shut down.

    Args:
        config: of the run.
        folder: of the run.
        tracker: is told what is going on.
        checkpoint: what the run goes on from; None for one that begins.

    Raises:
        DataError: a file cannot be trained on.
        LearnerError, RendererError: a part did not start.
    """
    train, test, model_dir = await asyncio.to_thread(_read, config, folder, tracker)
    async with AsyncExitStack() as stack:
        tracker.phase("starting Ray")
        await start_ray(own_ray_cpus(config), stack)
        objective = objective_of(config, train)
        if objective.needs_reference and config.reference.path:
            train, test = await _ask_other_reference(config, train, test, tracker)
        tracker.phase("starting the learner")
        learner = await _learner(config, model_dir, stack)
        if objective.needs_reference and not config.reference.path:
            train, test = await _ask_reference(config, learner, train, test, tracker)
        if checkpoint is not None:
            # After the reference was asked, which is the policy as the run began.
            tracker.phase("loading the checkpoint", checkpoint.path.name)
            await learner.load_state(checkpoint.state(learner.role))
        keep, timeout = config.trainer.keep_checkpoints, config.learner.timeout
        checkpoints = Checkpoints(folder, keep, timeout, tracker.note, lambda: tracker.elapsed)
        await stack.enter_async_context(checkpoints)
        tracker.phase("training")
        yield FileJob(learner, objective, train, test, checkpoints, checkpoint.progress if checkpoint else None)


async def _learner(config: Config, model_dir: Path, stack: AsyncExitStack) -> Learner:
    from agent_train.learner.actor_group import Learner

    (role,) = roles_of(config)
    learner = await Learner.start(model_dir, config, role)
    stack.callback(learner.close)
    return learner


Examples = list[TokenizedExample]


async def _ask_other_reference(
    config: Config, train: Examples, test: Examples, tracker: Tracker
) -> tuple[Examples, Examples]:
    """Load `reference.path`, have it score the examples, and close it before the policy is loaded."""
    from agent_train.learner.actor_group import Learner

    tracker.phase("starting the reference", str(config.reference.path))
    reference = await Learner.start(start_of(config, "reference", ""), config, "reference")
    try:
        return await _ask_reference(config, reference, train, test, tracker)
    finally:
        reference.close()


async def _ask_reference(
    config: Config, learner: Learner, train: Examples, test: Examples, tracker: Tracker
) -> tuple[Examples, Examples]:
    both = [*train, *test]
    total = sum(len(example.training_samples) for example in both)
    tracker.phase("asking the reference")
    scored = await with_reference(
        learner,
        both,
        config.data.batch_rows,
        lambda done: tracker.phase("asking the reference", f"{done:,} of {total:,} samples"),
    )
    return scored[: len(train)], scored[len(train) :]


def _read(config: Config, folder: RunFolder, tracker: Tracker) -> tuple[Examples, Examples, Path]:
    """The samples to train on and those held out, and the model's folder."""
    from transformers.utils.logging import disable_progress_bar

    from agent_train.rollout.renderer import Renderer

    disable_progress_bar()
    data, form = config.data, form_of(config)
    tracker.phase("reading", str(data.train))
    examples = read_examples(str(data.train), form, data.min_reward)
    held_out = read_examples(data.test, form, data.min_reward) if data.test else []
    model_dir = _model(config, folder, examples, tracker)
    if config.reference.path and form in ("dpo", "kto"):
        check_folder(Path(config.reference.path).expanduser(), model_dir, "reference.path")
    renderer = Renderer.of_folder(model_dir)
    longest = longest_row(config)
    found = []
    for name, path, read in (("data.train", data.train, examples), ("data.test", data.test, held_out)):
        if read:
            tracker.phase("writing rows", f"{len(read):,} examples of {path}")
        samples = tokenize_examples(read, renderer, longest, mismatched=form == "kto", split=name)
        left = len(read) - len(samples)
        if read and not samples:
            raise DataError(f"{name}={path}: every example is longer than {longest} tokens: raise data.max_tokens")
        if left:
            tracker.note(
                f"{path}: {left:,} of {len(read):,} examples are longer than {longest} tokens and are left out"
            )
        found.append(samples)
    return found[0], found[1], model_dir


def _model(config: Config, folder: RunFolder, examples: list[Example], tracker: Tracker) -> Path:
    """The folder of `model.path`, or a tiny model built into the run folder, its tokenizer made for the training file."""
    if config.model.path:
        return Path(config.model.path).expanduser().absolute()
    target = folder.path / "model"
    if not (target / "config.json").is_file():
        tracker.phase("building the tiny model")
        texts = texts_of(examples[:TOKENIZER_EXAMPLES])
        build_tiny(target, texts, config.model.tiny, config.engine.max_model_len, config.trainer.seed)
    return target
