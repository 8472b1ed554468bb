"""The parts of one training step, in the order of the loop: play, samples, scores, advantages, updates."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_train.algorithms.advantage_inputs import advantage_inputs
from agent_train.algorithms.kl import adapted
from agent_train.algorithms.selection import more_groups, participants, turn_rewards
from agent_train.algorithms.step_advantages import with_advantages
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.learner.roles import lr_scale, needs_reference, reference_is_base
from agent_train.report.tracking import Tracker
from agent_train.rollout.sampler import pick_tasks
from agent_train.trainer.checkpoint import Progress
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from agent_train.learner.critic_objective import CriticMetrics
    from agent_train.learner.measures import UpdateMetrics
    from agent_train.learner.prm_objective import PrmMetrics
    from agent_train.learner.role_start import Models
    from agent_train.trainer.rl import RlContext


class NothingPlayed(RuntimeError):
    """Every episode of a step or of an evaluation failed, so there is nothing to learn from or to measure."""


class AdvantageError(RuntimeError):
    """`algorithm.advantage` cannot take the rewards of a step."""


async def play(
    config: Config, context: RlContext, progress: Progress, tracker: Tracker
) -> tuple[list[Group], list[Trajectory], int]:
    """Play the next tasks; with dynamic sampling further ones, until enough groups differ in their rewards.

    Returns:
        The groups in the order of their tasks; for ReMax the greedy episode of each task, else none; the number of rollouts.
    """
    trainer = config.trainer
    tasks: list[Task] = []
    groups: list[Group] = []
    rounds, count = 0, trainer.groups_per_step
    while count:
        more = pick_tasks(context.train_tasks, progress.tasks + len(tasks), count, trainer.seed)
        groups += await context.sampler.collect(more, progress.step, tracker.episode_ended, before=tasks)
        tasks, rounds = tasks + more, rounds + 1
        count = more_groups(groups, config.algorithm, trainer.groups_per_step, rounds)
    remax = config.algorithm.advantage.name == "remax"
    greedy = await context.sampler.play_greedily(tasks, progress.step, tracker.episode_ended) if remax else []
    return groups, greedy, rounds


def training_samples(config: Config, played: Sequence[Group], kept: Sequence[Group]) -> list[TrainingSample]:
    """The samples of the kept trajectories that take part in advantages.

    Raises:
        NothingPlayed: no episode of the step can be used.
    """
    trajectories = [trajectory for group in played for trajectory in group.trajectories]
    if not any(t.sampled_tokens for t in trajectories if not t.failed):
        raise nothing_played("training step", trajectories)
    return [
        sample
        for group in kept
        for trajectory, in_loss in participants(group, config.algorithm.overlong)
        for sample in samples_of(
            trajectory, config.sampling.temperature, turn_rewards(trajectory, config.algorithm), in_loss
        )
    ]


async def add_reward_model_scores(models: Models, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Add the reward model's score of each trajectory's last sample to the reward of its last turn, if there is such a model."""
    if models.reward_model is None or not samples:
        return list(samples)
    scores = await models.reward_model.scores(samples)
    last = {sample.trajectory: number for number, sample in enumerate(samples)}
    return [
        replace(sample, rewards=[*sample.rewards[:-1], sample.rewards[-1] + score])
        if last[sample.trajectory] == number
        else sample
        for number, (sample, score) in enumerate(zip(samples, scores, strict=True))
    ]


async def score_with_models(config: Config, models: Models, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with the numbers of reference, critic, process reward model and teacher, as far as the run has them."""
    if not samples:
        return []
    asked = {
        "values": models.critic and models.critic.values(samples),
        "reference": models.reference and models.reference.logprobs(samples),
        "prm": models.prm and models.prm.logprobs(samples),
        "teacher": models.teacher and models.teacher.logprobs(samples),
    }
    if reference_is_base(config) and needs_reference(config):
        asked["reference"] = models.policy.reference_logprobs(samples)
    scores = await asyncio.gather(*(each or _none() for each in asked.values()))
    found = {name: numbers for name, numbers in zip(asked, scores, strict=True) if numbers}
    return [
        replace(sample, **{name: numbers[number] for name, numbers in found.items()})  # type: ignore[arg-type]
        for number, sample in enumerate(samples)
    ]


async def _none() -> None:
    return None


def give_advantages(
    config: Config,
    kept: Sequence[Group],
    samples: Sequence[TrainingSample],
    greedy: Sequence[Trajectory],
    kl_coef: float,
) -> list[TrainingSample]:
    """The samples with their advantages, and with the critic's targets; see `with_advantages`.

    Raises:
        AdvantageError: the advantage cannot be computed from the rewards of the environment.
    """
    baselines = {t.task_id: None if t.failed else t.reward for t in greedy}
    try:
        inputs = advantage_inputs(config.algorithm, kept, samples, baselines, config.teacher.coef, kl_coef)
        return with_advantages(inputs, samples)
    except ValueError as error:
        raise AdvantageError(f"algorithm.advantage.name={config.algorithm.advantage.name}: {error}") from error


async def learn(
    config: Config, models: Models, progress: Progress, kept: Sequence[Group], samples: Sequence[TrainingSample]
) -> tuple[UpdateMetrics | None, CriticMetrics | None, PrmMetrics | None]:
    """Update policy, critic and process reward model side by side; None for each that is not updated.

    Without a sample in the loss nothing is updated.
    """
    own = [sample for sample in samples if sample.in_loss]
    if not own:
        return None, None, None
    scale = lr_scale(config, progress.step + 1, config.trainer.steps)
    critic_alone = models.critic is not None and progress.step < config.critic.alone_steps
    kl_coef = progress.kl_coef if config.algorithm.kl.place == "loss" else 0.0
    outcomes = {t.id: t.success for group in kept for t in group.trajectories}
    return await asyncio.gather(
        _none() if critic_alone else models.policy.update(own, lr_scale=scale, kl_coef=kl_coef, version=progress.step),
        _none() if models.critic is None else models.critic.update_critic(own, lr_scale=scale),
        _none() if models.prm is None else models.prm.update_prm(samples, outcomes, lr_scale=scale),
    )


def after(
    config: Config, progress: Progress, played: Sequence[Group], episodes: int, update: UpdateMetrics | None
) -> Progress:
    """The progress after a step that played `played` and trained on `episodes` of them."""
    trajectories = [trajectory for group in played for trajectory in group.trajectories]
    kl, kl_coef = config.algorithm.kl, progress.kl_coef
    if kl.target is not None and update is not None and math.isfinite(update.kl_reference):
        kl_coef = adapted(kl_coef, update.kl_reference, kl.target, episodes, kl.horizon)
    return Progress(
        step=progress.step + 1,
        tasks=progress.tasks + len(played),
        kl_coef=kl_coef,
        episodes=progress.episodes + sum(not trajectory.failed for trajectory in trajectories),
        tokens=progress.tokens + sum(trajectory.sampled_tokens for trajectory in trajectories),
    )


def nothing_played(what: str, trajectories: Sequence[Trajectory]) -> NothingPlayed:
    """The error for a step or an evaluation without a usable episode."""
    errors = [t.error for t in trajectories if t.error] or ["no tokens were sampled"]
    return NothingPlayed(
        f"not one of the {len(trajectories)} episodes of this {what} can be used; the first error: {errors[0]}"
    )
