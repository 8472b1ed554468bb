"""The training loop: play -> choose -> score -> advantages -> learn -> sync. It is the only one, and reads top to bottom."""

from __future__ import annotations

from agent_train.algorithms.selection import choose
from agent_train.config.schema import Config
from agent_train.report.tracking import Clock, Tracker
from agent_train.trainer.context import TrainerContext
from agent_train.trainer.progress import Progress
from agent_train.trainer.step import after, give_advantages, judge, learn, nothing_played, play, score, training_rows
from agentgym.core.trajectory import Trajectory, write_jsonl


async def train(config: Config, job: TrainerContext, tracker: Tracker) -> None:
    """Train the policy of `job`; everything that is measured goes to `tracker`.

    Raises:
        EngineError, LearnerError, WeightSyncError: a part failed for good; the last checkpoint stays usable.
        NothingPlayed: every episode of a step or of an evaluation failed.
        AdvantageError: the advantage cannot be made of the environment's rewards.
    """
    trainer, algorithm = config.trainer, config.algorithm
    progress = job.resumed or Progress(kl_coef=algorithm.kl.coef)
    if job.resumed is None:
        await job.imitate_expert(tracker)
    await job.sync(version=progress.step)
    if job.resumed is None:
        await measure(config, job, tracker, step=0)
        await job.save(progress)

    while progress.step < trainer.steps:
        clock = Clock()
        played = await play(config, job, progress, tracker)
        clock.lap("rollout")

        chosen = choose(played.groups, algorithm, trainer.groups_per_step, played.rounds)
        rows = training_rows(chosen, played, config.sampling.temperature)
        chosen = await judge(job, chosen, rows)
        scores = await score(config, job, rows, played.greedy)
        give_advantages(config, chosen, rows, scores, progress.kl_coef)
        clock.lap("score")

        learned = await learn(config, job, progress, chosen, rows, scores)
        progress = after(config, progress, played, learned)
        clock.lap("learn")

        checksum = await job.sync(version=progress.step)
        clock.lap("sync")

        step = progress.step
        write_jsonl(job.folder.trajectories / f"train-{step:06d}.jsonl", played.trajectories)
        if played.greedy:
            write_jsonl(job.folder.trajectories / f"greedy-{step:06d}.jsonl", played.greedy)
        tracker.train_step(step, played.groups, learned, clock, checksum)
        if step % trainer.eval_every == 0 or step == trainer.steps:
            await measure(config, job, tracker, step)
        if step % trainer.save_every == 0 or step == trainer.steps:
            await job.save(progress)
    await job.checkpoints.finish()


async def measure(config: Config, job: TrainerContext, tracker: Tracker, step: int) -> list[Trajectory]:
    """Play the held-out tasks with the present weights.

    Raises:
        NothingPlayed: every episode failed.
    """
    tasks = job.test_tasks.take(config.trainer.eval_episodes)
    trajectories = await job.evaluate(tasks, tracker.episode_ended)
    write_jsonl(job.folder.trajectories / f"eval-{step:06d}.jsonl", trajectories)
    tracker.evaluation(step, trajectories)
    if all(t.failed for t in trajectories):
        raise nothing_played("evaluation", trajectories)
    return trajectories
