"""An environment that answers what it is told, as `agentgym serve echo:Echo` serves it. `serve_openenv.py` has its twin."""

from __future__ import annotations

from typing import Any

from agentgym import Env, Task, TaskSet


class Echo(Env):
    """Says back what it is told; an episode never ends."""

    max_turns = 1 << 40

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        return TaskSet([Task("echo")], name="echo")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return [{"role": "user", "content": "Say something."}], {}

    def step(self, action: Any) -> Any:
        return self.outcome(self.read(action), 1.0)
