"""The training loop: play, choose, score, compute advantages, update, sync. It is the only one, and reads top to bottom."""

from __future__ import annotations

from agent_train.algorithms.selection import choose
from agent_train.algorithms.step_advantages import mean_and_spread
from agent_train.config.schema import Config
from agent_train.report.metrics import Clock, step_metrics
from agent_train.report.tracking import Tracker
from agent_train.trainer.context import TrainerContext
from agent_train.trainer.progress import Progress
from agent_train.trainer.step import (
    add_reward_model_scores,
    after,
    give_advantages,
    learn,
    nothing_played,
    play,
    score_with_models,
    training_samples,
)
from agentgym.core.trajectory import Trajectory, write_jsonl


async def train(config: Config, context: TrainerContext, tracker: Tracker) -> None:
    """Train the policy of a run; all measurements go to `tracker`.

    Raises:
        EngineError, LearnerError, WeightSyncError: a part failed for good; the last checkpoint stays usable.
        NothingPlayed: every episode of a step or of an evaluation failed.
        AdvantageError: the advantage cannot be computed from the environment's rewards.
    """
    trainer, algorithm, models = config.trainer, config.algorithm, context.models
    progress = context.resumed or Progress(kl_coef=algorithm.kl.coef)
    if context.resumed is None:
        await context.imitate_expert(tracker)
    await context.sync(version=progress.step)
    if context.resumed is None:
        await measure(config, context, tracker, step=0)
        await context.save(progress)

    while progress.step < trainer.steps:
        clock = Clock()
        groups, greedy, rounds = await play(config, context, progress, tracker)
        clock.lap("rollout")

        kept, selection = choose(groups, algorithm, trainer.groups_per_step, rounds)
        samples = training_samples(config, groups, kept)
        samples = await add_reward_model_scores(models, samples)
        samples = await score_with_models(config, models, samples)
        samples = give_advantages(config, kept, samples, greedy, progress.kl_coef)
        clock.lap("score")

        kl_coef = progress.kl_coef
        update, critic, prm = await learn(config, models, progress, kept, samples)
        progress = after(config, progress, groups, selection.episodes, update)
        clock.lap("learn")

        checksum = await context.sync(version=progress.step)
        clock.lap("sync")

        step = progress.step
        write_jsonl(
            context.folder.trajectories / f"train-{step:06d}.jsonl", [t for g in groups for t in g.trajectories]
        )
        if greedy:
            write_jsonl(context.folder.trajectories / f"greedy-{step:06d}.jsonl", greedy)
        spread = mean_and_spread([sample for sample in samples if sample.in_loss])
        tracker.train_step(step_metrics(step, groups, clock, checksum, selection, spread, kl_coef, update, critic, prm))
        if step % trainer.eval_every == 0 or step == trainer.steps:
            await measure(config, context, tracker, step)
        if step % trainer.save_every == 0 or step == trainer.steps:
            await context.save(progress)
    await context.checkpoints.finish()


async def measure(config: Config, context: TrainerContext, tracker: Tracker, step: int) -> list[Trajectory]:
    """Play the held-out tasks with the present weights.

    Raises:
        NothingPlayed: every episode failed.
    """
    tasks = context.test_tasks.take(config.trainer.eval_episodes)
    trajectories = await context.sampler.evaluate(tasks, tracker.episode_ended)
    write_jsonl(context.folder.trajectories / f"eval-{step:06d}.jsonl", trajectories)
    tracker.evaluation(step, trajectories)
    if all(t.failed for t in trajectories):
        raise nothing_played("evaluation", trajectories)
    return trajectories
