"""The base of environments that pose a problem of mathematics."""

from __future__ import annotations

from typing import Any, ClassVar

from agentgym.core.env import Env
from agentgym.core.messages import Observation, instructed
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.math.word_problems import check_task, load_word_problems


class ProblemEnv(Env):
    """Poses a task's messages, with the class's `instruction` at the end of the last."""

    instruction: ClassVar[str]

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """GSM8K's "train" (7,473) or "test" (1,319); the shipped problems (30 and 10) without it."""
        return load_word_problems(split)

    @staticmethod
    def check(task: Task) -> None:
        """Raise if the task is not such a problem."""
        check_task(task)

    def init(self, task: Task) -> None:
        self.check(task)
        super().init(task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return instructed(self.current_task.messages, self.instruction), {}
