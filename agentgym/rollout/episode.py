"""The agent loop. Evaluation and training use it too.

If an environment or a policy fails, only its own trajectory ends with an error. An episode that the agent's own
programs broke is no failure: see `agentgym.core.agent_failure`.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from agentgym.core.agent_failure import STEP_TIMEOUT
from agentgym.core.env import Env, Opening, failed_step, is_async
from agentgym.core.executor import EnvExecutor, close_env, discard, executor_of, has_executor, name_of
from agentgym.core.messages import Message, text_of
from agentgym.core.tasks import Task
from agentgym.core.trajectory import TOO_LONG, Summary, Trajectory, Turn
from agentgym.policies.base import KEY_REFUSED, ByPlayer, EndEpisode, Policy, Reply
from agentgym.rollout.calls import (
    CallFailed,
    CallTimeout,
    Check,
    bounded,
    checked_cut_off,
    checked_reply,
    checked_reset,
    checked_step,
    contained,
    next_player,
    numbers_in,
)

STEP_SECONDS = 60.0  # for one step, unless the environment says that it takes longer


@dataclass(frozen=True)
class Limits:
    """Limits of an episode: turns, tokens, and seconds for each call. None means no limit.

    Attributes:
        max_turns: replies after which the loop ends an episode ("max_turns"); the environment's own limit still holds.
        tokens: read and written by the policy in all turns when the loop ends the episode ("tokens").
        init_timeout: making an environment, and its `init`; more for that, where the environment has `init_seconds`.
        step_timeout: also of `cut_off`; "auto" is a minute, or the environment's `step_seconds` if that is more.
        episode_timeout: the whole episode ("time"); checked between calls and while the policy acts.
    """

    max_turns: int | None = None
    tokens: int | None = None
    init_timeout: float | None = 120.0
    reset_timeout: float | None = 60.0
    step_timeout: float | Literal["auto"] | None = "auto"
    act_timeout: float | None = 300.0
    close_timeout: float | None = 5.0
    episode_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (name, value) != ("step_timeout", "auto") and value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, not {value!r}")

    def init_limit(self, env: Env) -> float | None:
        """Seconds for `init` of an environment."""
        own: float | None = env.get_wrapper_attr("init_seconds")
        return self.init_timeout and max(self.init_timeout, own or 0.0)

    def step_limit(self, env: Env) -> float | None:
        """Seconds for one step of an environment."""
        own: float | None = env.get_wrapper_attr("step_seconds")
        return max(STEP_SECONDS, own or 0.0) if self.step_timeout == "auto" else self.step_timeout


@dataclass(frozen=True)
class Episode:
    task: Task
    sample: int = 0
    seed: int | None = None


async def run_episode(
    env: Env,
    policy: Policy | Mapping[str, Policy],
    task: Task | None = None,
    *,
    seed: int | None = None,
    limits: Limits = Limits(),
    env_id: str = "",
    sample: int = 0,
    id: str | None = None,
) -> Trajectory:
    """Run one episode and return its trajectory. The environment stays open for the next one.

    After a failure of the environment or the policy, the trajectory's `end` is "error", its `error` says which call failed, where
    and after how long, and it has the turns before.

    Args:
        env: its `def` methods run in one thread, the same for every episode.
        policy: answers the messages; `EndEpisode(reason)` truncates the episode with that reason, which the environment's
            `cut_off` is told. A policy that calls the environment itself has `attach(env, call)`, which is called first. In
            an environment with several players it answers for all, each with the player's own messages, or is one for each
            player by name. One that keeps a conversation has `for_player(name)`, which makes that of a player.
        task: bound by `init`. None: the task already bound, or the one that `reset(seed)` draws.
        env_id, id: recorded. Default: the id that the environment was made by, and `"{task.id}/{sample}"`.
    """
    started = time.perf_counter()
    trajectory = Trajectory("", env_id or name_of(env), task.id if task else "", sample, seed)
    try:
        one = ByPlayer(policy) if isinstance(policy, Mapping) else policy
        await _play(env, one, task, trajectory, limits)
    except EndEpisode as end:
        trajectory.end = end.reason
        if end.reason == "context" and not trajectory.turns:
            trajectory.end, trajectory.error = "error", f"{_where(trajectory)}: {TOO_LONG}"
    except CallFailed as error:
        trajectory.end = "error"
        trajectory.error = f"{_where(trajectory)}: {error}"
        trajectory.metadata |= error.facts()
        trajectory.metadata["floor"] = float(env.get_wrapper_attr("floor"))
    trajectory.id = id or f"{trajectory.task_id}/{sample}"
    trajectory.metrics = numbers_in(trajectory.turns[-1].info) if trajectory.turns else {}
    trajectory.seconds = time.perf_counter() - started
    return trajectory


def _where(trajectory: Trajectory) -> str:
    return f"{trajectory.env}, task {trajectory.task_id!r}, turn {len(trajectory.turns)}"


async def _play(env: Env, policy: Policy, task: Task | None, trajectory: Trajectory, limits: Limits) -> None:
    """Fill the trajectory as the episode goes, so that a failure keeps the turns before it."""
    executor, began = executor_of(env), time.monotonic()
    if executor.busy:
        raise CallFailed("the environment is still in an earlier call that took too long; make a new one")
    deadline = None if limits.episode_timeout is None else time.perf_counter() + limits.episode_timeout

    observation, info = await _opened(env, executor, policy, task, trajectory, limits)
    tools, step_limit = env.get_wrapper_attr("tools"), limits.step_limit(env)
    player, speaker = next_player(info), cache(partial(_speaker, policy))
    conversations: dict[str | None, list[Message]] = defaultdict(list)
    conversations[player] += observation
    stepped = partial(_stepped, env, executor, trajectory, step_limit, began)

    while True:
        trajectory.final_observation = observation
        started = time.perf_counter()
        try:
            _check_limits(trajectory, limits)
            reply = await _act(speaker(player), conversations[player], tools, limits, deadline)
        except EndEpisode as end:
            if trajectory.turns and (last := await stepped("cut_off", end.reason, checked_cut_off)) is not None:
                next_player(last[4], player)
                trajectory.judged(last[0], last[1], last[4])
            raise
        acted = time.perf_counter()
        reason = reply.finish_reason or (reply.tokens.finish_reason if reply.tokens else None)
        if reply.request is not None:
            said = (reply.request, reply.message, reply.tokens, acted - started, reply.usage, reason)
            trajectory.summaries.append(Summary(len(trajectory.turns), *said, player))
            continue
        turn = Turn(observation, reply.message, tokens=reply.tokens, usage=reply.usage, finish_reason=reason)
        turn.player, turn.act_seconds = player, acted - started
        trajectory.turns.append(turn)
        trajectory.final_observation = []
        silent = not text_of(reply.message).strip() and not reply.message.get("tool_calls")
        if silent and turn.finish_reason == "content_filter":
            raise CallFailed("the endpoint's content filter withheld the whole answer (finish_reason: content_filter)")
        if reply.failure is None:
            outcome = await stepped("step", reply.message, checked_step)
        else:
            outcome = _failed_by_agent(env, trajectory, reply.failure)
        conversations[player].append(reply.message)
        player = next_player(outcome[4], player)
        observation, turn.reward, terminated, truncated, turn.info = outcome
        turn.step_seconds = time.perf_counter() - acted
        conversations[player] += observation
        if terminated or truncated:
            trajectory.final_observation = observation
            trajectory.end = "terminated" if terminated else "truncated"
            return


async def _opened(
    env: Env, executor: EnvExecutor, policy: Policy, task: Task | None, trajectory: Trajectory, limits: Limits
) -> tuple[list[Message], dict[str, Any]]:
    """The opening and its info, once each policy that calls the environment itself has been attached to it."""
    if hasattr(policy, "attach"):
        policy.attach(env, executor.call)
    observation, info = await _begin(env, executor, task, trajectory.seed, limits)
    if info.get("state") is not None:  # of the first turn; those of the others are in their turns' info
        trajectory.metadata["state"] = info["state"]
    if (bound := getattr(env.unwrapped, "task", None)) is not None:
        trajectory.task_id = bound.id or trajectory.task_id
    return observation, info


def _speaker(policy: Policy, player: str | None) -> Policy:
    """The policy that answers for a player; None: for the only agent."""
    try:
        found: Policy = policy.for_player(player) if player is not None and hasattr(policy, "for_player") else policy
    except LookupError as error:
        raise CallFailed(str(error)) from error
    return found


async def _stepped(
    env: Env,
    executor: EnvExecutor,
    trajectory: Trajectory,
    limit: float | None,
    began: float,
    name: Literal["step", "cut_off"],
    given: Any,
    check: Check,
) -> Any:
    """The outcome of a call of the environment; one that the agent's programs make hang is a failed step."""
    try:
        return await bounded(name, executor.start_method(env, name, given), limit, check)
    except CallTimeout:
        if not await _hung_by_agent(env, executor, began):
            raise
        return _failed_by_agent(env, trajectory, STEP_TIMEOUT)


def _failed_by_agent(env: Env, trajectory: Trajectory, cause: str) -> Any:
    floor = float(env.get_wrapper_attr("floor"))
    by_player = {player: floor - earned for player, earned in trajectory.rewards.items()}
    return failed_step(cause, floor - trajectory.reward, by_player)


def _check_limits(trajectory: Trajectory, limits: Limits) -> None:
    if limits.max_turns is not None and len(trajectory.turns) >= limits.max_turns:
        raise EndEpisode("max_turns")
    if limits.tokens is not None and sum(map(_tokens, trajectory.calls())) >= limits.tokens:
        raise EndEpisode("tokens")


async def _hung_by_agent(env: Env, executor: EnvExecutor, began: float) -> bool:
    """True if the agent made a step hang: its programs have run in the episode, and their back end is up."""
    from agentgym.sandbox.leases import program_since  # here: most episodes need no sandbox

    up = program_since(executor.thread, began) or env.get_wrapper_attr("hung_by_agent")
    return await asyncio.to_thread(up)


async def _begin(env: Env, executor: EnvExecutor, task: Task | None, seed: int | None, limits: Limits) -> Opening:
    """`init`, where there is a task to bind, and `reset`. Two `def` go to the thread together: changing threads takes time."""
    bound = False

    def init() -> Any:
        nonlocal bound
        returned = env.get_wrapper_attr("init")(task)
        bound = returned is None  # else an awaitable, which the executor awaits
        return returned

    def reset() -> Any:
        return env.reset(seed=seed) if bound else None

    if task is not None and (is_async(env, "init") or is_async(env, "reset")):
        await bounded("init", executor.start_method(env, "init", task), limits.init_limit(env))
    elif task is not None:
        binding, resetting = executor.start(init), executor.start(reset)
        try:
            await bounded("init", binding, limits.init_limit(env))
            if bound:
                return await bounded("reset", resetting, limits.reset_timeout, checked_reset)
        finally:
            resetting.cancel()
    return await bounded("reset", executor.start_method(env, "reset", seed=seed), limits.reset_timeout, checked_reset)


async def _act(
    policy: Policy,
    conversation: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    limits: Limits,
    deadline: float | None,
) -> Reply:
    left = math.inf if deadline is None else deadline - time.perf_counter()
    if left <= 0:
        raise EndEpisode("time")
    seconds = min(left, limits.act_timeout or math.inf)

    async def act() -> Any:
        return await policy.act(list(conversation), tools)

    try:
        return await bounded("act", contained(act), seconds, checked_reply)
    except CallTimeout:
        if seconds == left:
            raise EndEpisode("time") from None
        raise


def _tokens(call: Turn | Summary) -> int:
    if call.tokens is not None:
        return len(call.tokens.prompt_ids) + len(call.tokens.completion_ids)
    return call.usage.get("prompt_tokens", 0) + call.usage.get("completion_tokens", 0)


async def run_many(
    make_env: Callable[[], Env],
    make_policy: Callable[[Episode], Policy],
    episodes: Sequence[Episode],
    *,
    concurrency: int = 64,
    limits: Limits = Limits(),
    retries: "int | Again" = 1,
    on_end: Callable[[Trajectory], None] | None = None,
    env_id: str = "",
    go_on: Callable[[], bool] = lambda: True,
    play: "Rollout | None" = None,
    place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
) -> list[Trajectory]:
    """Run episodes, at most `concurrency` at a time, each in its own environment.

    An environment is reused unless its last episode failed. All are closed at the end, also after an exception. Trajectories are
    returned in the order of `episodes`.

    Args:
        make_env: makes a new environment; called in the thread that will run it.
        retries: how often a failed episode is run again, from its start and with its seed; or a function that says whether. The
            errors before the last are in the trajectory's `metadata["errors"]`.
        on_end: called with each trajectory as it ends.
        go_on: called before each episode; once it returns False, no other begins, and the running ones are finished.
        play: runs one episode, with the arguments of `run_episode`, which is the default.
        place: entered by each of the `concurrency` slots before its first episode and left after its last: for what calls share.

    Raises:
        ValueError: `make_env` gave the same environment twice, or a number is too small.
        Exception: `make_policy` or `on_end` raised; this stops all episodes.
    """
    results: dict[int, Trajectory] = {}

    def ended(index: int, trajectory: Trajectory) -> None:
        results[index] = trajectory
        if on_end is not None:
            on_end(trajectory)

    batch = Batch(make_env, make_policy, episodes, ended, limits, env_id, play=play or run_episode)
    await run_batches([batch], concurrency=concurrency, retries=retries, go_on=go_on, place=place)
    return [results[index] for index in sorted(results)]


Rollout = Callable[..., Awaitable[Trajectory]]
"""Runs one episode with the arguments of `run_episode`, and returns its trajectory."""
Again = Callable[[Trajectory], bool]
"""True if the failed episode of this trajectory is to be run again."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Episodes of one environment; arguments as in `run_many`. `on_end` also gets the episode's position."""

    make_env: Callable[[], Env]
    make_policy: Callable[[Episode], Policy]
    episodes: Sequence[Episode]
    on_end: Callable[[int, Trajectory], None]
    limits: Limits = Limits()
    env_id: str = ""
    on_begin: Callable[[], None] = lambda: None
    play: Rollout = run_episode


async def run_batches(
    batches: Sequence[Batch],
    *,
    concurrency: int = 64,
    retries: int | Again = 1,
    go_on: Callable[[], bool] = lambda: True,
    place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
) -> None:
    """Run the episodes of several batches, which share the slots evenly; at most `concurrency` of all at a time.

    A slot keeps its environment, and goes to another batch once its own has no episode left. Errors as in `run_many`.
    """
    if concurrency < 1 or (isinstance(retries, int) and retries < 0):
        raise ValueError(f"concurrency must be at least 1 and retries at least 0, not {concurrency} and {retries}")
    left = {batch: deque(range(len(batch.episodes))) for batch in batches}
    slots = dict.fromkeys(batches, 0)
    begun: set[Batch] = set()
    closing: list[asyncio.Task[None]] = []

    async def work() -> None:
        while waiting := [batch for batch in batches if left[batch]]:
            batch = min(waiting, key=slots.__getitem__)
            slot = _EnvSlot(batch, retries, closing)
            slots[batch] += 1
            try:
                while left[batch]:
                    if not go_on():
                        return
                    index = left[batch].popleft()
                    if batch not in begun:
                        begun.add(batch)
                        batch.on_begin()
                    coming = batch.episodes[left[batch][0]] if left[batch] else None
                    batch.on_end(index, await slot.run(batch.episodes[index], coming))
            finally:
                slot.close()
                slots[batch] -= 1

    async def work_in_place() -> None:
        async with place():
            await work()

    total = sum(len(batch.episodes) for batch in batches)
    await _finish([asyncio.create_task(work_in_place()) for _ in range(min(concurrency, total))], closing)


async def _finish(slots: list[asyncio.Task[None]], closing: list[asyncio.Task[None]]) -> None:
    """Wait for the slots. If one raises, or this is cancelled, the others end too; all environments are closed."""
    try:
        if slots:
            await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in slots:
            task.cancel()
        ends = await asyncio.gather(*slots, return_exceptions=True)
        if closing:
            try:
                await asyncio.wait(closing)
            except asyncio.CancelledError:  # keep waiting: each `close` has its own limit
                await asyncio.wait(closing)
                raise
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


@dataclass
class _EnvSlot:
    batch: Batch
    retries: int | Again
    closing: list[asyncio.Task[None]]
    env: Env | None = None

    async def run(self, episode: Episode, coming: Episode | None) -> Trajectory:
        """Play an episode, after its environment has begun to prepare for one that comes."""
        errors: list[str] = []
        while True:
            trajectory = await self._attempt(episode, coming)
            if not trajectory.failed or trajectory.metadata.get("status") == KEY_REFUSED:
                break
            if not (len(errors) < self.retries if isinstance(self.retries, int) else self.retries(trajectory)):
                break
            errors.append(str(trajectory.error))
        if errors:
            trajectory.metadata["errors"] = errors
        return trajectory

    async def _attempt(self, episode: Episode, coming: Episode | None) -> Trajectory:
        task, policy = episode.task, self.batch.make_policy(episode)
        try:
            env = self.env or await self._open()
            if coming is not None and (prepare := getattr(env.unwrapped, "prepare", None)) is not None:
                call = executor_of(env).start(prepare, coming.task)
                await bounded("prepare", call, self.batch.limits.init_timeout)
        except CallFailed as failure:
            self.close()  # whose `prepare` may still run
            error = f"{self.batch.env_id or 'environment'}, task {task.id!r}: {failure}"
            record = Trajectory(f"{task.id}/{episode.sample}", self.batch.env_id, task.id, episode.sample, episode.seed)
            return replace(record, end="error", error=error, metadata=failure.facts())
        given = {"seed": episode.seed, "sample": episode.sample, "env_id": self.batch.env_id}
        trajectory = await self.batch.play(env, policy, task, limits=self.batch.limits, **given)
        if trajectory.failed or executor_of(env).busy:  # busy: a step that the agent made hang
            self.close()
        return trajectory

    async def _open(self) -> Env:
        executor = EnvExecutor("agentgym environment")
        made: list[Env] = []

        def make() -> Env:
            made.append(self.batch.make_env())
            return made[0]

        try:
            env = await bounded("making the environment", executor.start(make), self.batch.limits.init_timeout)
        except BaseException:
            self.closing.append(asyncio.create_task(discard(executor, made, self.batch.limits.close_timeout)))
            raise
        if has_executor(env):
            raise ValueError("make_env gave the same environment twice: it must make a new one on every call")
        executor_of(env, executor)
        self.env = env
        return env

    def close(self) -> None:
        if self.env is not None:
            self.closing.append(asyncio.create_task(close_env(self.env, self.batch.limits.close_timeout)))
            self.env = None
