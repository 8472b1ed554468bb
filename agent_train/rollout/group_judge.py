"""A judge compares the episodes of a group with each other, and its numbers are rewards (as RULER of OpenPipe's ART does)."""

from typing import Any

from agent_train.config.schema import JudgeConfig
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Group
from agentgym.rewards.judge import Judge, JudgeError, judge_group

METRIC = "reward/judge"


class GroupJudge:
    """Judges groups by a model at an endpoint. The key is OPENAI_API_KEY, if that is set."""

    def __init__(self, settings: JudgeConfig, seed: int):
        self._settings, self._seed = settings, seed
        limits: dict[str, Any] = {"samples": settings.samples, "seed": seed, "max_tokens": settings.max_tokens}
        self._judge = Judge(settings.url or "", settings.model, settings.rubric, **limits)

    async def judge(self, group: Group, task: Task) -> None:
        """Add `judge.weight` times a number from 0 to 1 to the last turn of each episode that has not failed.

        Without a verdict the group has no rewards: its episodes have failed.
        """
        by, seed = self._settings.by, self._seed
        try:
            numbers = await judge_group(
                self._judge, group, task, by="scores" if by == "scores" else "ranking", seed=seed
            )
        except JudgeError as error:
            for trajectory in group.trajectories:
                trajectory.end, trajectory.error = "error", trajectory.error or str(error)
            return
        for trajectory, number in zip(group.trajectories, numbers, strict=True):
            if number is not None and trajectory.turns:
                # That of the environment: a reward of the judge's is no sign of it.
                trajectory.metrics.setdefault("success", trajectory.success)
                trajectory.judged([], self._settings.weight * number, {METRIC: number})
                trajectory.metrics[METRIC] = number
