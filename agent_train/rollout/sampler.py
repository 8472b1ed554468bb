"""From tasks to groups of trajectories of exact tokens. Nothing here depends on the order in which episodes finish."""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_train.engine.base import Engine, Sampling
from agent_train.rollout.renderer import Rendered, Renderer
from agent_train.trainer.schedule import derive_seed
from agentgym.core.env import Env
from agentgym.core.messages import Message
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Group, Tokens, Trajectory
from agentgym.policies.base import EndEpisode, Reply
from agentgym.rollout.episode import Episode, Limits, Rollout, run_episode, run_many

OnEnd = Callable[[Trajectory], None]


def pick_tasks(tasks: TaskSet, first: int, count: int, seed: int) -> list[Task]:
    """`count` tasks, from place `first`, of an endless sequence of epochs, each in a new order.

    The sequence follows from the seed alone, so a resumed run continues where it was (`Progress.tasks`).
    """
    if not len(tasks):
        raise ValueError(f"task set {tasks.name!r} is empty: there is nothing to train on")
    if first < 0 or count < 1:
        raise ValueError(f"the first place must be at least 0 and the count at least 1, not {first} and {count}")
    picked = []
    for position in range(first, first + count):
        epoch, place = divmod(position, len(tasks))
        picked.append(tasks[_order(len(tasks), derive_seed(seed, "epoch", epoch))[place]])
    return picked


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


def admit(*, batch: int, version: int, staleness: int, accepted: int, running: int, max_concurrent: int) -> int:
    """The number of trajectories that may start now (AReaL, arXiv:2505.24298).

    None is then more than `staleness` versions old when it is trained on, if batches take trajectories in the order of their
    start. `batch` trajectories are one step; `accepted` have finished since the run began, and `running` are in flight.
    """
    return max(0, min(max_concurrent - running, (staleness + version + 1) * batch - (accepted + running)))


class TokenPolicy:
    """Answers one episode with an engine. One object per episode: it holds the tokens said so far.

    The `stop_token_ids` of `sampling` default to the renderer's. Each turn's seed derives from the episode's `seed`, by which the
    engine knows the episode; None: unseeded.
    """

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling, seed: int | None):
        self._engine = engine
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids or renderer.stop_token_ids)
        self._seed = seed
        self._episode = None if seed is None else f"{seed:x}"
        self._previous: Rendered | None = None
        self._turn = 0

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """Sample the answer to the whole conversation so far."""
        prompt = self._renderer.prompt(messages, tools, self._previous)
        if len(prompt.ids) + self._sampling.max_tokens > self._engine.max_model_len:
            raise EndEpisode("context")
        seed = None if self._seed is None else derive_seed(self._seed, "turn", self._turn)
        completion = await self._engine.generate(prompt.ids, replace(self._sampling, seed=seed), self._episode)
        message = self._renderer.parse(completion.ids, self._turn)
        self._previous = prompt.answered(completion.ids)
        self._turn += 1
        said = list(completion.ids), list(completion.logprobs), list(completion.versions)
        tokens = Tokens(prompt.ids, *said, completion.finish_reason)
        usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(completion.ids)}
        return Reply(message, tokens, usage)


@dataclass(frozen=True)
class Sampler:
    """Plays episodes with the engine's present weights."""

    make_env: Callable[[], Env]
    engine: Engine
    renderer: Renderer
    sampling: Sampling  # of every turn; its seed is replaced
    group_size: int = 1  # trajectories of one task in training
    seed: int = 0  # of the run
    concurrency: int = 64  # most episodes at a time
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    play: Rollout = run_episode  # runs one episode; see `run_many`

    async def collect(
        self, tasks: Sequence[Task], step: int, on_end: OnEnd | None = None, before: Sequence[Task] = ()
    ) -> list[Group]:
        """Play each task `group_size` times; a group for each, in order, with all samples in order, failed ones too.

        The samples of a task that occurs twice count on, as do positions from the tasks that the step has played `before`.

        Raises:
            EngineError: an episode failed because the engine is dead.
        """
        batch = len(tasks) * self.group_size
        at_once = admit(
            batch=batch, version=step, staleness=0, accepted=step * batch, running=0, max_concurrent=self.concurrency
        )
        episodes = []
        met = Counter(task.id for task in before)
        for position, task in enumerate(tasks, start=len(before)):
            for k in range(self.group_size):
                sample = met[task.id] * self.group_size + k
                episodes.append(Episode(task, sample, derive_seed(self.seed, "train", step, position, k)))
            met[task.id] += 1
        trajectories = await self._play(episodes, self.sampling, at_once, on_end)
        groups = [trajectories[start : start + self.group_size] for start in range(0, batch, self.group_size)]
        return [Group(task.id, group) for task, group in zip(tasks, groups, strict=True)]

    async def play_greedily(self, tasks: Sequence[Task], step: int, on_end: OnEnd | None = None) -> list[Trajectory]:
        """Play each task once at temperature 0, in order: ReMax's baseline (arXiv 2310.10505). Raises as `collect`."""
        greedy = replace(self.sampling, temperature=0.0)
        episodes = [Episode(task, 0, derive_seed(self.seed, "greedy", step, n)) for n, task in enumerate(tasks)]
        return await self._play(episodes, greedy, self.concurrency, on_end)

    async def evaluate(self, tasks: Sequence[Task], on_end: OnEnd | None = None) -> list[Trajectory]:
        """Play each held-out task once, in order, with the same seeds in every evaluation of a run. Raises as `collect`."""
        episodes = [Episode(task, 0, derive_seed(self.seed, "eval", n)) for n, task in enumerate(tasks)]
        return await self._play(episodes, self.sampling, self.concurrency, on_end)

    async def _play(
        self, episodes: Sequence[Episode], sampling: Sampling, concurrency: int, on_end: OnEnd | None
    ) -> list[Trajectory]:
        """Run the episodes; the engine's sessions are the episodes that may still ask it."""
        left = len(episodes)
        sessions = min(concurrency, left)

        def make_policy(episode: Episode) -> TokenPolicy:
            return TokenPolicy(self.engine, self.renderer, sampling, episode.seed)

        def ended(trajectory: Trajectory) -> None:
            nonlocal left, sessions
            left -= 1
            if left < sessions:  # no episode waits for the place that is free now
                sessions -= 1
                self.engine.close_session()
            if on_end is not None:
                on_end(trajectory)

        self.engine.open_session(sessions)
        try:
            trajectories = await run_many(
                self.make_env,
                make_policy,
                episodes,
                concurrency=concurrency,
                limits=self.limits,
                on_end=ended,
                play=self.play,
            )
        finally:
            self.engine.close_session(sessions)
        # Episodes fail separately; their common cause may be a dead engine.
        if any(trajectory.failed for trajectory in trajectories):
            await self.engine.live()
        return trajectories
