"""mode=rl: play, choose, score, compute advantages, update, sync. `RlContext.take_step` reads top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agent_train.algorithms.selection import choose
from agent_train.algorithms.step_advantages import mean_and_spread
from agent_train.cluster.placement import own_ray_cpus
from agent_train.cluster.ray_cluster import start_ray
from agent_train.config.extensions import engines, rollouts
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec_of_run, sandbox_choice
from agent_train.data.samples import TrainingSample
from agent_train.engine.base import Engine, Sampling
from agent_train.learner.role_start import Models, begin_as_policy, check_vocabularies, learning_beside, start_models
from agent_train.learner.tiny import texts_of_env
from agent_train.report.tracking import Clock, Tracker, step_metrics
from agent_train.rollout.env_workers import placed_env
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.checkpoint import Checkpoint, Progress
from agent_train.trainer.loop import TrainerContext, find_model, open_checkpoints
from agent_train.trainer.run_folder import RunFolder
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
from agent_train.trainer.warm_start import ExpertError, demonstrations, warm_start
from agent_train.weights.adapter import AdapterReceiver, sync_adapter
from agent_train.weights.manifest import WeightAddress, free_port
from agent_train.weights.sync import sync
from agentgym.core.env import Env
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import TaskSet
from agentgym.core.trajectory import write_jsonl
from agentgym.rollout.episode import Limits

CLOSE_SECONDS = 5.0
TOKENIZER_EPISODES = 64
DEMONSTRATION_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class RlContext(TrainerContext):
    """A run that plays episodes. `demonstrations` are the samples of the warm start, while they are made; None without one."""

    engine: Engine
    sampler: Sampler
    models: Models
    train_tasks: TaskSet
    test_tasks: TaskSet
    demonstrations: asyncio.Future[list[TrainingSample]] | None

    async def begin(self, progress: Progress) -> None:
        """Imitate the expert, if the settings ask for it, and give the engine the policy's weights."""
        if self.demonstrations is not None:
            sft, show = self.config.sft, self.tracker.sft_step
            self.tracker.phase("warm start", f"the expert plays {sft.episodes} episodes")
            samples = await _demonstrated(self.demonstrations)
            await warm_start(self.models.policy, samples, sft, show, self.config.trainer.seed)
            await begin_as_policy(self.config, self.models, self.folder.start)
        await self.sync(progress.step)

    async def take_step(self, progress: Progress) -> Progress:
        config, models, clock = self.config, self.models, Clock()
        groups, greedy, rounds = await play(config, self, progress, self.tracker)
        clock.lap("rollout")

        kept, selection = choose(groups, config.algorithm, config.trainer.groups_per_step, rounds)
        samples = training_samples(config, groups, kept)
        samples = await add_reward_model_scores(models, samples)
        samples = await score_with_models(config, models, samples)
        samples = give_advantages(config, kept, samples, greedy, progress.kl_coef)
        clock.lap("score")

        kl_coef = progress.kl_coef
        update, critic, prm = await learn(config, models, progress, kept, samples)
        progress = after(config, progress, groups, selection.episodes, update)
        clock.lap("learn")

        step = progress.step
        checksum = await self.sync(step)
        clock.lap("sync")

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        write_jsonl(self.folder.trajectories / f"train-{step:06d}.jsonl", trajectories)
        if greedy:
            write_jsonl(self.folder.trajectories / f"greedy-{step:06d}.jsonl", greedy)
        spread = mean_and_spread([sample for sample in samples if sample.in_loss])
        metrics = step_metrics(step, groups, clock, checksum, selection, spread, kl_coef, update, critic, prm)
        self.tracker.train_step(metrics)
        return progress

    async def measure(self, step: int) -> None:
        """Play the held-out tasks with the present weights.

        Raises:
            NothingPlayed: every episode failed.
        """
        tasks = self.test_tasks.take(self.config.trainer.eval_episodes)
        trajectories = await self.sampler.evaluate(tasks, self.tracker.episode_ended)
        write_jsonl(self.folder.trajectories / f"eval-{step:06d}.jsonl", trajectories)
        self.tracker.evaluation(step, trajectories)
        if all(trajectory.failed for trajectory in trajectories):
            raise nothing_played("evaluation", trajectories)

    async def sync(self, version: int) -> int:
        """Move the policy's weights into the engine as a version: a vLLM engine gets adapters alone. See `weights.sync`."""
        policy = self.models.policy
        if self.config.lora.rank and self.config.engine.name == "vllm":
            receiver = cast("AdapterReceiver", self.engine)
            return await sync_adapter(policy, receiver, self.folder.path / "adapters", version)
        return await sync(policy, self.engine, version)


@asynccontextmanager
async def open_rl(
    config: Config, folder: RunFolder, tracker: Tracker, checkpoint: Checkpoint | None = None
) -> AsyncIterator[RlContext]:
    """Build or find the model, start Ray, engine and learner, and join the two by a weight group.

    However the block ends, the engine stops, the ranks are killed and Ray is shut down.

    Raises:
        VocabularyError: a role's model means something else by an id than the policy.
        EngineError, LearnerError, RendererError: a part did not start; those that had started are stopped.
    """
    tracker.phase("reading tasks", config.env.id)
    spec = env_spec_of_run(config)
    if (choice := sandbox_choice(config)) is not None:
        tracker.note(f"sandbox: {choice}")
    train_tasks, test_tasks = spec.tasks(config.env.train_split), spec.tasks(config.env.test_split)

    def texts() -> list[str]:
        return texts_of_env(spec.id, spec.kwargs, TOKENIZER_EPISODES, config.trainer.seed)

    model_dir = await asyncio.to_thread(find_model, config, folder, tracker, texts)
    await asyncio.to_thread(check_vocabularies, config, model_dir)
    renderer = await asyncio.to_thread(Renderer.of_folder, model_dir)
    async with AsyncExitStack() as stack:
        tracker.phase("starting Ray")
        await start_ray(own_ray_cpus(config), stack)
        make_env: Callable[[], Env] = spec.make
        if config.env.placement == "ray":
            tracker.phase("placing environments")
            make_env = (await stack.enter_async_context(placed_env(config, spec, tracker.note))).make
        warm = config.sft.episodes and checkpoint is None
        demonstrated = _demonstrate(config, spec, model_dir) if warm else None
        engine, models = await _start_parts(config, folder, model_dir, tracker, stack)
        tracker.phase("connecting learner and engine")
        address = WeightAddress("127.0.0.1", free_port(), 1 + engine.receivers)
        await asyncio.gather(models.policy.connect_weights(address), engine.connect_weights(address))
        learners = [models.policy, *learning_beside(config, models)]
        saving = open_checkpoints(config, folder, tracker, learners, checkpoint)
        yield RlContext(
            config=config,
            folder=folder,
            tracker=tracker,
            learners=learners,
            checkpoints=await stack.enter_async_context(saving),
            steps=config.trainer.steps,
            resumed=checkpoint.progress if checkpoint else None,
            engine=engine,
            sampler=_sampler(config, make_env, engine, renderer),
            models=models,
            train_tasks=train_tasks,
            test_tasks=test_tasks,
            demonstrations=demonstrated,
        )


def _sampler(config: Config, make_env: Callable[[], Env], engine: Engine, renderer: Renderer) -> Sampler:
    # In a deterministic run of the embedded engine a request waits for a batch of all episodes, whose calls have their own limits.
    waits_for_all = config.engine.name == "embedded" and config.trainer.deterministic
    act_timeout = None if waits_for_all else config.engine.request_timeout
    return Sampler(
        make_env,
        engine,
        renderer,
        Sampling(config.sampling.max_tokens, config.sampling.temperature),
        group_size=config.algorithm.group_size,
        seed=config.trainer.seed,
        concurrency=config.engine.max_concurrent * config.engine.replicas,
        limits=Limits(step_timeout=config.env.step_timeout, act_timeout=act_timeout),
        play=rollouts.load(config.env.rollout),
    )


async def _start_parts(
    config: Config, folder: RunFolder, model_dir: Path, tracker: Tracker, stack: AsyncExitStack
) -> tuple[Engine, Models]:
    """Start engine and learner side by side; whichever has started is closed with the stack even if the other fails."""

    async def open_engine() -> Engine:
        engine: Engine = await engines.load(config.engine.name)(
            config.engine,
            model_dir,
            folder.logs,
            dtype=config.model.dtype,
            seed=config.trainer.seed,
            adapter_rank=config.lora.rank,
            deterministic=config.trainer.deterministic,
            on_progress=lambda line, seconds: tracker.phase("starting the engine", f"{seconds:.0f} s: {line}"),
        )
        stack.push_async_callback(_close_in_time, engine)
        return engine

    try:
        async with asyncio.TaskGroup() as parts:
            begin = folder.start if folder.start.is_dir() else model_dir
            engine = parts.create_task(open_engine())
            models = parts.create_task(start_models(config, model_dir, begin, stack))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return engine.result(), models.result()


async def _close_in_time(engine: Engine) -> None:
    """Close the engine, but not for longer than a stop may take: Ray's end takes its processes too."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.close(), CLOSE_SECONDS)


def _demonstrate(config: Config, spec: EnvSpec, model_dir: Path) -> asyncio.Future[list[TrainingSample]]:
    """Have a worker of Ray play the expert while the engine starts: thousands of episodes would hold up this process."""
    import ray

    playing = ray.remote(num_cpus=0)(lambda *given: asyncio.run(demonstrations(*given)))
    return asyncio.wrap_future(playing.remote(config, spec, str(model_dir)).future())


async def _demonstrated(future: asyncio.Future[list[TrainingSample]]) -> list[TrainingSample]:
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(future, DEMONSTRATION_SECONDS)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise ExpertError(f"the worker that makes the expert's demonstrations died: {error}") from error
    except TimeoutError:
        raise TimeoutError(f"the expert's demonstrations took longer than {DEMONSTRATION_SECONDS:g} s") from None
