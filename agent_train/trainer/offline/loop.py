"""The loop of the modes sft, dpo and rm: batch -> loss -> step. No environment is played and no engine runs."""

from __future__ import annotations

import time

from agent_train.config.schema import Config
from agent_train.report.tracking import Tracker
from agent_train.trainer.offline.context import FileJob
from agent_train.trainer.offline.metrics import KINDS, FileStep, HeldOut
from agent_train.trainer.offline.objectives import learn, loss_of
from agent_train.trainer.offline.schedule import batch_of_step, learning_rate, step_count
from agent_train.trainer.progress import Progress


async def train_on_files(config: Config, job: FileJob, tracker: Tracker) -> None:
    """Train the model of `job` on its samples; everything that is measured goes to `tracker`.

    Args:
        config: of the run.
        job: its open parts.
        tracker: takes the measurements.

    Raises:
        LearnerError: a rank failed; the last checkpoint stays usable.
        CheckpointError: the last checkpoint could not be written.
    """
    trainer = config.trainer
    progress = job.resumed or Progress()
    steps = step_count(len(job.train), config.data.batch_rows, config.data.epochs)
    if job.resumed is None:
        await measure(config, job, tracker, 0)
        await job.save(progress)
    for step in range(progress.step + 1, steps + 1):
        started = time.monotonic()
        batch = batch_of_step(job.train, config.data.batch_rows, trainer.seed, step)
        learned = await learn(job.learner, job.objective, batch, learning_rate(config, step, steps))
        tracker.file_step(
            FileStep(
                kind=KINDS[config.mode],
                step=step,
                steps=steps,
                epoch=1 + (step - 1) * config.data.epochs // steps,
                seconds=time.monotonic() - started,
                **vars(learned),
            )
        )
        progress = Progress(step=step, tokens=progress.tokens + learned.tokens)
        if step % trainer.eval_every == 0 or step == steps:
            await measure(config, job, tracker, step)
        if step % trainer.save_every == 0 or step == steps:
            await job.save(progress)
    await job.checkpoints.finish()


async def measure(config: Config, job: FileJob, tracker: Tracker, step: int) -> None:
    """The loss of the held-out samples with the present weights; nothing where there are none."""
    if job.test:
        judged = await loss_of(job.learner, job.objective, job.test, config.data.batch_rows)
        tracker.held_out(HeldOut(step, judged.loss, judged.measures, len(job.test)))
