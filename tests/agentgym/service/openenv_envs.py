"""Small environments that the tests of OpenEnv's protocol serve."""

import agentgym
from agentgym import Task, TaskSet, tool
from agentgym.core.messages import assistant, text_of, user
from agentgym.tools.toolset import ToolSet


class Sum(agentgym.Env):
    """Say the sum; "raise" raises, "nan" has a reward that is no number."""

    max_turns = 3

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}; there are train, test")
        size = 5 if split == "train" else 2
        tasks = [Task(f"{split}-{i}", (user(f"{i} + {i}?"),), answer=str(2 * i)) for i in range(size)]
        return TaskSet(tasks, name=f"sum/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return list(self.current_task.messages), {"draw": int(self.np_random.integers(1000))}

    def step(self, action):
        text = self.read(action)
        if text == "raise":
            raise ZeroDivisionError("asked to")
        right = text == self.current_task.answer
        reward = float("nan") if text == "nan" else float(right)
        return self.outcome("right" if right else f"not {text}", reward, right, success=right)


class AsyncSum(Sum):
    """The same, all of it `async def`."""

    async def init(self, task):
        super().init(task)

    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)

    async def close(self):
        super().close()


class Counter(agentgym.Env):
    """Count to the task's number with a tool."""

    max_turns = 6

    def __init__(self, tasks=None, max_turns=None, render_mode=None):
        super().__init__(tasks, max_turns, render_mode)
        self._set = ToolSet([tool(self.add), tool(self.total_of)])
        self.tools = self._set.schemas
        self._total = 0

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task(f"{split}-{n}", answer=n) for n in (3, 5)])

    def add(self, number: int) -> int:
        """Add a number to the total.

        Args:
            number: which.
        """
        self._total += number
        return self._total

    def total_of(self) -> int:
        """The total."""
        return self._total

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self._total = 0
        return [user(f"Make the total {self.current_task.answer}.")], {}

    def step(self, action):
        self.read(action)
        answers = self._set.answer(assistant(action)) or [user(f"no call in {text_of(action)!r}")]
        done = self._total == self.current_task.answer
        return self.outcome(answers, float(done), done, success=done)
