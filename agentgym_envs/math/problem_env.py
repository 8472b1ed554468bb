"""What the environments that pose a problem of mathematics share: the task is checked, and put before the agent."""

from __future__ import annotations

from typing import Any, ClassVar

from agentgym.core.env import Env
from agentgym.core.messages import Observation, instructed
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.math.word_problems import check_task, load_word_problems


class ProblemEnv(Env):
    """Poses a task's messages and, at the end of the last, the class's `instruction`.

    The tasks are school word problems, whose answers are numbers; a subclass with others says so in `default_tasks` and
    `check`.
    """

    instruction: ClassVar[str]

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """GSM8K's "train" (7,473) or "test" (1,319), or the project's own problems (30 and 10) where it is not found."""
        return load_word_problems(split)

    @staticmethod
    def check(task: Task) -> None:
        """Refuse a task that poses no such problem.

        Raises:
            ValueError: the task has no question, or its answer is no number.
        """
        check_task(task)

    def init(self, task: Task) -> None:
        """Bind a problem.

        Raises:
            ValueError: see `check`.
        """
        self.check(task)
        super().init(task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Pose the problem; see `agentgym.Env.reset`."""
        super().reset(seed=seed, options=options)
        return instructed(self.current_task.messages, self.instruction), {}
