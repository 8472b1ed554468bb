"""The means of a cell's episodes, and those of its tasks, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.evaluate.compared_runs import TaskMeans
from agentgym.evaluate.results import CellResult, EpisodeNumbers, results_of
from agentgym.evaluate.statistics import ClusteredMean
from agentgym.viewer.rows import Row


@dataclass(frozen=True)
class Numbers:
    """Means of the episodes that were played to an end; None where there are none.

    Attributes:
        reward, success, turns: means.
        low, high: 95% interval of `success`.
    """

    reward: float | None = None
    success: float | None = None
    low: float | None = None
    high: float | None = None
    turns: float | None = None


def numbers_of(rows: Sequence[Row]) -> Numbers:
    """The numbers of the rows that count: neither superseded nor failed."""
    played = [row for row in rows if not row.superseded and not row.failed]
    success = ClusteredMean()
    for row in played:
        success.add(row.task, row.success or 0.0)
    interval = success.share_interval()
    if interval is None:
        return Numbers()
    reward = sum(row.reward or 0.0 for row in played) / len(played)
    return Numbers(reward, success.mean, *interval, sum(row.turns for row in played) / len(played))


def result_of(rows: Sequence[Row], env: str, agent: str, split: str, samples: int, planned: int | None) -> CellResult:
    """The result of a cell as it is so far, from its rows: without what only endpoints count (requests, tokens read)."""
    numbers = [_episode_numbers(row) for row in rows if not row.superseded]
    return results_of(numbers, env=env, agent=agent, split=split, samples=samples, planned=planned)


def task_means(rows: Sequence[Row]) -> dict[str, TaskMeans]:
    """The means of each task, equal to those that `agentgym compare` makes from the episodes."""
    tasks: dict[str, TaskMeans] = {}
    for row in rows:
        if not row.superseded:
            tasks.setdefault(row.task, TaskMeans()).add(_episode_numbers(row))
    return tasks


def _episode_numbers(row: Row) -> EpisodeNumbers:
    return EpisodeNumbers(
        task=row.task,
        sample=row.sample,
        cause=row.cause,
        end=row.end,
        reward=row.reward or 0.0,
        success=row.success or 0.0,
        turns=row.turns,
        seconds=row.seconds or 0.0,
        usage={} if row.tokens is None else {"completion_tokens": row.tokens},
        requests=0,
        retries={},
        waited=0.0,
        cost=row.cost,
        tags=row.tags,
        difficulty=row.difficulty,
        finishes=row.finishes,
    )
