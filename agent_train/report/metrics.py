"""Metrics of a run, and `metrics.jsonl`, where each is one JSON object: `kind`, `step`, `elapsed` and the fields of its dataclass."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agent_train.algorithms.collapse import CollapseMetrics, health
from agentgym.core.trajectory import Group, Trajectory
from agentgym.evaluate.statistics import success_interval

if TYPE_CHECKING:
    from agent_train.algorithms.selection import SelectionMetrics
    from agent_train.learner.critic_objective import CriticMetrics, PrmMetrics
    from agent_train.learner.measures import UpdateMetrics

Record = dict[str, Any]


def record_of(line: bytes) -> Record | None:
    """The record of one line of `metrics.jsonl`; None where it is cut off, or something else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"kind", "step"} <= found.keys() else None


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a `metrics.jsonl`, in order, without invalid lines."""
    with Path(path).open("rb") as lines:
        return [record for line in lines if (record := record_of(line)) is not None]


class Clock:
    """Stopwatch of a step: `lap(name)` ends a part that began at the previous lap, or when the clock was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> float:
        """End the present part and call it `name`; returns its seconds, which add up where a name comes again."""
        now = time.monotonic()
        self._last, elapsed = now, now - self._last
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        return elapsed


@dataclass(frozen=True)
class SftMetrics:
    """One optimizer step of the warm start. `step` counts from 1 to `steps`; `loss` is nats a token."""

    kind: ClassVar[str] = "sft"
    step: int
    steps: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class EvalMetrics:
    """Held-out tasks played with the weights of `step`. Episodes that failed are in no mean.

    Attributes:
        success: share of the episodes, 0 to 1; `low` and `high` are its 95% interval.
        episodes: how many were played to an end; `failed` others were not.
        retried: how many of all were run again after an error, of a lost server for example.
    """

    kind: ClassVar[str] = "eval"
    step: int
    success: float
    low: float
    high: float
    reward: float
    turns: float
    episodes: int
    failed: int
    retried: int


@dataclass(frozen=True)
class StepMetrics:
    """One training step; for the fields see docs/training.md. Episodes that failed are in no mean."""

    kind: ClassVar[str] = "train"
    step: int
    reward: float
    reward_std: float
    success: float
    turns: float
    episodes: int
    failed: int
    retried: int
    mixed_groups: float
    truncated: float
    sampled_tokens: int
    tokens_per_second: float
    rollout_seconds: float
    score_seconds: float
    learn_seconds: float
    sync_seconds: float
    step_seconds: float
    weights_checksum: int
    health: CollapseMetrics | None
    selection: SelectionMetrics
    advantage_mean: float
    advantage_std: float
    kl_coef: float
    update: UpdateMetrics | None
    critic: CriticMetrics | None
    prm: PrmMetrics | None


@dataclass(frozen=True)
class Summary:
    """A whole run in a few numbers.

    Attributes:
        start, end, best: success on the held-out tasks: first, last and highest evaluation; None without any.
        minutes: wall time from the tracker's start.
        episodes, tokens: of training, evaluation not counted.
        curve: `(step, success)` of every evaluation.
        instead: the closing table's rows of a run without episodes, name and text.
    """

    start: float | None
    end: float | None
    best: float | None
    minutes: float
    steps: int
    episodes: int
    tokens: int
    curve: list[tuple[int, float]]
    instead: list[tuple[str, str]] = field(default_factory=list)


def step_metrics(
    step: int,
    groups: Sequence[Group],
    clock: Clock,
    checksum: int,
    selection: SelectionMetrics,
    advantages: tuple[float, float] = (0.0, 0.0),
    kl_coef: float = 0.0,
    update: UpdateMetrics | None = None,
    critic: CriticMetrics | None = None,
    prm: PrmMetrics | None = None,
) -> StepMetrics:
    """The measurements of one step.

    Args:
        step: its number, from 1.
        groups: all that were played, trained on or not.
        clock: with the laps "rollout", "score", "learn" and "sync".
        checksum: of the weights after the step.
        advantages: their mean and standard deviation.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    played = [t for t in trajectories if not t.failed]
    rewards = [t.reward for t in played]
    spreads = [{t.reward for t in group.trajectories if not t.failed} for group in groups]
    tokens = sum(t.sampled_tokens for t in trajectories)
    seconds = {part: clock.seconds.get(part, 0.0) for part in ("rollout", "score", "learn", "sync")}
    return StepMetrics(
        step=step,
        reward=_mean(rewards),
        reward_std=statistics.pstdev(rewards) if rewards else math.nan,
        success=_mean([t.success for t in played]),
        turns=_mean([len(t.turns) for t in played]),
        episodes=len(played),
        failed=len(trajectories) - len(played),
        retried=_retried(trajectories),
        mixed_groups=_mean([float(len(spread) > 1) for spread in spreads]),
        truncated=_mean([float(t.end != "terminated") for t in played]),
        sampled_tokens=tokens,
        tokens_per_second=tokens / seconds["rollout"] if seconds["rollout"] else math.nan,
        rollout_seconds=seconds["rollout"],
        score_seconds=seconds["score"],
        learn_seconds=seconds["learn"],
        sync_seconds=seconds["sync"],
        step_seconds=sum(clock.seconds.values()),
        weights_checksum=checksum,
        health=health(groups, math.nan if update is None else update.entropy),
        selection=selection,
        advantage_mean=advantages[0],
        advantage_std=advantages[1],
        kl_coef=kl_coef,
        update=update,
        critic=critic,
        prm=prm,
    )


def eval_metrics(step: int, trajectories: Sequence[Trajectory]) -> EvalMetrics:
    played = [t for t in trajectories if not t.failed]
    by_task: dict[str, list[float]] = {}
    for trajectory in played:
        by_task.setdefault(trajectory.task_id, []).append(trajectory.success)
    low, high = success_interval(list(by_task.values())) if played else (0.0, 1.0)
    return EvalMetrics(
        step=step,
        success=_mean([t.success for t in played]),
        low=low,
        high=high,
        reward=_mean([t.reward for t in played]),
        turns=_mean([len(t.turns) for t in played]),
        episodes=len(played),
        failed=len(trajectories) - len(played),
        retried=_retried(trajectories),
    )


def _retried(trajectories: Sequence[Trajectory]) -> int:
    return sum(bool(trajectory.metadata.get("errors")) for trajectory in trajectories)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
