"""The training loop: play -> choose -> score -> advantages -> learn -> sync. It is the only one, and reads top to bottom."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from agent_train.advantages import Scores, mean_and_spread, set_advantages
from agent_train.algorithms.kl import adapted
from agent_train.config import Config, KlConfig
from agent_train.generator import pick_tasks
from agent_train.job import Job
from agent_train.progress import Progress
from agent_train.rows import Row, rows_of
from agent_train.selection import Chosen, choose, more_groups
from agent_train.tracking import Clock, Learned, Tracker
from agent_train.weights.sync import sync
from agentgym.tasks import Task
from agentgym.trajectory import Group, Trajectory, write_jsonl


class NothingPlayed(RuntimeError):
    """Every episode of a step or of an evaluation failed, so that there is nothing to learn from or to measure."""


class AdvantageError(RuntimeError):
    """The rewards of a step are none that `algorithm.advantage` can take."""


async def train(config: Config, job: Job, tracker: Tracker) -> None:
    """Train the policy of `job`; everything that is measured goes to `tracker`.

    Raises:
        EngineError, LearnerError, WeightSyncError: a part failed for good; the last checkpoint stays usable.
        NothingPlayed: every episode of a step or of an evaluation failed.
        AdvantageError: the advantage cannot be made of the environment's rewards.
    """
    trainer, algorithm = config.trainer, config.algorithm
    progress = Progress(kl_coef=algorithm.kl.coef)
    await job.imitate_expert(tracker)
    await sync(job.learner, job.engine, version=0)
    await measure(config, job, tracker, step=0)
    await job.save(progress)

    while progress.step < trainer.steps:
        clock = Clock()
        played = await play(config, job, progress, tracker)
        clock.lap("rollout")

        chosen = choose(played.groups, algorithm, trainer.groups_per_step, played.rounds)
        rows = training_rows(chosen, played.groups, config.sampling.temperature)
        scores = replace(await job.score(rows), greedy={t.task_id: None if t.failed else t.reward for t in played.greedy})
        give_advantages(config, chosen, rows, scores, progress.kl_coef)
        clock.lap("score")

        learned = await learn(config, job, progress, chosen, rows, scores)
        clock.lap("learn")

        progress = after(config.algorithm.kl, progress, played, learned)
        checksum = await sync(job.learner, job.engine, version=progress.step)
        clock.lap("sync")

        step = progress.step
        write_jsonl(job.folder.trajectories / f"train-{step:06d}.jsonl", (t for g in played.groups for t in g.trajectories))
        if played.greedy:
            write_jsonl(job.folder.trajectories / f"greedy-{step:06d}.jsonl", played.greedy)
        tracker.train_step(step, played.groups, learned, clock, checksum)
        if step % trainer.eval_every == 0 or step == trainer.steps:
            await measure(config, job, tracker, step)
        if step % trainer.save_every == 0 or step == trainer.steps:
            await job.save(progress)


@dataclass(frozen=True)
class Played:
    """What a step played: groups in the order of their tasks, the greedy episode of each task where one is asked for."""

    groups: list[Group]
    greedy: list[Trajectory]
    rounds: int


async def play(config: Config, job: Job, progress: Progress, tracker: Tracker) -> Played:
    """The next tasks of the row; with dynamic sampling further ones, until enough groups differ in their rewards."""
    trainer = config.trainer
    tasks: list[Task] = []
    groups: list[Group] = []
    rounds, count = 0, trainer.groups_per_step
    while count:
        more = pick_tasks(job.train_tasks, progress.tasks + len(tasks), count, trainer.seed)
        groups += await job.collect(more, progress.step, tracker.episode_ended, before=tasks)
        tasks, rounds = tasks + more, rounds + 1
        count = more_groups(groups, config.algorithm, trainer.groups_per_step, rounds)
    greedy = config.algorithm.advantage.name == "remax"
    return Played(groups, await job.play_greedily(tasks, progress.step, tracker.episode_ended) if greedy else [], rounds)


def training_rows(chosen: Chosen, played: list[Group], temperature: float) -> list[Row]:
    """The rows of the chosen trajectories that take part in advantages.

    Raises:
        NothingPlayed: not one of those that were played is of any use.
    """
    everyone = [t for group in played for t in group.trajectories]
    if not any(t.sampled_tokens for t in everyone if not t.failed):
        raise _nothing_played("training step", everyone)
    takes_part = [t for g in chosen.groups for t in g.trajectories if chosen.outcomes[t.id].rewards is not None]
    return [row for trajectory in takes_part for row in rows_of(trajectory, temperature)]


def give_advantages(config: Config, chosen: Chosen, rows: list[Row], scores: Scores, kl_coef: float) -> None:
    """As `set_advantages`, whose complaints are about the environment here."""
    try:
        set_advantages(config.algorithm, chosen.groups, rows, chosen.outcomes, scores, kl_coef)
    except ValueError as error:
        raise AdvantageError(f"algorithm.advantage.name={config.algorithm.advantage.name}: {error}") from error


async def learn(
    config: Config, job: Job, progress: Progress, chosen: Chosen, rows: list[Row], scores: Scores
) -> Learned:
    """Update what learns, side by side. Without a row in the loss nothing is updated."""
    own = [row for row in rows if chosen.outcomes[row.trajectory].trained]
    learned = Learned(chosen.selection, *mean_and_spread(own), progress.kl_coef)
    if not own:
        return learned
    scale, in_loss = lr_scale(config, progress.step + 1), config.algorithm.kl.place == "loss"
    alone = job.critic is not None and progress.step < config.critic.alone_steps
    policy = job.learner.update(
        own, lr_scale=scale, kl_coef=progress.kl_coef if in_loss else 0.0, version=progress.step
    )
    updates = [
        _nothing() if alone else policy,
        job.critic.update_critic(own, lr_scale=scale) if job.critic else _nothing(),
        job.teach_prm(rows, scores, chosen, scale),
    ]
    update, critic, prm = await asyncio.gather(*updates)
    return replace(learned, update=update, critic=critic, prm=prm)


async def _nothing() -> None:
    """In place of an update that is not wanted."""
