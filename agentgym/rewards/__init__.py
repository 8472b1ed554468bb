"""Rewards: named, weighted functions of an episode, and a wrapper that replaces an environment's reward. `judge` has a reward
function that asks a language model.

A reward function is `def` or `async def`, returns a finite number, and takes any of these by name: task, answer (the task's),
messages (the whole conversation), completion and completions (the texts of the last reply, of all), info (of the last step),
reward (the environment's own, summed over the turns), trajectory.

    rubric = Rubric([right, Reward(has_tags("think", "answer"), weight=0.2)])
    env = Rewarded(agentgym.make("gsm8k"), rubric)
"""

import asyncio
import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agentgym.core.agent_failure import cause_of
from agentgym.core.env import Env, Step, Wrapper, failed_step, is_async, is_finite
from agentgym.core.executor import EnvExecutor
from agentgym.core.messages import Action, Observation, assistant, text_of
from agentgym.core.tasks import Task
from agentgym.core.trajectory import REWARDS, TURN_OF, Trajectory, Turn
from agentgym.processes.isolate import call_isolated, reference
from agentgym.tools.text_forms import answer_in

T = TypeVar("T")
_Reset = tuple[Observation, dict[str, Any]]
RewardFunction = Callable[..., Any]

_OF_TASK = ("task", "answer")
_OF_EPISODE: dict[str, Callable[[Trajectory], Any]] = {
    "messages": lambda trajectory: trajectory.messages(),
    "completion": lambda trajectory: text_of(trajectory.turns[-1].reply) if trajectory.turns else "",
    "completions": lambda trajectory: [text_of(turn.reply) for turn in trajectory.turns],
    "info": lambda trajectory: dict(trajectory.turns[-1].info) if trajectory.turns else {},
    "reward": lambda trajectory: trajectory.reward,
    "trajectory": lambda trajectory: trajectory,
}
TAKES = (*_OF_TASK, *_OF_EPISODE)


class RewardError(RuntimeError):
    """A reward could not be computed: its function raised, took too long, or gave no finite number.

    In an episode it is a failure of the environment: the trajectory fails, may be run again, and counts in no mean.
    """


@dataclass(frozen=True)
class Reward:
    """One function of a rubric.

    Attributes:
        function: takes any of `TAKES` by name; other parameters need defaults. Returns a finite number.
        weight: factor of its number in the sum. 0 only records it.
        name: in metrics and errors. Default: the function's own name.
        timeout: seconds. An `async def` is cancelled; a `def` runs in a thread, which is left behind.
        on_timeout: the number that counts when the time is up. None: the episode fails.
        isolated: run the function in another process, which is killed when the time is up: for long computations in C or in
            a regular expression. It must be a `def` of a module with picklable arguments, those of `TAKES` first.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str = ""
    timeout: float = 60.0
    on_timeout: float | None = None
    isolated: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            name = getattr(self.function, "__name__", "") or type(self.function).__name__.lower()
            object.__setattr__(self, "name", name)
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r}: the weight must be a finite number, not {self.weight!r}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"reward {self.name!r}: the timeout must be positive seconds, not {self.timeout!r}")
        if self.on_timeout is not None and not math.isfinite(self.on_timeout):
            raise ValueError(f"reward {self.name!r}: on_timeout must be a finite number or None")
        taken = self.takes
        if self.isolated:
            self._check_isolated(taken)

    @property
    def takes(self) -> tuple[str, ...]:
        """The names in `TAKES` that the function takes, in its order. Raises TypeError for another parameter without a default."""
        parameters = inspect.signature(self.function).parameters.values()
        for p in parameters:
            by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (by_name and p.name not in TAKES)):
                raise TypeError(f"reward {self.name!r}: no parameter {p.name!r} is given; there are {', '.join(TAKES)}")
        return tuple(p.name for p in parameters if p.name in TAKES and p.kind is not p.POSITIONAL_ONLY)

    @property
    def is_async(self) -> bool:
        call: Any = type(self.function).__call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def _check_isolated(self, taken: tuple[str, ...]) -> None:
        parameters = inspect.signature(self.function).parameters
        if self.is_async or any(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in taken):
            raise TypeError(f"reward {self.name!r}: an isolated function is a plain `def` with positional parameters")
        if tuple(parameters)[: len(taken)] != taken:
            raise TypeError(f"reward {self.name!r}: an isolated function names {', '.join(taken)} before its own")
        try:
            reference(self.function)
        except ValueError as error:
            raise TypeError(f"reward {self.name!r}: {error}") from error

    async def compute(self, trajectory: Trajectory, task: Task | None) -> float:
        of = f"reward {self.name!r} of task {task.id if task else trajectory.task_id!r}"
        try:
            given = {name: _given(name, trajectory, task) for name in self.takes}
            value = await self._limited(given)
        except _Late as error:
            if self.on_timeout is None:
                raise RewardError(f"{of} took longer than its limit of {self.timeout:g} s") from error
            return float(self.on_timeout)
        except Exception as error:
            raise RewardError(f"{of} failed: {type(error).__name__}: {error}") from error
        if not is_finite(value):
            raise RewardError(f"{of} must be a finite number, not {value!r:.100}")
        return float(value)

    async def _limited(self, given: Mapping[str, Any]) -> Any:
        if self.isolated:
            call = functools.partial(call_isolated, self.function, *given.values(), timeout=self.timeout)
            try:
                return await _in_thread(self.name, call, {})
            except TimeoutError as error:
                raise _Late from error
        awaitable = self.function(**given) if self.is_async else _in_thread(self.name, self.function, given)
        running = asyncio.ensure_future(awaitable)
        try:
            # Not asyncio.timeout: what swallows its cancellation would be waited for all the same.
            await asyncio.wait({running}, timeout=self.timeout)
            if not running.done():
                raise _Late
            return running.result()
        finally:
            running.cancel()


class _Late(Exception):
    """A reward function took too long."""


def _given(name: str, trajectory: Trajectory, task: Task | None) -> Any:
    if name in _OF_EPISODE:
        return _OF_EPISODE[name](trajectory)
    if task is None:
        raise ValueError(f"it takes {name!r}, and no task was given")
    return task if name == "task" else task.answer


async def _in_thread(name: str, function: RewardFunction, given: Mapping[str, Any]) -> Any:
    """Call a function in a daemon thread, which blocks neither others nor the end of the process."""
    executor = EnvExecutor(f"reward {name}")
    try:
        return await executor.call(function, **given)
    finally:
        executor.stop()


@dataclass(frozen=True)
class Score:
    """A rubric's score of an episode: the weighted sum, and each function's number without its weight, by name."""

    total: float
    parts: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        return {f"reward/{name}": value for name, value in self.parts.items()}


class Rubric:
    """Named, weighted reward functions. A function that is not a `Reward` weighs 1."""

    def __init__(self, rewards: Iterable[Reward | RewardFunction]):
        self.rewards = tuple(r if isinstance(r, Reward) else Reward(r) for r in rewards)
        names = [reward.name for reward in self.rewards]
        if not names:
            raise ValueError("a rubric needs at least one reward")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two rewards are called {twice[0]!r}: give them names")

    @property
    def is_async(self) -> bool:
        return any(reward.is_async for reward in self.rewards)

    async def score(self, trajectory: Trajectory, task: Task | None = None) -> Score:
        """The score of an episode, finished or still running. All functions run at the same time.

        Raises:
            RewardError: a function raised, took too long, or gave no finite number; the others are stopped.
            ValueError: the trajectory failed: there is nothing to reward.
        """
        if trajectory.failed:
            raise ValueError(f"trajectory {trajectory.id!r} failed and has no reward: {trajectory.error}")
        values = await together(reward.compute(trajectory, task) for reward in self.rewards)
        total = math.fsum(reward.weight * value for reward, value in zip(self.rewards, values, strict=True))
        return Score(total, {reward.name: value for reward, value in zip(self.rewards, values, strict=True)})


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that run at the same time, in their order. The first that raises stops the others."""
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        if error := next((e for each in running if each in done and (e := each.exception())), None):
            raise error
    finally:
        for each in running:
            each.cancel()
    return [each.result() for each in running]


class Rewarded(Wrapper):
    """An environment with the reward of a rubric in place of its own, given at the last turn, with every part in its `info` as
    `reward/NAME`.

    An episode that the loop cuts off (`Limits`, a full context) keeps 0, unless the environment judges it by `cut_off`: if a rubric
    goes below 0, limit turns by the environment's `max_turns` and set `floor`, or being cut off would pay. An episode that the agent's own programs broke, or for
    which they break a reward function, gets the floor. `reset` and `step` return awaitables if those of the environment do; the
    last `step` also does if a function of the rubric is async, or an event loop runs.
    """

    def __init__(self, env: Env, rubric: Rubric, floor: float = 0.0):
        super().__init__(env)
        self.rubric = rubric
        self.floor = floor
        self._episode = Trajectory(id="", env="", task_id="")
        self._shown: Observation = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result: Any = self.env.reset(seed=seed, options=options)
        return self._began_async(seed, result) if is_async(self.env, "reset") else self._began(seed, result)

    def step(self, action: Action) -> Any:
        outcome: Any = self.env.step(action)
        if is_async(self.env, "step"):
            return self._step_async(action, outcome)
        if (unscored := self._unscored(action, outcome)) is not None:
            return unscored
        scoring = self._scored(outcome)
        return scoring if self.rubric.is_async or _in_event_loop() else asyncio.run(scoring)

    def cut_off(self, reason: str) -> Any:
        outcome: Any = self.env.get_wrapper_attr("cut_off")(reason)
        scoring = self._cut_off(reason, outcome)
        waits = is_async(self.env, "cut_off") or self.rubric.is_async or _in_event_loop()
        return scoring if waits else asyncio.run(scoring)

    async def _cut_off(self, reason: str, outcome: Any) -> Step | None:
        step: Step | None = await outcome if inspect.isawaitable(outcome) else outcome
        if step is None:
            return None
        observation, reward, terminated, truncated, info = step
        self._episode.judged(observation, reward, info)
        self._episode.end = reason
        if self._episode.agent_failure is not None:
            return observation, self.floor, terminated, truncated, info
        return await self._scored(step)

    async def _began_async(self, seed: int | None, result: Awaitable[_Reset]) -> _Reset:
        return self._began(seed, await result)

    def _began(self, seed: int | None, result: _Reset) -> _Reset:
        task, spec = self.task, self.spec
        task_id = task.id if task else ""
        self._episode = Trajectory(id=task_id, env=spec.id if spec else "", task_id=task_id, seed=seed)
        self._shown, self._has_players = result[0], TURN_OF in result[1]
        return result

    async def _step_async(self, action: Action, stepping: Awaitable[Step]) -> Step:
        outcome = await stepping
        return self._unscored(action, outcome) or await self._scored(outcome)

    def _unscored(self, action: Action, outcome: Step) -> Step | None:
        """Note a turn. Its step where the rubric does not score it, else None."""
        observation, reward, terminated, truncated, info = outcome
        self._episode.turns.append(Turn(self._shown, assistant(action), float(reward), info))
        self._shown = observation
        if not (terminated or truncated):
            return observation, 0.0, terminated, truncated, self._of_all(info)
        self._episode.end = "terminated" if terminated else "truncated"
        self._episode.final_observation = observation
        if self._episode.agent_failure is not None:
            return observation, self.floor, terminated, truncated, info
        return None

    async def _scored(self, outcome: Step) -> Step:
        observation, _, terminated, truncated, info = outcome
        try:
            score = await self.rubric.score(self._episode, self.task)
        except Exception as error:
            if (cause := await asyncio.to_thread(cause_of, error)) is None:
                raise
            return failed_step(cause, self.floor)
        return observation, score.total, terminated, truncated, {**self._of_all(info), **score.metrics}

    def _of_all(self, info: dict[str, Any]) -> dict[str, Any]:
        """The info without what the environment's players earned: the rubric's total is that of each."""
        return {name: value for name, value in info.items() if name != REWARDS} if self._has_players else info


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ---- rewards that many tasks share


def env_reward(reward: float) -> float:
    return reward


def has_tags(*tags: str, alone: bool = False) -> Callable[[str], float]:
    """A reward of 1 if the last reply has these tags, in this order, each opened and closed exactly once; else 0.

    `has_tags("think", "answer")` is for `<think>...</think> ... <answer>...</answer>`; with `alone`, only white space may stand
    outside of the tags.
    """
    if not tags:
        raise ValueError("has_tags needs the name of a tag")

    def has_tags(completion: str) -> float:
        rest = completion
        outside = ""
        for tag in tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if completion.count(opening) != 1 or completion.count(closing) != 1:
                return 0.0
            before, opened, rest = rest.partition(opening)
            _, closed, rest = rest.partition(closing)
            if not opened or not closed:
                return 0.0
            outside += before
        return 0.0 if alone and (outside + rest).strip() else 1.0

    return has_tags


def boxed(completion: str) -> float:
    r"""1 if the last `\boxed{...}` of the last reply, thoughts left out, is closed and not empty; else 0."""
    found = answer_in(completion, "boxed")
    return float(found is not None and not found.problem)


def matches(pattern: str, flags: int = 0, *, timeout: float = 2.0) -> Callable[[str], float]:
    r"""A reward of 1 if a regular expression is found in the last reply, else 0, also after `timeout` seconds of search.

    Another process searches, since a text can keep an expression busy for ever. For the whole reply, begin the pattern with
    `\A` and end it with `\Z`.
    """
    re.compile(pattern, flags)

    def matches(completion: str) -> float:
        try:
            return float(call_isolated(search, pattern, int(flags), completion, timeout=timeout))
        except TimeoutError:
            return 0.0

    return matches


def search(pattern: str, flags: int, text: str) -> bool:
    """True if a regular expression matches somewhere in a text; `matches` runs this in another process."""
    return re.search(pattern, text, flags) is not None


def length_penalty(free: int, most: int) -> Callable[[str], float]:
    """A penalty for long last replies: 0 up to `free` characters, then falling evenly to -1 at `most`."""
    if not 0 <= free < most:
        raise ValueError(f"length_penalty needs 0 <= free < most, not {free} and {most}")

    def length_penalty(completion: str) -> float:
        return 0.0 - min(1.0, max(0.0, (len(completion) - free) / (most - free)))

    return length_penalty
