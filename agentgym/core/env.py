"""The contract of an environment: `init`, `reset`, `step`, `close`.

It is a `gymnasium.Env` whose observation is a list of new chat messages and whose action is an assistant message or its text.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import numbers
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import gymnasium
import numpy as np

from agentgym.core import agent_failure
from agentgym.core.messages import Action, Observation, assistant, problem_of, text_of, user
from agentgym.core.trajectory import REWARDS

if TYPE_CHECKING:  # a task set is loaded by its environment's name, so tasks know the registry and it the environments
    from agentgym.core.tasks import Task, TaskSet

T = TypeVar("T")
_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789.,!?<>{}\n\tàßñжשع漢字かな🙂"
Opening = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
METHODS = ("init", "reset", "step", "cut_off", "close")

_log = logging.getLogger("agentgym.env")


def _random_text(rng: np.random.Generator) -> str:
    letters = list(_SAMPLE_ALPHABET)
    return "".join(letters[i] for i in rng.integers(0, len(letters), size=int(rng.integers(0, 40))))


class _TextSpace(gymnasium.Space[T]):
    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MessagesSpace(_TextSpace[Observation]):
    """Observations: a list of chat messages with any unicode text. Samples are lists of user messages."""

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        return [user(_random_text(self.np_random)) for _ in range(int(self.np_random.integers(1, 3)))]

    def contains(self, x: object) -> bool:
        return isinstance(x, list) and all(problem_of(m) is None for m in x)


class ActionSpace(_TextSpace[Action]):
    """Actions: any unicode text, or an assistant message. Samples are text."""

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        return _random_text(self.np_random)

    def contains(self, x: object) -> bool:
        return isinstance(x, str) or (isinstance(x, dict) and problem_of(x) is None and x["role"] == "assistant")


class Env(gymnasium.Env[Observation, Action]):
    """Base class of environments whose methods are `def`, and of `AsyncEnv`.

    A subclass defines `reset` and `step`, and `init` and `close` if it holds a sandbox, a database or an index. The same task,
    seed and actions give the same observations and rewards in any process. If the agent's own programs can have caused an
    error of `step` (see `agentgym.core.agent_failure`), the episode terminates with a reward that brings its sum to `floor`.

    Attributes:
        max_turns: steps after which an episode is truncated.
        tools: OpenAI tool schemas that the policy may call.
        sandbox_image: image of its sandboxes, if any. An environment that sets this takes the keyword `sandbox`, the back end.
        writable_root: True if its sandboxes have a writable root, which not every back end supports.
        floor: the lowest reward of an episode: 0, or with penalties their lowest sum.
        init_seconds, step_seconds: time limits of `init` and of a step, if above two minutes and one. A longer call counts as
            hung.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium
    max_turns: int = 1
    tools: ClassVar[list[dict[str, Any]]] = []
    sandbox_image: str | None = None
    writable_root: bool = False
    floor: float = 0.0
    init_seconds: float | None = None
    step_seconds: float | None = None
    async_methods: ClassVar[frozenset[str]] = frozenset()
    _stepping = False  # whether a step of this or of a subclass runs
    _earned = 0.0  # in this episode
    _earned_by: Mapping[str, float] = {}  # by player, once a step has told

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.async_methods = _async_methods(cls)
        for name in ("step", "cut_off"):
            if name in vars(cls):
                setattr(cls, name, _ended_by_agent(vars(cls)[name]))

    def __init__(self, tasks: TaskSet | None = None, max_turns: int | None = None, render_mode: str | None = None):
        if max_turns is not None:
            if not isinstance(max_turns, numbers.Real) or not max_turns >= 1:
                raise ValueError(f"max_turns must be a number of at least 1, not {max_turns!r:.50}")
            self.max_turns = max_turns
        if tasks is not None and not hasattr(tasks, "shuffled"):  # its module imports this one
            what = f"tasks must be a TaskSet, not a {type(tasks).__name__}"
            raise TypeError(f"{what}; agentgym eval plays tasks by their ids with --task")
        self.observation_space = MessagesSpace()
        self.action_space = ActionSpace()
        self.render_mode = render_mode
        self.task: Task | None = None
        self.turn = 0
        self.running = False
        self._tasks = tasks
        self._drawn = False  # whether reset() drew the present task, and not the caller

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """The environment's own tasks. Splits are disjoint. Raises ValueError if there is no such split."""
        raise ValueError(f"{cls.__name__} has no tasks of its own: bind one with init(task) or pass tasks=")

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None:
            # A spec made by `agentgym.make` knows the kwargs and the task function that this env was registered with.
            spec: Any = self.spec
            self._tasks = spec.tasks("train") if hasattr(spec, "tasks") else self.default_tasks()
        return self._tasks

    @property
    def current_task(self) -> Task:
        if self.task is None:
            raise RuntimeError(f"{type(self).__name__}: no task is bound; call reset() first")
        return self.task

    def init(self, task: Task) -> None:
        """Bind a task and acquire what it needs. May be slow; `reset` may follow many times. Subclasses call `super().init(task)`."""
        self.task = task
        self._drawn = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        """Start an episode and return the opening messages and an info dict; subclasses call `super().reset(seed=seed, options=options)`.

        Without a task bound by `init` or `options={"task": t}`, every reset draws one from `tasks`: by the seed, else by
        `self.np_random`. Raises TypeError if a task has to be bound here and `init` is async.
        """
        task, drawn = self._task_to_bind(seed, options)
        if task is not None:
            if "init" in self.async_methods:
                raise TypeError(f"{type(self).__name__}.init is async: await init(task) before reset()")
            self.init(task)
            self._drawn = drawn
        return self._begun()

    def _task_to_bind(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Task | None, bool]:
        super().reset(seed=seed)
        task: Task | None = (options or {}).get("task")
        draw = task is None and (self.task is None or self._drawn)
        if draw:
            # Not from np_random where there is a seed: a drawn task must meet the same generator as the same task bound.
            if not len(self.tasks):
                raise ValueError(
                    f"{type(self).__name__}: {self.tasks.name} has no task to draw: bind one by options or init()"
                )
            picker = random.Random(int(self.np_random.integers(2**63)) if seed is None else seed)
            task = self.tasks[picker.randrange(len(self.tasks))]
        return task, draw

    def _begun(self) -> Opening:
        self.turn = 0
        self.running = True
        self._earned, self._earned_by = 0.0, {}
        return [], {}

    def step(self, action: Action) -> Step:
        """Answer one assistant message: `(observation, reward, terminated, truncated, info)`.

        The observation holds only the new messages; on the last step, `info` has `success: bool` if the environment has a notion of it.
        """
        raise NotImplementedError

    def cut_off(self, reason: str) -> Step | None:
        """Judge an episode that the loop or the policy ends, for example by a full "context": returns a last step, whose reward counts.

        None, the default: the episode keeps its rewards so far.
        """
        return None

    def close(self) -> None:
        """Release what `init` acquired. May be called twice."""
        self.running = False

    def read(self, action: Action) -> str:
        """Begin a step: return the action's text. Raises RuntimeError if no episode is running."""
        if not self.running:
            raise RuntimeError(f"{type(self).__name__}: no episode is running; call reset() before step()")
        self.turn += 1
        return text_of(assistant(action))

    def outcome(
        self, observation: str | Observation, reward: float = 0.0, terminated: bool = False, **info: Any
    ) -> Step:
        """End a step: Gymnasium's five values, with `truncated` set when the turns are used up."""
        most: Any = self.max_turns
        if not isinstance(most, numbers.Real):
            raise ValueError(f"{type(self).__name__}.max_turns must be a number of at least 1, not {most!r:.50}")
        truncated = not terminated and self.turn >= most
        self.running = not (terminated or truncated)
        messages = [user(observation)] if isinstance(observation, str) else observation
        return messages, float(reward), terminated, truncated, info

    def hung_by_agent(self) -> bool:
        return False


def is_finite(value: Any) -> bool:
    """True for a finite number, NumPy's and booleans too: a valid reward."""
    return isinstance(value, (float, numbers.Real, np.bool_)) and math.isfinite(value)


def is_async(env: gymnasium.Env[Any, Any], name: str) -> bool:
    """True if the method of that name, one of `METHODS`, is `async def` in an environment or in one of its wrappers."""
    return name in env.get_wrapper_attr("async_methods")


def _async_methods(cls: type) -> frozenset[str]:
    return frozenset(name for name in METHODS if inspect.iscoroutinefunction(getattr(cls, name)))


def failed_step(cause: str, reward: float, by_player: Mapping[str, float] | None = None) -> Step:
    """The last step of an episode that its agent broke, with what each player earns by it, if there are players."""
    told = f"Error: what you ran has broken the episode ({cause}). It ends here, and counts as failed."
    rewards = {REWARDS: dict(by_player)} if by_player else {}
    return [user(told)], reward, True, False, {"success": False, agent_failure.KEY: cause, **rewards}


def _ended_by_agent(step: Callable[[Any, Any], Any]) -> Any:
    """A `step` or `cut_off` that ends the episode if the agent's programs broke it. A call from another one is left alone."""

    @functools.wraps(step)
    def guarded(self: Env, action: Any) -> Any:
        if self._stepping:
            return step(self, action)
        self._stepping = True
        try:
            outcome = step(self, action)
        except Exception as error:
            if (cause := agent_failure.cause_of(error)) is None:
                raise
            return _failed(self, cause, error)
        finally:
            self._stepping = False
        return _counted(self, outcome)

    @functools.wraps(step)
    async def guarded_async(self: Env, action: Any) -> Any:
        if self._stepping:
            return await step(self, action)
        self._stepping = True
        try:
            outcome = await step(self, action)
        except Exception as error:
            if (cause := await asyncio.to_thread(agent_failure.cause_of, error)) is None:
                raise
            return _failed(self, cause, error)
        finally:
            self._stepping = False
        return _counted(self, outcome)

    return guarded_async if inspect.iscoroutinefunction(step) else guarded


def _counted(env: Env, outcome: Any) -> Any:
    if type(outcome) is tuple and len(outcome) == 5:  # others are refused elsewhere
        reward = outcome[1]
        if type(reward) is float or isinstance(reward, numbers.Real):
            info = outcome[4] if isinstance(outcome[4], Mapping) else {}
            told = isinstance(info.get(REWARDS), Mapping)
            given = info[REWARDS] if told else {}
            before = {**dict.fromkeys(given, env._earned), **env._earned_by}
            now = {name: given.get(name, 0.0) if told else reward for name in before}
            env._earned_by = {
                name: earned + (float(now[name]) if isinstance(now[name], numbers.Real) else 0.0)
                for name, earned in before.items()
            }
            env._earned += float(reward)
    return outcome


def _failed(env: Env, cause: str, error: Exception) -> Step:
    _log.info("%s: the agent's failure, %s: %s: %s", type(env).__name__, cause, type(error).__name__, error)
    env.running = False
    by_player = {name: env.floor - earned for name, earned in env._earned_by.items()}
    return failed_step(cause, env.floor - env._earned, by_player)


class AsyncEnv(Env):
    """Base class of environments whose methods are all `async def`. A subclass awaits those of this class. See `Env`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if plain := [name for name in METHODS if name not in cls.async_methods]:
            raise TypeError(f"{cls.__name__} is an AsyncEnv: {plain[0]} must be `async def`")

    # Gymnasium, and with it Env, declares these as `def`.
    async def init(self, task: Task) -> None:  # type: ignore[override]
        super().init(task)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:  # type: ignore[override]
        task, drawn = self._task_to_bind(seed, options)
        if task is not None:
            await self.init(task)
            self._drawn = drawn
        return self._begun()

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        raise NotImplementedError

    async def cut_off(self, reason: str) -> Step | None:  # type: ignore[override]
        return None

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class Wrapper(gymnasium.Wrapper[Observation, Action, Observation, Action]):
    """Changes an environment from outside: override the methods to change. Around an `AsyncEnv`, its methods return awaitables."""

    env: Env

    def init(self, task: Task) -> Any:
        return self.env.get_wrapper_attr("init")(task)

    def cut_off(self, reason: str) -> Any:
        return self.env.get_wrapper_attr("cut_off")(reason)

    @property
    def async_methods(self) -> frozenset[str]:
        inner: frozenset[str] = self.env.get_wrapper_attr("async_methods")
        return inner | _async_methods(type(self))

    @property
    def task(self) -> Task | None:
        return self.env.task

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self.env.tools

    @property
    def spec(self) -> Any:  # type: ignore[override]  # read-only in gymnasium.Wrapper too
        """The wrapped environment's spec; Gymnasium's own property would copy and extend it."""
        return self.env.spec


def close_unused(env: gymnasium.Env[Any, Any]) -> None:
    """Close an environment that was made only to look at it. An async `close` is left out: nothing is open before `init`."""
    if not is_async(env, "close"):
        env.close()


class Blocking(Wrapper):
    """Makes plain calls of `async def` methods, for Gymnasium's tools and simple scripts. Not for use inside a running loop."""

    async_methods: frozenset[str] = frozenset()  # type: ignore[assignment]  # a property where another decides

    def __init__(self, env: Env):
        super().__init__(env)
        self._runner: asyncio.Runner | None = None
        self._draws = random.Random(0)
        self._drawn_task: Task | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("expert_action", "random_action"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(self.env, name)
        return self._waiting(method) if inspect.iscoroutinefunction(method) else method

    def init(self, task: Task) -> None:
        self._drawn_task = None
        self._call("init", task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode. If the environment cannot bind the task that it would draw, this does."""
        if is_async(self.env, "init") and not is_async(self.env, "reset"):
            task = (options or {}).get("task")
            env: Any = self.env.unwrapped  # an Env
            if task is None and (env.task is None or env.task is self._drawn_task):
                self._draws = self._draws if seed is None else random.Random(seed)
                drawn = env.tasks[self._draws.randrange(len(env.tasks))]
                self.init(drawn)
                self._drawn_task = drawn
            elif task is not None:
                self.init(task)
            options = {name: value for name, value in (options or {}).items() if name != "task"} or None
        return self._call("reset", seed=seed, options=options)

    def step(self, action: Action) -> Any:
        return self._call("step", action)

    def cut_off(self, reason: str) -> Any:
        return self._call("cut_off", reason)

    def close(self) -> None:
        try:
            self._call("close")
        finally:
            self.release()

    def release(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = self.env.get_wrapper_attr(name)
        return (self._waiting(method) if is_async(self.env, name) else method)(*args, **kwargs)

    def _waiting(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def wait(*args: Any, **kwargs: Any) -> Any:
            return await method(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(wait(*args, **kwargs))

        return call
