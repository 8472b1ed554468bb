"""The training loop: rollout -> advantages -> update -> sync. It is the only one, and reads top to bottom."""

from __future__ import annotations

from agent_train.algorithms.advantages import group_advantages
from agent_train.config import AlgorithmConfig, Config
from agent_train.generator import pick_tasks
from agent_train.job import Job
from agent_train.rows import Row, rows_of
from agent_train.tracking import Clock, Tracker
from agent_train.weights.sync import sync
from agentgym.trajectory import Group, Trajectory, write_jsonl


async def train(config: Config, job: Job, tracker: Tracker) -> None:
    """Train the policy of `job`; everything that is measured goes to `tracker`.

    Raises:
        EngineError, LearnerError, WeightSyncError: a part failed for good; the last checkpoint stays usable.
        NothingPlayed: every episode of a step or of an evaluation failed.
    """
    trainer = config.trainer
    await job.imitate_expert(tracker)
    await sync(job.learner, job.engine, version=0)
    await measure(config, job, tracker, step=0)
    await job.save(step=0)

    for step in range(1, trainer.steps + 1):
        clock = Clock()
        tasks = pick_tasks(job.train_tasks, step - 1, trainer.groups_per_step, trainer.seed)
        groups = await job.collect(tasks, step - 1, tracker.episode_ended)
        clock.lap("rollout")

        rows = training_rows(groups, config.algorithm, config.sampling.temperature)
        update = await job.learner.update(rows, lr_scale=lr_scale(config, step))
        clock.lap("learn")

        checksum = await sync(job.learner, job.engine, version=step)
        clock.lap("sync")

        write_jsonl(job.folder.trajectories / f"train-{step:06d}.jsonl", (t for g in groups for t in g.trajectories))
        tracker.train_step(step, groups, update, clock, checksum)
        if step % trainer.eval_every == 0 or step == trainer.steps:
            await measure(config, job, tracker, step)
        if step % trainer.save_every == 0 or step == trainer.steps:
            await job.save(step)


def lr_scale(config: Config, step: int) -> float:
    """Share of the learning rate that training step `step`, from 1, takes; the warm-up comes on top."""
    return 1.0 if config.learner.schedule == "constant" else 1 - (step - 1) / config.trainer.steps


class NothingPlayed(RuntimeError):
    """Every episode of a step or of an evaluation failed, so that there is nothing to learn from or to measure."""


def training_rows(groups: list[Group], algorithm: AlgorithmConfig, temperature: float) -> list[Row]:
    """The rows of a step, each with its trajectory's advantage. Failed trajectories are in no baseline and in no row."""
    rows = []
    for group in groups:
        rewards = [None if t.failed else t.reward for t in group.trajectories]
        advantages = group_advantages(rewards, algorithm.advantage.std, algorithm.advantage.eps)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for row in [] if trajectory.failed else rows_of(trajectory, temperature):
                row.advantages = row.spread(advantage)
                rows.append(row)
    if not rows:
        raise _nothing_played("training step", [t for group in groups for t in group.trajectories])
    return rows


async def measure(config: Config, job: Job, tracker: Tracker, step: int) -> list[Trajectory]:
    """Play the held-out tasks with the present weights."""
    tasks = job.test_tasks.take(config.trainer.eval_episodes)
    trajectories = await job.evaluate(tasks, tracker.episode_ended)
    write_jsonl(job.folder.trajectories / f"eval-{step:06d}.jsonl", trajectories)
    tracker.evaluation(step, trajectories)
    if all(t.failed for t in trajectories):
        raise _nothing_played("evaluation", trajectories)
    return trajectories


def _nothing_played(what: str, trajectories: list[Trajectory]) -> NothingPlayed:
    errors = [t.error for t in trajectories if t.error] or ["no tokens were sampled"]
    return NothingPlayed(
        f"not one of the {len(trajectories)} episodes of this {what} can be used; the first error: {errors[0]}"
    )
