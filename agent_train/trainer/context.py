"""The open resources of a training run: Ray, engine, learner, tasks. Opened and closed together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agent_train.cluster.placement import own_ray_cpus
from agent_train.cluster.ray_cluster import start_ray
from agent_train.config.extensions import rollouts
from agent_train.config.schema import Config
from agent_train.config.validation import env_spec, env_spec_of_run, sandbox_choice
from agent_train.data.samples import TrainingSample
from agent_train.engine.base import Sampling
from agent_train.engine.start import start_engine
from agent_train.learner.role_start import Models, begin_as_policy, check_vocabularies, learning_beside, start_models
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.report.tracking import Tracker
from agent_train.rollout.env_workers import placed_env
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.checkpoint import Checkpoint, Checkpoints
from agent_train.trainer.progress import Progress
from agent_train.trainer.run_folder import RunFolder
from agent_train.trainer.warm_start import ExpertError, SftProgress, demonstrate, warm_start
from agent_train.weights.adapter import sync_adapter
from agent_train.weights.manifest import WeightAddress, free_port
from agent_train.weights.sync import sync
from agentgym.core.env import Env
from agentgym.core.tasks import TaskSet
from agentgym.rollout.episode import Limits

if TYPE_CHECKING:
    from agent_train.engine.embedded import EmbeddedEngine
    from agent_train.engine.vllm import VllmEngine

CLOSE_SECONDS = 5.0
TOKENIZER_EPISODES = 64
DEMONSTRATION_SECONDS = 1800.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerContext:
    """The open parts of a run. `open_context` makes one and closes everything in it.

    Attributes:
        config: of the run.
        folder: of the run.
        engine: generates the answers.
        sampler: plays episodes with it.
        models: policy and other roles.
        train_tasks, test_tasks: of the environment.
        demonstrations: the samples of the warm start, while they are made; None without one.
        checkpoints: of the run.
        resumed: the progress that the run goes on from; None for a new run.
    """

    config: Config
    folder: RunFolder
    engine: VllmEngine | EmbeddedEngine
    sampler: Sampler
    models: Models
    train_tasks: TaskSet
    test_tasks: TaskSet
    demonstrations: asyncio.Future[list[TrainingSample]] | None
    checkpoints: Checkpoints
    resumed: Progress | None = None

    async def imitate_expert(self, tracker: Tracker) -> None:
        """The supervised warm start that `config.sft` asks for; nothing where it asks for no episodes."""
        if self.demonstrations is None:
            return
        tracker.phase("warm start", f"the expert plays {self.config.sft.episodes} episodes")
        samples = await _result_of(self.demonstrations, "the expert's demonstrations", DEMONSTRATION_SECONDS)

        def show(progress: SftProgress) -> None:
            tracker.sft_step(progress.step, progress.steps, progress.metrics.loss, progress.metrics.tokens)

        await warm_start(self.models.policy, samples, self.config.sft, show, self.config.trainer.seed)
        await begin_as_policy(self.config, self.models, self.folder.start)

    async def sync(self, version: int) -> int:
        """Move the policy's weights into the engine as a version: a vLLM engine gets adapters alone. See `weights.sync`.

        Raises:
            EngineError, LearnerError, WeightSyncError: they did not arrive as they were sent.
        """
        policy, engine = self.models.policy, self.engine
        if self.config.lora.rank and self.config.engine.name == "vllm":
            return await sync_adapter(policy, cast("VllmEngine", engine), self.folder.path / "adapters", version)
        return await sync(policy, engine, version)

    async def save(self, progress: Progress) -> None:
        """Begin to save all that a run needs to go on from here; returns when it is copied. See `Checkpoints.save`."""
        learning = [self.models.policy, *learning_beside(self.config, self.models)]
        await self.checkpoints.save(progress, {learner.role: learner for learner in learning})


@asynccontextmanager
async def open_context(
    config: Config, folder: RunFolder, tracker: Tracker, checkpoint: Checkpoint | None = None
) -> AsyncIterator[TrainerContext]:
    """Build or find the model, start Ray, engine and learner, and join the two by a weight group.

    With a checkpoint the roles that learn go on from it, and there is no warm start.

    On leaving, by whatever way, the engine stops, the ranks are killed and Ray is shut down.

    Raises:
        VocabularyError: a role's model means something else by an id than the policy.
        EngineError, LearnerError, RendererError: a part did not start; those that had started are stopped.
    """
    tracker.phase("reading tasks", config.env.id)
    _hide_progress_bars()
    spec = env_spec_of_run(config)
    if (choice := sandbox_choice(config)) is not None:
        tracker.note(f"sandbox: {choice}")
    train_tasks, test_tasks = spec.tasks(config.env.train_split), spec.tasks(config.env.test_split)
    model_dir = await asyncio.to_thread(find_model, config, folder, tracker)
    await asyncio.to_thread(check_vocabularies, config, model_dir)
    renderer = await asyncio.to_thread(Renderer.of_folder, model_dir)
    async with AsyncExitStack() as stack:
        tracker.phase("starting Ray")
        await start_ray(own_ray_cpus(config), stack)
        make_env: Callable[[], Env] = spec.make
        if config.env.placement == "ray":
            tracker.phase("placing environments")
            make_env = (await stack.enter_async_context(placed_env(config, spec, tracker.note))).make
        # Played by a worker of Ray while the engine starts: thousands of episodes would hold up this process.
        warm = config.sft.episodes and checkpoint is None
        demonstrated = _in_ray(demonstrate, config, spec, str(model_dir)) if warm else None
        engine, models = await _start_parts(config, folder, model_dir, tracker, stack)
        tracker.phase("connecting learner and engine")
        address = WeightAddress("127.0.0.1", free_port(), 1 + engine.receivers)
        await asyncio.gather(models.policy.connect_weights(address), engine.connect_weights(address))
        if checkpoint is not None:
            tracker.phase("loading the checkpoint", checkpoint.path.name)
            learning = [models.policy, *learning_beside(config, models)]
            await asyncio.gather(*(learner.load_state(checkpoint.state(learner.role)) for learner in learning))
        trainer, timeout = config.trainer, config.learner.timeout
        checkpoints = Checkpoints(folder, trainer.keep_checkpoints, timeout, tracker.note, lambda: tracker.elapsed)
        await stack.enter_async_context(checkpoints)
        yield TrainerContext(
            config,
            folder,
            engine,
            _sampler(config, make_env, engine, renderer),
            models,
            train_tasks,
            test_tasks,
            demonstrated,
            checkpoints,
            checkpoint.progress if checkpoint else None,
        )


def _sampler(
    config: Config, make_env: Callable[[], Env], engine: VllmEngine | EmbeddedEngine, renderer: Renderer
) -> Sampler:
    # In a deterministic run of the embedded engine a request waits for a batch of all episodes, whose calls have limits of their own.
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


def find_model(config: Config, folder: RunFolder, tracker: Tracker) -> Path:
    """The folder of `model.path`, or a tiny model built into the run folder."""
    if config.model.path:
        return Path(config.model.path).expanduser().absolute()
    tracker.phase("building the tiny model")
    target = folder.path / "model"
    spec = env_spec(config)
    texts = texts_of_env(spec.id, spec.kwargs, TOKENIZER_EPISODES, config.trainer.seed)
    build_tiny(target, texts, config.model.tiny, config.engine.max_model_len, config.trainer.seed)
    return target


async def _start_parts(
    config: Config, folder: RunFolder, model_dir: Path, tracker: Tracker, stack: AsyncExitStack
) -> tuple[VllmEngine | EmbeddedEngine, Models]:
    """Start engine and learner side by side; whichever has started is closed with the stack even if the other fails."""

    async def open_engine() -> VllmEngine | EmbeddedEngine:
        engine = await start_engine(
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


def _hide_progress_bars() -> None:
    """Those of transformers would be drawn over the display of the run."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _in_ray(function: Callable[..., list[TrainingSample]], *arguments: object) -> asyncio.Future[list[TrainingSample]]:
    import ray

    return asyncio.wrap_future(ray.remote(num_cpus=0)(function).remote(*arguments).future())


async def _result_of(future: asyncio.Future[list[TrainingSample]], name: str, seconds: float) -> list[TrainingSample]:
    """The result of a Ray task; its own error where it failed.

    Raises:
        ExpertError: the worker died.
        TimeoutError: it took too long; by name.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(future, seconds)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise ExpertError(f"the worker that makes {name} died: {error}") from error
    except TimeoutError:
        raise TimeoutError(f"{name} took longer than {seconds:g} s") from None


async def _close_in_time(engine: VllmEngine | EmbeddedEngine) -> None:
    """Close the engine, but not for longer than a stop may take: Ray's end takes its processes too."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.close(), CLOSE_SECONDS)
