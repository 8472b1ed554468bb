"""An environment whose methods are `async def`, called as plain ones: for Gymnasium's own tools and simple scripts."""

from __future__ import annotations

import asyncio
import inspect
import random
from typing import Any

from agentgym.core.env import Env, Wrapper
from agentgym.core.messages import Action
from agentgym.core.tasks import Task


class Blocking(Wrapper):
    """Calls an environment's methods and waits for them, in an event loop of its own. Not for use inside a running loop.

    Args:
        env: with `def` or `async def` methods.
    """

    def __init__(self, env: Env):
        super().__init__(env)
        self._runner: asyncio.Runner | None = None
        self._draws = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        if name not in ("expert_action", "random_action"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(self.env, name)
        return lambda *args: self._wait(method(*args))

    def init(self, task: Task) -> Any:
        """Bind a task."""
        return self._wait(self.env.init(task))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; where the environment cannot bind the task that it would draw, this does."""
        own = type(self.env.unwrapped).reset
        if inspect.iscoroutinefunction(self.env.init) and not inspect.iscoroutinefunction(own):
            task = (options or {}).get("task")
            if task is None:
                self._draws = self._draws if seed is None else random.Random(seed)
                tasks = self.env.unwrapped.tasks  # type: ignore[attr-defined]  # of an Env
                task = tasks[self._draws.randrange(len(tasks))]
            self.init(task)
            options = {name: value for name, value in (options or {}).items() if name != "task"} or None
        return self._wait(self.env.reset(seed=seed, options=options))

    def step(self, action: Action) -> Any:
        """Answer one assistant message."""
        return self._wait(self.env.step(action))

    def close(self) -> Any:
        """Close the environment, and the event loop with all that is in it."""
        try:
            self._wait(self.env.close())
        finally:
            self.release()

    def release(self) -> None:
        """Close the event loop and leave the environment open."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _wait(self, result: Any) -> Any:
        async def wait() -> Any:
            return await result

        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())
