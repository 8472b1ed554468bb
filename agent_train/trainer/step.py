"""The parts of one training step, in the order in which the loop takes them: play, rows, score, advantages, learn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_train.algorithms.kl import adapted
from agent_train.algorithms.selection import Chosen, more_groups
from agent_train.algorithms.step_advantages import Scores, mean_and_spread, set_advantages
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample, rows_of
from agent_train.engine.teacher import Teacher
from agent_train.learner.actor_group import Learner
from agent_train.learner.roles import lr_scale, needs_reference, reference_is_base
from agent_train.report.tracking import Learned, Tracker
from agent_train.rollout.sampler import pick_tasks
from agent_train.trainer.context import TrainerContext
from agent_train.trainer.progress import Progress
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Group, Trajectory


class NothingPlayed(RuntimeError):
    """Every episode of a step or of an evaluation failed, so that there is nothing to learn from or to measure."""


class AdvantageError(RuntimeError):
    """The rewards of a step are none that `algorithm.advantage` can take."""


@dataclass(frozen=True)
class Played:
    """What a step played.

    Attributes:
        groups: in the order of their tasks.
        greedy: the greedy episode of each task, of ReMax alone.
        rounds: rollouts that it took.
    """

    groups: list[Group]
    greedy: list[Trajectory]
    rounds: int

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of all groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


async def play(config: Config, job: TrainerContext, progress: Progress, tracker: Tracker) -> Played:
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
    remax = config.algorithm.advantage.name == "remax"
    greedy = await job.play_greedily(tasks, progress.step, tracker.episode_ended) if remax else []
    return Played(groups, greedy, rounds)


def training_rows(chosen: Chosen, played: Played, temperature: float) -> list[TrainingSample]:
    """The rows of the chosen trajectories that take part in advantages.

    Raises:
        NothingPlayed: not one episode of the step is of any use.
    """
    if not any(t.sampled_tokens for t in played.trajectories if not t.failed):
        raise nothing_played("training step", played.trajectories)
    takes_part = [t for g in chosen.groups for t in g.trajectories if chosen.outcomes[t.id].rewards is not None]
    return [row for trajectory in takes_part for row in rows_of(trajectory, temperature)]


async def judge(job: TrainerContext, chosen: Chosen, rows: Sequence[TrainingSample]) -> Chosen:
    """Where the run has a reward model, its score of a trajectory, after the last row, is added to the environment's reward."""
    if job.reward_model is None or not rows:
        return chosen
    said = await job.reward_model.scores(rows)
    last = {row.trajectory: one for row, one in zip(rows, said, strict=True)}
    outcomes = {name: outcome.plus(last.get(name, 0.0)) for name, outcome in chosen.outcomes.items()}
    return replace(chosen, outcomes=outcomes)


async def score(
    config: Config, job: TrainerContext, rows: Sequence[TrainingSample], greedy: Sequence[Trajectory] = ()
) -> Scores:
    """What the roles of the run say of the rows: the reference's and the critic's numbers go onto them."""
    if not rows:
        return Scores()
    reference, values, prm, teacher = await asyncio.gather(
        _reference(config, job, rows),
        _values(job.critic, rows),
        _logprobs(job.prm, rows),
        _logprobs(job.teacher, rows),
    )
    for number, row in enumerate(rows):
        row.reference = reference[number] if reference else []
        row.values = values[number] if values else []
    rewards = {t.task_id: None if t.failed else t.reward for t in greedy}
    return Scores(rewards, prm, teacher, config.teacher.coef)


async def _reference(config: Config, job: TrainerContext, rows: Sequence[TrainingSample]) -> list[list[float]] | None:
    if reference_is_base(config) and needs_reference(config):
        return await job.learner.reference_logprobs(rows)
    return await _logprobs(job.reference, rows)


def give_advantages(
    config: Config, chosen: Chosen, rows: Sequence[TrainingSample], scores: Scores, kl_coef: float
) -> None:
    """As `set_advantages`.

    Raises:
        AdvantageError: in place of its ValueError: the rewards are the environment's, and no mistake of the program.
    """
    try:
        set_advantages(config.algorithm, chosen.groups, rows, chosen.outcomes, scores, kl_coef)
    except ValueError as error:
        raise AdvantageError(f"algorithm.advantage.name={config.algorithm.advantage.name}: {error}") from error


async def learn(
    config: Config,
    job: TrainerContext,
    progress: Progress,
    chosen: Chosen,
    rows: Sequence[TrainingSample],
    scores: Scores,
) -> Learned:
    """Update all that learns, side by side. Where no row is in the loss, nothing is."""
    own = [row for row in rows if chosen.outcomes[row.trajectory].trained]
    learned = Learned(chosen.selection, *mean_and_spread(own), progress.kl_coef)
    if not own:
        return learned
    scale = lr_scale(config, progress.step + 1, config.trainer.steps)
    updates: dict[str, Awaitable[Any]] = {}
    if job.critic is None or progress.step >= config.critic.alone_steps:
        kl_coef = progress.kl_coef if config.algorithm.kl.place == "loss" else 0.0
        updates["update"] = job.learner.update(own, lr_scale=scale, kl_coef=kl_coef, version=progress.step)
    if job.critic is not None:
        updates["critic"] = job.critic.update_critic(own, lr_scale=scale)
    if job.prm is not None and scores.prm is not None:
        outcomes = {t.id: t.success for group in chosen.groups for t in group.trajectories}
        given = (rows, scores.prm, [row.reference for row in rows], outcomes)
        updates["prm"] = job.prm.update_prm(*given, lr_scale=scale)
    return replace(learned, **dict(zip(updates, await asyncio.gather(*updates.values()), strict=True)))


def after(config: Config, progress: Progress, played: Played, learned: Learned) -> Progress:
    """Where the run is after a step."""
    ended = [trajectory for trajectory in played.trajectories if not trajectory.failed]
    return Progress(
        step=progress.step + 1,
        tasks=progress.tasks + len(played.groups),
        kl_coef=_next_kl_coef(config, progress.kl_coef, learned),
        episodes=progress.episodes + len(ended),
        tokens=progress.tokens + sum(trajectory.sampled_tokens for trajectory in played.trajectories),
    )


def nothing_played(what: str, trajectories: Sequence[Trajectory]) -> NothingPlayed:
    """The error for a step or an evaluation of which nothing can be used."""
    errors = [t.error for t in trajectories if t.error] or ["no tokens were sampled"]
    return NothingPlayed(
        f"not one of the {len(trajectories)} episodes of this {what} can be used; the first error: {errors[0]}"
    )


def _next_kl_coef(config: Config, coef: float, learned: Learned) -> float:
    """Where `kl.target` is set, the coefficient follows the KL to the reference that the update measured."""
    kl, update = config.algorithm.kl, learned.update
    if kl.target is None or update is None or not math.isfinite(update.kl_reference):
        return coef
    return adapted(coef, update.kl_reference, kl.target, learned.selection.episodes, kl.horizon)


async def _logprobs(role: Learner | Teacher | None, rows: Sequence[TrainingSample]) -> list[list[float]] | None:
    return None if role is None else await role.logprobs(rows)


async def _values(critic: Learner | None, rows: Sequence[TrainingSample]) -> list[list[float]] | None:
    return None if critic is None else await critic.values(rows)
