"""Write an environment, register it, check it, play it.

python examples/register_env.py
"""

import asyncio
import random
import re

import agentgym
from agentgym import Env, ScriptedPolicy, Task, TaskSet, check_env


class GuessNumber(Env):
    """Find a number from 1 to 100; every wrong guess is answered with "higher" or "lower"."""

    max_turns = 8

    @classmethod
    def default_tasks(cls, split="train"):
        numbers = {"train": range(1, 81), "test": range(81, 101)}
        if split not in numbers:
            raise ValueError(f"guess_number has no split {split!r}; it has {', '.join(numbers)}")
        return TaskSet([Task(id=f"guess-{n}", answer=n) for n in numbers[split]], name=f"guess_number/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.low, self.high = 1, 100
        return [{"role": "user", "content": "I think of a number from 1 to 100. Guess it."}], {}

    def step(self, action):
        found = re.findall(r"\d{1,6}", self.read(action), re.ASCII)
        if not found:
            return self.outcome("Answer with a number.", success=False)
        guess = int(found[-1])
        if guess == self.task.answer:
            return self.outcome("Right.", reward=1.0, terminated=True, success=True)
        if guess < self.task.answer:
            self.low = max(self.low, guess + 1)
            return self.outcome("higher", success=False)
        self.high = min(self.high, guess - 1)
        return self.outcome("lower", success=False)

    # With these two, `--policy expert`, `--policy random` and the trainer's warm start work as well.
    def expert_action(self):
        return str((self.low + self.high) // 2)

    def random_action(self, rng: random.Random):
        return str(rng.randint(self.low, self.high))


def main():
    agentgym.register(id="example/guess_number", entry_point=GuessNumber, description="Find a number by halving.")
    print("problems:", check_env("example/guess_number") or "none")

    env = agentgym.make("example/guess_number")
    script = ScriptedPolicy(["I start with 50.", "75", "no idea", "90"])
    task = Task(id="mine", answer=90)
    trajectory = asyncio.run(agentgym.run_episode(env, script, task))
    for message in trajectory.messages():
        print(f"{message['role']:>9}: {message['content']}")
    print(f"{trajectory.end}, reward {trajectory.reward:g}, success {trajectory.success:g}")


if __name__ == "__main__":
    main()
