"""agentgym's side: `evaluate`, with a run folder on disk, or with none where AGENTGYM_IN_MEMORY is set."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from questions import Settings, answer, measure, question, right

from agentgym import ChatPolicy, Env, ScriptedPolicy, Task, TaskSet
from agentgym.core.messages import text_of, user
from agentgym.core.registration import EnvSpec
from agentgym.evaluate import evaluate


class Sums(Env):
    """One question; the episode ends with the answer."""

    def __init__(self, count: int):
        super().__init__()

    @classmethod
    def default_tasks(cls, split: str = "train", count: int = 1) -> TaskSet:
        return TaskSet([Task(f"sum-{i}", (user(question(i)),), right(i)) for i in range(count)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return list(self.current_task.messages), {}

    def step(self, action):
        correct = self.read(action).strip() == self.current_task.answer
        return self.outcome([], float(correct), terminated=True, success=correct)


def play(settings: Settings) -> float:
    spec = EnvSpec("sums", "play_agentgym:Sums", kwargs={"count": settings.episodes})
    folder = None if os.environ.get("AGENTGYM_IN_MEMORY") else Path(settings.folder)
    make = (
        (lambda _: ChatPolicy("model", settings.base_url, api_key="none"))
        if settings.base_url
        else (lambda _: ScriptedPolicy(lambda messages: answer(text_of(messages[-1]))))
    )
    found = asyncio.run(evaluate(spec, make, concurrency=settings.concurrent, out=folder))
    assert found.errors == 0, found
    assert found.episodes == settings.episodes, found
    return found.reward


if __name__ == "__main__":
    measure(play)
