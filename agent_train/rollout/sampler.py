"""From tasks to groups of trajectories of exact tokens. Nothing here depends on the order in which episodes finish."""

import asyncio
import copy
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agent_train.config.schema import MemoryConfig
from agent_train.engine.base import Completion, Engine, EngineLostError, Sampling
from agent_train.rollout.agents import Agents
from agent_train.rollout.group_judge import GroupJudge
from agent_train.rollout.journal import Journal
from agent_train.rollout.memory import RecentMemory, SummaryMemory
from agent_train.rollout.places import Places
from agent_train.rollout.renderer import Rendered, Renderer
from agent_train.trainer.schedule import derive_seed
from agentgym.core.env import Env
from agentgym.core.executor import name_of
from agentgym.core.messages import Message
from agentgym.core.tasks import Task
from agentgym.core.tracebacks import place_of, text_of_error, traceback_of
from agentgym.core.trajectory import Group, Tokens, Trajectory
from agentgym.evaluate.agents import MakePolicy
from agentgym.policies.base import ByPlayer, EndEpisode, Policy, Reply
from agentgym.rollout.episode import Episode, Limits, Rollout, run_episode, run_many

OnEnd = Callable[[Trajectory], None]


def admit(*, batch: int, version: int, staleness: int, accepted: int, running: int, max_concurrent: int) -> int:
    """The number of trajectories, or of whole batches (`batch=1`), that may start now (AReaL, arXiv:2505.24298).

    None is then more than `staleness` versions old when it is trained on, if batches take them in the order of their start.
    `batch` of them are one step; `accepted` have finished since the run began, and `running` are in flight.
    """
    return max(0, min(max_concurrent - running, (staleness + version + 1) * batch - (accepted + running)))


def episode_key(seed: int | None) -> str:
    """The name of an episode, by its seed, in the engine and the journal."""
    return "" if seed is None else f"{seed:x}"


class TokenPolicy:
    """Answers one episode with an engine. One object per episode: it holds the tokens said so far.

    The `stop_token_ids` of `sampling` default to the renderer's. Each turn's seed derives from the episode's `seed`, by which the
    engine and `journal` know the episode; None: unseeded, and without a journal. With a `memory` the model sees a part of the
    conversation; a summary is a turn of its own, to the engine and the journal. Each player of an episode has an object of
    its own, `for_player`; the first one is then not asked.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        seed: int | None,
        journal: Journal | None = None,
        memory: MemoryConfig | None = None,
    ):
        self._engine = engine
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or renderer.stop_token_ids)
        self._seed = seed
        self._episode = episode_key(seed)
        self._previous: Rendered | None = None
        self._turn = 0
        self._journal = journal or Journal()
        self._journal.begin(self._episode, engine.version)
        self._settings = memory
        self._memory = self._new_memory()
        self._lost = False  # the last summary is none to go on with

    def _new_memory(self) -> RecentMemory | SummaryMemory | None:
        if self._settings is None or self._settings.name == "none":
            return None
        if self._settings.name == "recent":
            return RecentMemory(self._settings.turns)
        return SummaryMemory(self._settings, self._renderer, self._engine.max_model_len, self._sampling.max_tokens)

    def for_player(self, name: str, engine: Engine | None = None) -> "TokenPolicy":
        """The same for a player's conversation, with its own seeds, in the episode's journal. `engine` answers in place of this one's."""
        own = copy.copy(self)
        own._engine = engine or self._engine
        own._seed = None if self._seed is None else derive_seed(self._seed, "player", name)
        own._memory = self._new_memory()
        return own

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Sample the answer to the whole conversation so far, or a summary of it.

        DivergedError if the journal has the answer to another conversation, EndEpisode("context") if there is no room for one.
        """
        if self._lost:
            raise EndEpisode("context")
        seen = messages if self._memory is None else self._memory.view(messages)
        prompt = self._renderer.prompt(seen, tools, self._previous)
        if isinstance(self._memory, SummaryMemory) and self._memory.is_due(messages, prompt):
            request, asking = self._memory.request(messages, tools, self._previous)
            if self._fits(asking, self._memory.tokens):  # else an answer may, whatever follows it
                reply = await self._said(asking, self._memory.tokens)
                finish = reply.tokens.finish_reason if reply.tokens else "stop"
                self._lost = not self._memory.take(messages, reply.message, finish)
                return replace(reply, request=request)
        if not self._fits(prompt, self._sampling.max_tokens):
            raise EndEpisode("context")
        return await self._said(prompt, self._sampling.max_tokens)

    def _fits(self, prompt: Rendered, most: int) -> bool:
        return len(prompt.ids) + most <= self._engine.max_model_len

    async def _said(self, prompt: Rendered, most: int) -> Reply:
        """The model's reply to a prompt, in at most so many tokens."""
        completion = await self._completion(prompt, most)
        message = self._renderer.parse(completion.ids, self._turn)
        self._previous = prompt.answered(completion.ids)
        self._turn += 1
        said = list(completion.ids), list(completion.logprobs), list(completion.versions)
        tokens = Tokens(prompt.ids, *said, completion.finish_reason)
        usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(completion.ids)}
        return Reply(message, tokens, usage)

    async def _completion(self, prompt: Rendered, most: int) -> Completion:
        """From the journal while it has turns of the episode, then from the engine, and into the journal."""
        said = [*self._previous.ids, *self._previous.completion] if self._previous else []
        shared = len(said) if prompt.ids[: len(said)] == said else 0
        new = prompt.ids[shared:]
        completion = self._journal.answer(self._episode, shared, new)
        if completion is None:
            completion = await self._sample(prompt, most)
            self._journal.keep(self._episode, shared, new, completion)
        return completion

    async def _sample(self, prompt: Rendered, most: int) -> Completion:
        seed = None if self._seed is None else derive_seed(self._seed, "turn", self._turn)
        sampling = Sampling(most, self._sampling.temperature, self._sampling.stop_token_ids, seed)
        return await self._engine.generate(prompt.ids, sampling, self._episode or None)


class PastPolicy:
    """Plays as another policy does, and does not learn: its tokens are in the journal alone."""

    def __init__(self, policy: Policy):
        self._policy = policy

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        return replace(await self._policy.act(messages, tools), tokens=None)


@dataclass
class Sampler:
    """Plays episodes with the engine's present weights.

    Calls may overlap. They share the places, at most `concurrency`, which evaluations get first and then the earlier steps.
    """

    make_env: Callable[[], Env]
    engine: Engine
    renderer: Renderer
    sampling: Sampling  # of every turn; its seed is replaced
    group_size: int = 1  # trajectories of one task in training
    seed: int = 0  # of the run
    concurrency: int = 64  # most episodes at a time
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    play: Rollout = run_episode  # runs one episode; see `run_many`
    memory: MemoryConfig | None = None  # of every episode
    agents: Agents | None = None  # that play by themselves, in place of the run's own loop
    others: Mapping[str, MakePolicy] = field(default_factory=dict)  # who plays the players that do not learn
    past: Mapping[str, Engine] = field(default_factory=dict)  # by player: the engine with its earlier weights
    own: Mapping[str, Engine] = field(default_factory=dict)  # by player: that of its own policy
    judge: GroupJudge | None = None  # of every group

    def __post_init__(self) -> None:
        self.places = Places(self.concurrency)
        if self.memory is not None and self.memory.name == "summary":
            # Refuses one without room before anything is played.
            SummaryMemory(self.memory, self.renderer, self.engine.max_model_len, self.sampling.max_tokens)

    async def collect(
        self,
        tasks: Sequence[Task],
        step: int,
        on_end: OnEnd | None = None,
        before: Sequence[Task] = (),
        journal: Journal | None = None,
    ) -> list[Group]:
        """Play each task `group_size` times; a group for each, in order, with all samples in order, failed ones too.

        The samples of a task that occurs twice count on, as do positions from the tasks that the step has played `before`.
        The step's `journal` answers the turns that it has, and gets the others. An episode that fails is tried again as
        `Journal.again` says.

        Raises:
            EngineError: an episode failed because the engine is dead, or all did and it lost a part meanwhile (EngineLostError).
        """
        batch = len(tasks) * self.group_size
        episodes = []
        met = Counter(task.id for task in before)
        for position, task in enumerate(tasks, start=len(before)):
            for k in range(self.group_size):
                sample = met[task.id] * self.group_size + k
                episodes.append(Episode(task, sample, derive_seed(self.seed, "train", step, position, k)))
            met[task.id] += 1
        trajectories = await self._play(episodes, self.sampling, step, on_end, journal)
        parts = [trajectories[start : start + self.group_size] for start in range(0, batch, self.group_size)]
        groups = [Group(task.id, part) for task, part in zip(tasks, parts, strict=True)]
        if self.judge is not None:
            await asyncio.gather(*map(self.judge.judge, groups, tasks))
        return groups

    async def play_greedily(
        self, tasks: Sequence[Task], step: int, on_end: OnEnd | None = None, journal: Journal | None = None
    ) -> list[Trajectory]:
        """Play each task once at temperature 0, in order: ReMax's baseline (arXiv 2310.10505). `journal` and errors as of `collect`."""
        greedy = replace(self.sampling, temperature=0.0)
        episodes = [Episode(task, 0, derive_seed(self.seed, "greedy", step, n)) for n, task in enumerate(tasks)]
        return await self._play(episodes, greedy, step, on_end, journal)

    async def evaluate(self, tasks: Sequence[Task], on_end: OnEnd | None = None, samples: int = 1) -> list[Trajectory]:
        """Play all held-out tasks in order, `samples` times, with the same seeds in every evaluation of a run. Raises as `collect`.

        No turn of it is on disk: a run that goes back measures other weights.
        """
        numbered = enumerate(list(tasks) * samples)
        episodes = [Episode(task, n // len(tasks), derive_seed(self.seed, "eval", n)) for n, task in numbered]
        return await self._play(episodes, self.sampling, -1, on_end)

    async def _play(
        self,
        episodes: Sequence[Episode],
        sampling: Sampling,
        order: int,
        on_end: OnEnd | None,
        journal: Journal | None = None,
    ) -> list[Trajectory]:
        """Run the episodes in places of this order; the engine's sessions are of those that may still ask it.

        The `schedule` in a trajectory's metadata has the engine's version when it began, and its begin and end in Unix seconds.
        """
        kept = journal or Journal()

        def ended(trajectory: Trajectory) -> None:
            trajectory.metadata["schedule"] = {**kept.end(episode_key(trajectory.seed)), "ended": time.time()}
            if on_end is not None:
                on_end(trajectory)

        @asynccontextmanager
        async def place() -> AsyncIterator[None]:
            await self.places.take(order)
            self.engine.open_session()
            try:
                yield
            finally:
                self.engine.close_session()
                self.places.leave()

        async def play(*given: Any, **more: Any) -> Trajectory:
            if self.places.short(order):
                self.engine.close_session()  # meanwhile no batch waits for this one
                try:
                    await self.places.exchange(order)
                finally:
                    self.engine.open_session()
            return await self._played(*given, **more)

        losses = await self._losses()
        trajectories = await run_many(
            self.make_env,
            partial(self._policy, sampling, kept),
            episodes,
            concurrency=self.concurrency,
            limits=self.limits,
            retries=lambda trajectory: kept.again(episode_key(trajectory.seed)),
            on_end=ended,
            play=play,
            place=place,
        )
        await self._raise_common_cause([t for t in trajectories if t.failed], len(trajectories), losses)
        return trajectories

    async def _played(
        self, env: Env, policy: Policy, task: Task, *, seed: int | None, sample: int, **more: Any
    ) -> Trajectory:
        """One episode. It has failed if a rollout of the user's own raises or returns another thing."""
        try:
            trajectory = await self.play(env, policy, task, seed=seed, sample=sample, **more)
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"a rollout returns a Trajectory, not {type(trajectory).__name__}")
        except Exception as error:
            place = f" ({found})" if (found := place_of(error)) else ""
            why = f"env.rollout failed for task {task.id!r}: {type(error).__name__}: {text_of_error(error)}{place}"
            trajectory = Trajectory(f"{task.id}/{sample}", name_of(env), task.id, sample, end="error", error=why)
            trajectory.metadata["traceback"] = traceback_of(error)
        trajectory.seed = seed  # the journal knows it by this, whatever plays it
        return trajectory

    def _policy(self, sampling: Sampling, journal: Journal, episode: Episode) -> Policy:
        if self.agents is not None:
            return self.agents.policy(episode_key(episode.seed), episode.seed, journal)
        learning = TokenPolicy(self.engine, self.renderer, sampling, episode.seed, journal, self.memory)
        others: dict[str, Policy] = {name: make(episode) for name, make in self.others.items()}
        others |= {name: PastPolicy(learning.for_player(name, engine)) for name, engine in self.past.items()}
        others |= {name: learning.for_player(name, engine) for name, engine in self.own.items()}
        return ByPlayer(others, learning) if others else learning

    async def _raise_common_cause(self, failed: Sequence[Trajectory], played: int, losses: int) -> None:
        """Raise EngineError if an engine is dead, or EngineLostError if every episode failed and there were more losses since."""
        for engine in self._engines() if failed else ():
            await engine.live()
        if failed and len(failed) == played and (lost := await self._losses() - losses):
            parts = f"while the engine lost {lost} of its parts"
            raise EngineLostError(f"none of {played} episodes ended well {parts}; the first error: {failed[0].error}")

    def _engines(self) -> set[Engine]:
        return {self.engine, *self.past.values(), *self.own.values()}

    async def _losses(self) -> int:
        return sum([await engine.losses() for engine in self._engines()])
