"""The contract of an environment: `init`, `reset`, `step`, `close`.

An environment is a `gymnasium.Env` whose observation is a list of new chat messages and whose action is an assistant
message, or just its text. A `Task` says which problem an episode poses.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import numbers
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium

from agentgym.core import agent_failure
from agentgym.core.messages import Action, Observation, assistant, text_of, user
from agentgym.core.spaces import ActionSpace, MessagesSpace

if TYPE_CHECKING:
    from agentgym.core.tasks import Task, TaskSet

Step = tuple[Observation, float, bool, bool, dict[str, Any]]

_log = logging.getLogger("agentgym.env")


class Env(gymnasium.Env[Observation, Action]):
    """Base class of every environment.

    A subclass writes `reset` and `step`, and `init` and `close` if it holds a sandbox, a database or an index. Each may be
    `def` or `async def`. The same task, seed and actions give the same observations and rewards in any process.

    A `step` from which an error comes that the agent's own programs can have brought about (see `agentgym.core.agent_failure`) raises
    nothing: it ends the episode as terminated, with the reward that brings the episode's sum to `floor`, and with the cause as
    `info["agent_failure"]`. This holds for every subclass's `step` without further ado.

    Args:
        tasks: what `reset()` draws from when no task is bound. Default: the set that `default_tasks` returns.
        max_turns: steps after which an episode is truncated. Default: the class's `max_turns`.

    Attributes:
        task: the bound task, None before `init`.
        turn: steps taken in this episode.
        tools: OpenAI tool schemas that the policy may call; empty where the env has none.
        sandbox_image: image of the sandboxes that it acquires, None where it has none. An env that sets it takes the keyword
            `sandbox`, the back end, which command lines and training runs pass on.
        floor: the least reward of an episode, and that of one which the agent's own programs broke. 0 by default; an env with
            penalties says its least sum.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium
    max_turns: int = 1
    tools: ClassVar[list[dict[str, Any]]] = []
    sandbox_image: str | None = None
    floor: float = 0.0
    _stepping = False  # whether a step of this or of a subclass runs
    _earned = 0.0  # in this episode

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            cls.step = _ended_by_agent(cls.step)  # type: ignore[assignment, method-assign]

    def __init__(self, tasks: TaskSet | None = None, max_turns: int | None = None, render_mode: str | None = None):
        if max_turns is not None:
            if max_turns < 1:
                raise ValueError(f"max_turns must be at least 1, not {max_turns}")
            self.max_turns = max_turns
        self.observation_space = MessagesSpace()
        self.action_space = ActionSpace()
        self.render_mode = render_mode
        self.task: Task | None = None
        self.turn = 0
        self.running = False
        self._tasks = tasks
        self._drawn = False  # whether the present task was picked by reset() and not by the caller

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """The environment's own tasks. Splits are disjoint.

        Raises:
            ValueError: the environment has no such split.
        """
        raise ValueError(f"{cls.__name__} has no tasks of its own: bind one with init(task) or pass tasks=")

    @property
    def tasks(self) -> TaskSet:
        """The set that `reset()` draws from."""
        if self._tasks is None:
            # A spec made by `agentgym.make` knows the kwargs and the task function that this env was registered with.
            spec: Any = self.spec
            self._tasks = spec.tasks("train") if hasattr(spec, "tasks") else self.default_tasks()
        return self._tasks

    @property
    def current_task(self) -> Task:
        """The bound task.

        Raises:
            RuntimeError: none is bound.
        """
        if self.task is None:
            raise RuntimeError(f"{type(self).__name__}: no task is bound; call reset() first")
        return self.task

    def init(self, task: Task) -> Any:
        """Bind a task and acquire what it needs. Slow, once per task; `reset` may follow many times.

        Subclasses call `super().init(task)`.
        """
        self.task = task
        self._drawn = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode of the bound task; subclasses call `super().reset(seed=seed, options=options)` first.

        Where no task was bound by `init` or `options`, every reset draws one from `tasks`: by the seed alone if there is
        one, else by `self.np_random`.

        Args:
            seed: seeds `self.np_random`.
            options: `{"task": t}` binds t.

        Returns:
            The opening messages and an info dict.

        Raises:
            TypeError: a task has to be bound here, and `init` is async.
        """
        super().reset(seed=seed)
        task: Task | None = (options or {}).get("task")
        draw = task is None and (self.task is None or self._drawn)
        if draw:
            task = self._draw(seed)
        if task is not None:
            if inspect.iscoroutinefunction(self.init):
                raise TypeError(f"{type(self).__name__}.init is async: await init(task) before reset()")
            self.init(task)
            self._drawn = draw
        self.turn = 0
        self.running = True
        self._earned = 0.0
        return [], {}

    def _draw(self, seed: int | None) -> Task:
        # Not from np_random where there is a seed: a drawn task must meet the same generator as the same task bound.
        picker = random.Random(int(self.np_random.integers(2**63)) if seed is None else seed)
        return self.tasks[picker.randrange(len(self.tasks))]

    def step(self, action: Action) -> Any:
        """Answer one assistant message.

        Returns:
            `(observation, reward, terminated, truncated, info)`. The observation holds only the new messages. `info`
            carries `success: bool` on the last step where the environment has a notion of it.
        """
        raise NotImplementedError

    def close(self) -> Any:
        """Release what `init` acquired. May be called twice."""
        self.running = False

    def read(self, action: Action) -> str:
        """Begin a step: check that an episode is running and return the action's text.

        Raises:
            RuntimeError: `reset` was not called, or the episode is over.
        """
        if not self.running:
            raise RuntimeError(f"{type(self).__name__}: no episode is running; call reset() before step()")
        self.turn += 1
        return text_of(assistant(action))

    def outcome(
        self, observation: str | Observation, reward: float = 0.0, terminated: bool = False, **info: Any
    ) -> Step:
        """End a step: Gymnasium's five values, with `truncated` set when the turns are used up."""
        truncated = not terminated and self.turn >= self.max_turns
        self.running = not (terminated or truncated)
        messages = [user(observation)] if isinstance(observation, str) else observation
        return messages, float(reward), terminated, truncated, info

    def hung_by_agent(self) -> bool:
        """Whether a step that does not return can be the agent's doing, where that is not known of a sandbox. May take seconds."""
        return False

    def agent_failed(self, cause: str) -> Step:
        """End the episode at the floor: what the agent did has broken it. `cause` is a word of `agentgym.core.agent_failure`."""
        self.running = False
        return failed_step(cause, self.floor - self._earned)


def failed_step(cause: str, reward: float) -> Step:
    """The last step of an episode that the agent's own programs broke."""
    told = f"Error: what you ran has broken the episode ({cause}). It ends here, and counts as failed."
    return [user(told)], reward, True, False, {"success": False, agent_failure.KEY: cause}


def _ended_by_agent(step: Callable[[Any, Action], Any]) -> Callable[[Any, Action], Any]:
    """A `step` in which what the agent's programs broke ends the episode. One that a subclass's `step` calls is left alone."""

    def counted(env: Env, outcome: Any) -> Any:
        if type(outcome) is tuple and len(outcome) == 5:  # what else there is, others refuse
            reward = outcome[1]
            if type(reward) is float or isinstance(reward, numbers.Real):
                env._earned += float(reward)
        return outcome

    def ended(env: Env, cause: str, error: Exception) -> Step:
        _log.info("%s: the agent's failure, %s: %s: %s", type(env).__name__, cause, type(error).__name__, error)
        return env.agent_failed(cause)

    async def awaited(env: Env, outcome: Awaitable[Any]) -> Any:
        env._stepping = True
        try:
            return counted(env, await outcome)
        except Exception as error:
            if (cause := await asyncio.to_thread(agent_failure.cause_of, error)) is None:
                raise
            return ended(env, cause, error)
        finally:
            env._stepping = False

    @functools.wraps(step)
    def taken(self: Env, action: Action) -> Any:
        if self._stepping:
            return step(self, action)
        self._stepping = True
        try:
            outcome = step(self, action)
        except Exception as error:
            if (cause := agent_failure.cause_of(error)) is None:
                raise
            return ended(self, cause, error)
        finally:
            self._stepping = False
        if type(outcome) is not tuple and inspect.isawaitable(outcome):
            return awaited(self, outcome)
        return counted(self, outcome)

    @functools.wraps(step)
    async def taken_async(self: Env, action: Action) -> Any:
        return await (step(self, action) if self._stepping else awaited(self, step(self, action)))

    return taken_async if inspect.iscoroutinefunction(step) else taken


class Wrapper(gymnasium.Wrapper[Observation, Action, Observation, Action]):
    """Changes an environment from outside: override what should differ, the rest passes through."""

    env: Env

    def init(self, task: Task) -> Any:
        """Bind a task; see `Env.init`."""
        return self.env.init(task)

    @property
    def task(self) -> Task | None:
        """The bound task."""
        return self.env.task

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI schemas of the tools that the policy may call."""
        return self.env.tools

    @property
    def spec(self) -> Any:  # type: ignore[override]  # read-only in gymnasium.Wrapper too
        """The wrapped environment's spec; Gymnasium's own property would copy and extend it."""
        return self.env.spec
