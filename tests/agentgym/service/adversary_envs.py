"""An environment that tells what it can reach, and gives what JSON has no word for."""

import os

import numpy as np

from agentgym import Env, Task, TaskSet


class Nosy(Env):
    """ "open" lists the descriptors that a program started by the environment would have; "odd" answers odd values."""

    max_turns = 1 << 30

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet.generate(lambda seed: Task(f"{split}-{seed}", seed=seed), range(5), name="nosy")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [{"role": "user", "content": "begin"}], {"seed": seed}

    def step(self, action):
        text = self.read(action)
        if text == "open":
            text = " ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in _passed_on())
        observation, _, terminated, truncated, info = self.outcome(text, 0.0)
        if text == "odd":
            info |= {"inf": float("inf"), "few": np.arange(3), "one": np.float32(0.5), "bytes": b"\xff", "big": 2**70}
            return observation, float("nan"), terminated, truncated, info
        return observation, 0.0, terminated, truncated, info


def _passed_on():
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                yield name
        except OSError:  # that of the list itself
            continue
