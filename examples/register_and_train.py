"""Write an environment, register it, and train on it.

python examples/register_and_train.py [key=value ...]

Here episodes run in this process, for which a registered id is enough. Other processes, those of `env.placement=ray` and of a later
`agent-train trainer.resume=...`, import the environment: name it by its module, in a package of yours or in the current folder.

cd examples && agent-train +env=register_and_train:Larger engine=embedded env.placement=ray
"""

import random
import sys
from itertools import permutations

from train import TINY, steps_of, train

import agentgym
from agentgym import Env, Task, TaskSet


class Larger(Env):
    """Name the larger of two digits. A second try earns half."""

    max_turns = 2

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"larger has no split {split!r}; it has train, test")
        pairs = [pair for pair in permutations(range(10), 2) if (sum(pair) % 5 == 0) == (split == "test")]
        tasks = [Task(f"{a}-{b}", answer=str(max(a, b)), metadata={"pair": [a, b]}) for a, b in pairs]
        return TaskSet(tasks, name=f"larger/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        a, b = self.task.metadata["pair"]
        return [{"role": "user", "content": f"Which is larger, {a} or {b}?"}], {}

    def step(self, action):
        right = self.read(action).strip() == self.task.answer
        reward = 1.0 / self.turn if right else 0.0
        return self.outcome("Right." if right else "No. Try again.", reward, right, success=right)

    # The warm start of a model that knows nothing plays these; a model that can talk needs neither.
    def expert_action(self):
        return self.task.answer

    def random_action(self, rng: random.Random):
        return str(rng.choice(self.task.metadata["pair"]))


GAME = [
    "sft.mistakes=0.5",
    "algorithm.group_size=8",
    "trainer.groups_per_step=8",
    "learner.lr=5e-4",
    "trainer.steps=30",
]
agentgym.register(id="example/larger", entry_point=Larger, description="Name the larger of two digits.")


def main(arguments):
    folder = train(*TINY, "+env=example/larger", *GAME, *arguments)
    for record in steps_of(folder):
        print(f"step {record['step']}: reward {record['reward']:.2f}, {record['turns']:.1f} turns")


if __name__ == "__main__":
    main(sys.argv[1:])
