"""The environment that tests of `agentgym eval` play."""

from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet


class Parity(Env):
    """Is the number even? Two turns."""

    max_turns = 2

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}; it has train, test")
        labels = {"tags": ["number"], "difficulty": "easy"}
        return TaskSet([Task(str(i), answer="odd" if i % 2 else "even", metadata=labels) for i in range(20)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"Is {self.task.id} even or odd?")], {}

    def step(self, action):
        right = self.read(action) == self.task.answer
        return self.outcome("Right." if right else "No.", float(right), terminated=right, success=right)

    def expert_action(self):
        return self.task.answer

    def random_action(self, rng):
        return rng.choice(["even", "odd"])
