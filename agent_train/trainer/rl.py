"""mode=rl: play, choose, score, compute advantages, update, sync. `RlContext.take_step` reads top to bottom."""

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.kl import adapted
from agent_train.algorithms.selection import choose, greedy_rewards, more_groups, participants, surplus, turn_rewards
from agent_train.algorithms.step_advantages import mean_and_spread, with_advantages
from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.config.extensions import rollouts
from agent_train.config.schema import OWN, PAST, Config
from agent_train.config.validation import env_spec, sandbox_choice
from agent_train.data.players import apart, by_policy
from agent_train.data.samples import TrainingSample, samples_of
from agent_train.engine.base import Engine, Sampling
from agent_train.learner.actor_group import Learner
from agent_train.learner.critic_objective import CriticMetrics, PrmMetrics
from agent_train.learner.measures import UpdateMetrics
from agent_train.learner.role_start import Models, begin_as_policy, check_vocabularies, learning
from agent_train.learner.roles import lr_scale, needs_reference, reference_is_base
from agent_train.learner.tiny import texts_of_env
from agent_train.report.metrics import Clock, StepMetrics, read_metrics, step_metrics
from agent_train.report.tracking import Tracker
from agent_train.rollout.agents import Agents, agents_of
from agent_train.rollout.ahead import Rollout, Rollouts
from agent_train.rollout.draws import Draws
from agent_train.rollout.env_workers import placed_env
from agent_train.rollout.group_judge import GroupJudge
from agent_train.rollout.journal import Journal
from agent_train.rollout.others import maker_of
from agent_train.rollout.past import Past, opponent_of, past_players, rated
from agent_train.rollout.places import follow_load
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import OnEnd, Sampler
from agent_train.trainer.checkpoint import Checkpoint, Progress
from agent_train.trainer.following import reset_reference, restore_reference
from agent_train.trainer.loop import TrainerContext, Watched, find_model, join_cluster, open_parts
from agent_train.trainer.policies import LearningPolicy
from agent_train.trainer.run_folder import RunFolder
from agent_train.trainer.start_parts import start_parts
from agent_train.trainer.warm_start import demonstrations, warm_start
from agent_train.weights.sync import checksum_of_policies
from agentgym.agents.play import play_agent
from agentgym.core.env import Env
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Group, Trajectory, write_jsonl
from agentgym.rollout.episode import Limits
from agentgym.service.client.lookup import held

TOKENIZER_EPISODES = 64
DEMONSTRATION_SECONDS = 1800.0


class StepError(RuntimeError):
    """Every episode of a step or of an evaluation failed, or `algorithm.advantage` cannot take the rewards of a step."""


@dataclass(frozen=True, kw_only=True)
class RlContext(TrainerContext):
    """A run that plays episodes. `demonstrations` makes the samples of the warm start; None without one."""

    policies: Sequence[LearningPolicy]  # the run's, and those that players have for themselves
    sampler: Sampler
    draws: Draws
    rollouts: Rollouts[tuple[Rollout, Journal]]
    checksums: dict[int, int]  # of the run's weights, by version
    models: Models
    test_tasks: TaskSet
    demonstrations: asyncio.Task[list[TrainingSample]] | None
    past: Past | None  # of a run with such players

    @property
    def changing(self) -> asyncio.Lock:
        """Held while weights change or are sent."""
        return self.policies[0].changing

    async def begin(self, progress: Progress) -> None:
        """Imitate the expert, if the settings ask for it, and give each engine its policy's weights."""
        if self.demonstrations is not None:
            sft, show = self.config.sft, self.tracker.sft_step
            self.tracker.phase("warm start", f"the expert plays {sft.episodes} episodes")
            played, seed = await self.demonstrations, self.config.trainer.seed
            others = (warm_start(own, played, sft, seed=seed) for own in self.models.own.values())
            await asyncio.gather(warm_start(self.models.policy, played, sft, show, seed), *others)
            await begin_as_policy(self.config, self.models, self.folder.start)
        await restore_reference(self.config, self.folder, self.models, progress.step)
        self.tracker.phase("connecting learner and engine")
        async with self.changing:
            await self.sync(progress.step)
            if self.past is not None:
                await self.past.keep(self.models.policy, progress.step)

    async def take_step(self, progress: Progress) -> Progress:
        clock = Clock(self.tracker.timeline)
        if self.past is not None:
            await self.past.meet(opponent_of(self.config, progress))
        self.tracker.activity(f"playing step {progress.step + 1}")
        rollout, journal = await self.rollouts.take(progress.step)
        self.tracker.activity(f"training step {progress.step + 1}")
        groups, greedy = rollout.groups, rollout.greedy
        if self.config.engine.placement == "colocated":
            async with self.changing:
                await self.sampler.engine.sleep()
        pools = self.draws.played(progress.step, groups, left_by(self.config, rollout, progress.step))
        clock.lap("rollout")

        async def send(progress: Progress) -> int:
            checksum = await self.sync(progress.step)
            if self.past is not None:
                await self.past.keep(self.models.policy, progress.step)
            await reset_reference(self.config, self.folder, self.models, progress.step)
            if self.config.trainer.staleness:  # else the next rollout begins after evaluation and checkpoint
                self.rollouts.begin(progress.step)
            return checksum

        progress, metrics = await train_on(self.config, self.models, progress, rollout, clock, self.changing, send)
        played = _trajectories(groups)
        write_jsonl(self.folder.episodes("train", progress.step), played)
        if greedy:
            write_jsonl(self.folder.episodes("greedy", progress.step), greedy)
        self.tracker.train_step(replace(metrics, pools=pools, **journal.counts()), played)
        return progress

    def watched(self) -> list[Watched]:
        roles = [role for role in vars(self.models).values() if isinstance(role, Learner)]
        return [*roles, *self.models.own.values(), *self.policies, *([] if self.past is None else [self.past])]

    async def save(self, progress: Progress) -> None:
        await self.checkpoints.save(progress, self.learners, self.draws.state())

    async def measure(self, step: int) -> None:
        """Play the held-out tasks with the present weights."""
        if self.past is not None:
            await self.past.meet(0)  # the same in every evaluation
        samples = self.config.trainer.eval_samples
        tasks = self.test_tasks.take(self.config.trainer.eval_episodes)
        times = f", {samples} episodes of each" if samples > 1 else ""
        self.tracker.activity(f"evaluating on {len(tasks)} held-out tasks{times}")
        trajectories = await self.sampler.evaluate(tasks, self.tracker.episode_ended, samples)
        write_jsonl(self.folder.episodes("eval", step), trajectories)
        self.tracker.evaluation(step, trajectories)
        if all(trajectory.failed for trajectory in trajectories):
            raise nothing_played("evaluation", trajectories)

    async def sync(self, version: int) -> int:
        """Move the weights of every policy into its engine as a version; one checksum of them all."""
        self.checksums[version] = checksum_of_policies([await policy.send(version) for policy in self.policies])
        return self.checksums[version]


async def play(
    config: Config,
    sampler: Sampler,
    tasks: TaskSet,
    show: OnEnd,
    step: int,
    drawn: Sequence[int],
    journal: Journal,
    before: asyncio.Task[tuple[Rollout, Journal]] | Sequence[Group] = (),
) -> tuple[Rollout, Journal]:
    """Play the first tasks that a step drew; with dynamic sampling further ones, until enough groups differ in their rewards.

    What the step `before` left, or will have left, counts too; more is played only when it is known.
    """
    trainer, algorithm = config.trainer, config.algorithm
    taken: list[Task] = []
    groups: list[Group] = []
    carried: Sequence[Group] = ()
    rounds, count = 0, trainer.groups_per_step
    with journal:
        while count:
            more = [tasks[place] for place in drawn[len(taken) :][:count]]
            groups += await sampler.collect(more, step, show, taken, journal)
            taken, rounds = taken + more, rounds + 1
            carried = left_by(config, (await before)[0], step - 1) if isinstance(before, asyncio.Task) else before
            wanted = more_groups(groups, algorithm, trainer.groups_per_step, rounds, len(carried))
            count = min(wanted, len(drawn) - len(taken))
        remax = algorithm.advantage.name == "remax"
        greedy = await sampler.play_greedily(taken, step, show, journal) if remax else []
    return Rollout(groups, greedy, rounds, carried), journal


def left_by(config: Config, rollout: Rollout, step: int) -> list[Group]:
    """The groups that a step leaves to the next one. StepError if a filter of the user's own fails."""
    wanted, oldest = config.trainer.groups_per_step, _oldest(config, rollout, step + 1)
    try:
        return surplus(rollout.groups, config.algorithm, wanted, rollout.carried, oldest)
    except ValueError as error:
        raise StepError(str(error)) from error


def _oldest(config: Config, rollout: Rollout, step: int) -> float:
    """The oldest version that a step may train on of what the step before left; none of ReMax, whose baselines are the step's own."""
    return math.inf if rollout.greedy else step - config.trainer.staleness


async def train_on(
    config: Config,
    models: Models,
    progress: Progress,
    rollout: Rollout,
    clock: Clock,
    changing: AbstractAsyncContextManager[object],
    send: Callable[[Progress], Awaitable[int]],
) -> tuple[Progress, StepMetrics]:
    """Choose, score, compute advantages, update: all of a step behind its rollout. The weights change and are sent inside `changing`.

    `send` is called with the new progress, and returns the checksum of the new weights.
    """
    groups, wanted, oldest = rollout.groups, config.trainer.groups_per_step, _oldest(config, rollout, progress.step + 1)
    try:
        kept, selection = choose(groups, config.algorithm, wanted, rollout.rounds, rollout.carried, oldest)
        kept = apart(kept, config.algorithm.credit)
        samples = training_samples(config, groups, kept)
    except ValueError as error:  # of a filter or a shaping of the user's own
        raise StepError(str(error)) from error
    samples = await add_reward_model_scores(models, samples)
    samples = await score_with_models(config, models, samples)
    by_learner = [  # the models of each policy, and what its players said
        (models.of(player), said, give_advantages(config, said, own, rollout.greedy, progress.kl_coef))
        for player, said, own in by_policy(kept, samples, models.own)
    ]
    clock.lap("score")

    kl_coef = progress.kl_coef
    async with changing:
        learned = await asyncio.gather(*(learn(config, of, progress, said, own) for of, said, own in by_learner))
        (update, critic, prm), *others = learned
        ratings, players = rated(config, progress, _trajectories(groups))
        progress = replace(after(config, progress, groups, selection.episodes, update), ratings=ratings)
        clock.lap("learn")

        checksum = await send(progress)
    clock.lap("sync")

    spread = mean_and_spread([sample for *_, own in by_learner for sample in own if sample.in_loss])
    measured = (clock, checksum, selection, spread, kl_coef, update, critic, prm, config.trainer.staleness > 0)
    own_updates = {player: update for player, (update, *_) in zip(models.own, others, strict=True)}
    return progress, replace(step_metrics(progress.step, groups, *measured), players=players, own=own_updates)


def training_samples(config: Config, played: Sequence[Group], kept: Sequence[Group]) -> list[TrainingSample]:
    """The samples of the kept trajectories that take part in advantages."""
    trajectories = _trajectories(played)
    if not any(t.sampled_tokens for t in trajectories if not t.failed):
        raise nothing_played("training step", trajectories)
    samples: list[TrainingSample] = []
    for group in kept:
        for trajectory, in_loss in participants(group, config.algorithm.overlong):
            rewards = turn_rewards(trajectory, config.algorithm)
            samples += samples_of(trajectory, config.sampling.temperature, rewards, in_loss)
    return samples


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
    """The samples with their advantages, and with the critic's targets; see `with_advantages`."""
    baselines = greedy_rewards(greedy, kept, config.algorithm)
    try:
        inputs = AdvantageInputs(config.algorithm, kept, samples, baselines, config.teacher.coef, kl_coef)
        return with_advantages(inputs, samples)
    except ValueError as error:
        raise StepError(f"algorithm.advantage.name={config.algorithm.advantage.name}: {error}") from error


async def learn(
    config: Config, models: Models, progress: Progress, kept: Sequence[Group], samples: Sequence[TrainingSample]
) -> tuple[UpdateMetrics | None, CriticMetrics | None, PrmMetrics | None]:
    """Update policy, critic and process reward model side by side; None for each that is not updated."""
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
    trajectories = _trajectories(played)
    kl, kl_coef = config.algorithm.kl, progress.kl_coef
    if kl.target is not None and update is not None and math.isfinite(update.kl_reference):
        kl_coef = adapted(kl_coef, update.kl_reference, kl.target, episodes, kl.horizon)
    return Progress(
        step=progress.step + 1,
        kl_coef=kl_coef,
        episodes=progress.episodes + sum(not trajectory.failed for trajectory in trajectories),
        tokens=progress.tokens + sum(trajectory.sampled_tokens for trajectory in trajectories),
    )


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def nothing_played(what: str, trajectories: Sequence[Trajectory]) -> StepError:
    """The error for a step or an evaluation without a usable episode."""
    error = next((t.error for t in trajectories if t.error), "no tokens were sampled")
    return StepError(
        f"not one of the {len(trajectories)} episodes of this {what} can be used; the first error: {error}"
    )


@asynccontextmanager
async def open_rl(
    config: Config, folder: RunFolder, tracker: Tracker, checkpoint: Checkpoint | None = None
) -> AsyncIterator[RlContext]:
    """Build or find the model, start Ray, engine and learner, and join the two by a weight group.

    However the block ends, the engine stops, the ranks are killed and Ray is shut down.
    """
    tracker.phase("reading tasks", config.env.id)
    spec = held(env_spec(config))  # a served environment stays the same when its servers restart
    if (choice := sandbox_choice(config)) is not None:
        tracker.note(f"sandbox: {choice}")
    train_tasks, test_tasks = spec.tasks(config.env.train_split), spec.tasks(config.env.test_split)
    texts = functools.partial(texts_of_env, spec.id, spec.kwargs, TOKENIZER_EPISODES, config.trainer.seed)
    model_dir = await asyncio.to_thread(find_model, config, folder, tracker, texts)
    await asyncio.to_thread(check_vocabularies, config, model_dir)
    renderer = await asyncio.to_thread(Renderer.of_folder, model_dir)
    async with AsyncExitStack() as stack:
        joined = await join_cluster(config, folder, model_dir, tracker, stack)
        config = joined.config
        make_env: Callable[[], Env] = spec.make
        if config.env.placement == "ray":
            tracker.phase("placing environments")
            make_env = (await stack.enter_async_context(placed_env(config, spec, tracker.note, tracker.timeline))).make
        warm = config.sft.episodes and checkpoint is None
        demonstrated = asyncio.create_task(_demonstrations(config, spec, model_dir)) if warm else None
        if demonstrated is not None:
            stack.callback(demonstrated.cancel)
        policies, models, past = await start_parts(joined, folder, model_dir, tracker, stack)
        engine, *others = (policy.engine for policy in policies)
        agents = await stack.enter_async_context(agents_of(config, folder.next_record(), engine, renderer))
        of_players = dict(zip(models.own, others, strict=True))
        sampler = sampler_of(config, make_env, engine, renderer, agents, past, of_players)
        draws = Draws(config, len(train_tasks), checkpoint.tasks() if checkpoint else None)
        checksums = trained_checksums(folder)
        playing = functools.partial(play, config, sampler, train_tasks, tracker.episode_ended)

        def play_step(step: int) -> Coroutine[Any, Any, tuple[Rollout, Journal]]:
            journal = Journal(folder.turns_of(step + 1), tracker.note, checksums)
            before = ahead.before(step) if config.algorithm.filter.rounds > 1 else None
            return playing(step, draws.of_step(step), journal, before or draws.surplus)

        ahead = Rollouts(play_step, config.trainer.staleness, config.trainer.steps)
        if config.engine.adaptive:
            following = follow_load(sampler.places, sampler.concurrency, engine, tracker.timeline)
            stack.callback(asyncio.create_task(following).cancel)
        stack.push_async_callback(ahead.close)
        learners, steps = learning(config, models), config.trainer.steps
        yield RlContext(
            **await open_parts(joined, folder, tracker, checkpoint, learners, steps, stack),
            policies=policies,
            sampler=sampler,
            draws=draws,
            rollouts=ahead,
            checksums=checksums,
            models=models,
            test_tasks=test_tasks,
            demonstrations=demonstrated,
            past=past,
        )


def trained_checksums(folder: RunFolder) -> dict[int, int]:
    """The checksums of the weights by version, as far as the run has trained; it goes on from the last of them."""
    records = read_metrics(folder.metrics) if folder.metrics.exists() else []
    return {record["step"]: record["weights_checksum"] for record in records if record["kind"] == "train"}


def sampler_of(
    config: Config,
    make_env: Callable[[], Env],
    engine: Engine,
    renderer: Renderer,
    agents: Agents | None = None,
    past: Past | None = None,
    of_players: Mapping[str, Engine] | None = None,
) -> Sampler:
    """`engine` plays all but the players that have policies of their own, whose engines are `of_players`."""
    # An engine limits its answers itself, without the time in which a request waits for a new server, say.
    limits = Limits(step_timeout=config.env.step_timeout or "auto", act_timeout=None)
    if agents is not None:
        own = config.agent
        limits = replace(limits, max_turns=own.max_turns, tokens=own.max_episode_tokens, episode_timeout=own.timeout)
    return Sampler(
        make_env,
        engine,
        renderer,
        Sampling(config.sampling.max_tokens, config.sampling.temperature),
        group_size=config.algorithm.group_size,
        seed=config.trainer.seed,
        concurrency=config.engine.max_concurrent * config.engine.servers,
        limits=limits,
        play=rollouts.load(config.env.rollout) if agents is None else play_agent,
        memory=config.memory,
        agents=agents,
        judge=None if config.judge.url is None else GroupJudge(config.judge, config.trainer.seed),
        others={player: maker_of(agent) for player, agent in config.env.players.items() if agent not in (PAST, OWN)},
        past={} if past is None else dict.fromkeys(past_players(config), past.engine),
        own=of_players or {},
    )


async def _demonstrations(config: Config, spec: EnvSpec, model_dir: Path) -> list[TrainingSample]:
    """A worker of Ray plays the expert while the engine starts: thousands of episodes would hold up this process."""
    playing = ray.remote(num_cpus=0)(demonstrations).remote(config, spec, str(model_dir))
    try:
        return await asyncio.wait_for(asyncio.wrap_future(playing.future()), DEMONSTRATION_SECONDS)
    except RayTaskError as error:
        if isinstance(error.cause, ImportError):
            there = "install its package on every node, or start in the folder of its file"
            raise PlacementError(f"a worker of Ray cannot import the environment: {error.cause}: {there}") from None
        raise error.cause from None
    except RayError as error:
        raise LostError(f"the worker that makes the expert's demonstrations died: {error}") from error
    except TimeoutError:
        raise TimeoutError(f"the expert's demonstrations took longer than {DEMONSTRATION_SECONDS:g} s") from None
