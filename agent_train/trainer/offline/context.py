"""The modes sft, dpo and rm: batch -> loss -> step. No environment is played and no engine runs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agent_train.config.model_folder import longest_sample
from agent_train.config.schema import Config
from agent_train.learner.actor_group import Learner
from agent_train.learner.roles import check_folder, roles_of, start_of
from agent_train.report.metrics import OFFLINE_KINDS, FileStep, HeldOut, read_metrics
from agent_train.report.tracking import Tracker
from agent_train.rollout.renderer import Renderer
from agent_train.trainer.checkpoint import Checkpoint, Progress
from agent_train.trainer.loop import TrainerContext, find_model, join_cluster, open_parts
from agent_train.trainer.offline.objectives import Objective, learn, loss_of, objective_of, with_reference
from agent_train.trainer.offline.records import DataError, form_of, read_examples
from agent_train.trainer.offline.samples import TokenizedExample, texts_of, tokenize_examples
from agent_train.trainer.run_folder import RunFolder
from agent_train.trainer.schedule import batch_of_step, rate_of_step, step_count

TOKENIZER_EXAMPLES = 1000
SPLITS = ("data.train", "data.test")


@dataclass(frozen=True, kw_only=True)
class OfflineContext(TrainerContext):
    """A run that learns from files."""

    objective: Objective
    train: list[TokenizedExample]
    test: list[TokenizedExample]

    async def take_step(self, progress: Progress) -> Progress:
        started, step, data = time.monotonic(), progress.step + 1, self.config.data
        batch = batch_of_step(self.train, data.batch_rows, self.config.trainer.seed, step)
        rate = rate_of_step(self.config, step, self.steps)
        with self.tracker.timeline.span("learn"):
            loss, measures, learned = await learn(self.learners[0], self.objective, batch, rate)
        self.tracker.file_step(
            FileStep(
                kind=OFFLINE_KINDS[self.config.mode],
                step=step,
                steps=self.steps,
                epoch=1 + (step - 1) * data.epochs // self.steps,
                loss=loss,
                measures=measures,
                tokens=learned.tokens,
                grad_norm=learned.grad_norm,
                lr=learned.lr,
                skipped=learned.skipped,
                seconds=time.monotonic() - started,
            )
        )
        return replace(progress, step=step, tokens=progress.tokens + learned.tokens)

    async def measure(self, step: int) -> None:
        """The loss of the held-out samples, if there are any."""
        if self.test:
            judged = await loss_of(self.learners[0], self.objective, self.test, self.config.data.batch_rows)
            held_out = HeldOut(step=step, loss=judged.loss, measures=judged.measures, examples=len(self.test))
            self.tracker.held_out(held_out)


@asynccontextmanager
async def open_offline(
    config: Config, folder: RunFolder, tracker: Tracker, checkpoint: Checkpoint | None = None
) -> AsyncIterator[OfflineContext]:
    """Read the files, build or find the model, start Ray and the learner, and ask the reference.

    However the block ends, the ranks are killed and Ray is shut down.
    """
    splits, model_dir = await asyncio.to_thread(_read, config, folder, tracker)
    steps = step_count(len(splits[0]), config.data.batch_rows, config.data.epochs)
    if checkpoint is not None:
        _check_steps(config, folder, steps)
    async with AsyncExitStack() as stack:
        joined = await join_cluster(config, folder, model_dir, tracker, stack)
        config = joined.config
        objective = objective_of(config, splits[0])
        if objective.needs_reference and config.reference.path:
            # Closed before the policy is loaded.
            tracker.phase("starting the reference", config.reference.path)
            reference = await Learner.start(start_of(config, "reference", ""), config, "reference")
            try:
                splits = await _ask_reference(config, reference, splits, tracker)
            finally:
                reference.close()
        tracker.phase("starting the learner")
        learner = await Learner.start(model_dir, config, roles_of(config)[0])
        learner.timeline = tracker.timeline
        stack.callback(learner.close)
        if objective.needs_reference and not config.reference.path:
            # Before the checkpoint is loaded: the reference is the policy as the run began.
            splits = await _ask_reference(config, learner, splits, tracker)
        parts = await open_parts(joined, folder, tracker, checkpoint, [learner], steps, stack)
        tracker.phase("training")
        yield OfflineContext(**parts, objective=objective, train=splits[0], test=splits[1])


def _check_steps(config: Config, folder: RunFolder, steps: int) -> None:
    """Refuse a run that goes on with other examples than it began with: it would skip some, and learn others again."""
    kind = OFFLINE_KINDS[config.mode]
    before = {record["steps"] for record in read_metrics(folder.metrics) if record["kind"] == kind} - {steps}
    if before:
        told = f"the run began with examples for {min(before)} steps, and finds some for {steps}"
        raise DataError(f"data.train={config.data.train}: {told}: give it those it began with, or start another run")


async def _ask_reference(
    config: Config, learner: Learner, splits: list[list[TokenizedExample]], tracker: Tracker
) -> list[list[TokenizedExample]]:
    both = [example for split in splits for example in split]
    total, name = sum(len(example.training_samples) for example in both), "asking the reference"
    tracker.phase(name)
    scored = await with_reference(
        learner, both, config.data.batch_rows, lambda done: tracker.phase(name, f"{done:,} of {total:,} samples")
    )
    return [scored[: len(splits[0])], scored[len(splits[0]) :]]


def _read(config: Config, folder: RunFolder, tracker: Tracker) -> tuple[list[list[TokenizedExample]], Path]:
    """The samples of both splits, and the model's folder."""
    data, form = config.data, form_of(config)
    tracker.phase("reading", str(data.train))
    paths = (str(data.train), data.test)
    both = [read_examples(path, form, data.min_reward) if path else [] for path in paths]
    model_dir = find_model(config, folder, tracker, lambda: texts_of(both[0][:TOKENIZER_EXAMPLES]))
    if config.reference.path and form in ("dpo", "kto"):
        check_folder(Path(config.reference.path).expanduser(), model_dir, "reference.path")
    renderer, longest = Renderer.of_folder(model_dir), longest_sample(config)
    splits = []
    for name, path, examples in zip(SPLITS, paths, both, strict=True):
        if examples:
            tracker.phase("tokenizing", f"{len(examples):,} examples of {path}")
        tokenized = tokenize_examples(examples, renderer, longest, mismatched=form == "kto", split=name)
        left = len(examples) - len(tokenized)
        if examples and not tokenized:
            raise DataError(f"{name}={path}: every example is longer than {longest} tokens: raise data.max_tokens")
        if left:
            told = f"{left:,} of {len(examples):,} examples are longer than {longest} tokens and left out"
            tracker.note(f"{path}: {told}")
        splits.append(tokenized)
    return splits, model_dir
