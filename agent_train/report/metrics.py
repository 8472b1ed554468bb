"""Metrics of a run, and `metrics.jsonl`, where each is one JSON object: `kind`, `step`, `elapsed` and the fields of its dataclass."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agent_train.algorithms.advantages import has_spread
from agent_train.algorithms.collapse import CollapseMetrics, health
from agent_train.report.timeline import LOOP, Timeline
from agentgym.core.trajectory import NO_LIMIT, Group, Trajectory
from agentgym.evaluate.statistics import success_interval

if TYPE_CHECKING:
    from agent_train.algorithms.ratings import PlayersMetrics
    from agent_train.algorithms.selection import SelectionMetrics
    from agent_train.learner.critic_objective import CriticMetrics, PrmMetrics
    from agent_train.learner.measures import UpdateMetrics
    from agent_train.rollout.pools import PoolMetrics

Record = dict[str, Any]
OFFLINE_KINDS = {"sft": "sft", "dpo": "preference", "rm": "reward_model"}
HELD_OUT = "held_out"
# Fields of a step that tell what was played again, not what was trained.
OF_FAILURES = frozenset({"journal_turns", "retried_turns", "diverged", "replaced_tokens"})
_HELD_OUT_FIELDS = ("kind", "elapsed", "step", "loss", "examples")  # the others are measures


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
    """Stopwatch of a step: `lap(name)` ends a part that began at the previous lap, or when the clock was made.

    The parts are spans of the loop in the `timeline`.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._timeline = timeline or Timeline()
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """End the present part and call it `name`; seconds add up where a name comes again."""
        now = time.monotonic()
        self._timeline.add(LOOP, name, self._last, now)
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self._last)
        self._last = now


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
    """Held-out tasks played with the weights of `step`. Episodes that failed are in no mean."""

    kind: ClassVar[str] = "eval"
    step: int
    success: float  # share of the episodes, 0 to 1
    low: float  # of its 95% interval
    high: float
    reward: float
    turns: float
    episodes: int  # played to an end
    failed: int  # the others
    retried: int  # of all, run again after an error, of a lost server for example
    context: float = 0.0  # share that ended because the context was full
    env: dict[str, float] = field(default_factory=dict)  # see `_env_means`


@dataclass(frozen=True)
class AgentMetrics:
    """Sampled tokens of agents that play by themselves: a part of `StepMetrics`. Episodes that failed are in it."""

    trainable: float  # share of them
    lost: dict[str, int]  # the others, by the reason
    forks: dict[str, int]  # prompts that do not go on from the call before, by the reason
    changed: dict[str, int]  # settings that were not honoured


@dataclass(frozen=True)
class StepMetrics:
    """One training step; for the fields see docs/metrics.md. Episodes that failed are in no mean."""

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
    pools: PoolMetrics | None = None
    players: PlayersMetrics | None = None
    own: dict[str, UpdateMetrics | None] = field(default_factory=dict)  # of players: as `update`, of their own policies
    agent: AgentMetrics | None = None
    journal_turns: int = 0
    retried_turns: int = 0
    diverged: int = 0
    replaced_tokens: int = 0
    context: float = 0.0  # share of the episodes that ended because the context was full
    summaries: float = 0.0  # of an episode, mean
    env: dict[str, float] = field(default_factory=dict)  # see `_env_means`


@dataclass(frozen=True)
class _Measured:
    """A line of `metrics.jsonl`: the fields, and beside them the measures."""

    measures: dict[str, float]

    def record(self) -> Record:
        return {**{key: value for key, value in vars(self).items() if key != "measures"}, **self.measures}


@dataclass(frozen=True, kw_only=True)
class FileStep(_Measured):
    """One optimizer step of a mode.

    `measures` are means over the batch before the step: accuracy, and of preferences the rewards beta * log(p / reference), of
    reward models the scores: margin, chosen, rejected.
    """

    kind: str  # one of OFFLINE_KINDS
    step: int  # from 1 to `steps`
    steps: int
    epoch: int  # from 1
    loss: float  # before the step. Of sft nats a token, else the mean over the batch's pairs or answers
    tokens: int  # that were learned
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the weights were not changed, because the loss or the gradient was not finite
    seconds: float

    def line(self) -> str:
        numbers = "  ".join(["", *_told(self.measures)]) if self.measures else ""
        skipped = "  skipped: not finite" if self.skipped else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}{numbers}  grad norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2g}  {self.tokens:,} tokens  {self.seconds:.1f} s{skipped}"
        )


@dataclass(frozen=True, kw_only=True)
class HeldOut(_Measured):
    """The examples of `data.test` with the weights of a step; `loss` and `measures` as in `FileStep`, means over all of them."""

    step: int
    loss: float
    examples: int
    kind: str = HELD_OUT

    def line(self) -> str:
        told = ", ".join([f"loss {self.loss:.4f}", *_told(self.measures)])
        return f"held-out after step {self.step}: {told} ({self.examples:,} examples)"


@dataclass(frozen=True)
class Summary:
    """A whole run in a few numbers."""

    minutes: float  # wall time
    steps: int
    episodes: int  # of training, evaluation not counted
    tokens: int  # of these
    curve: list[tuple[int, float]]  # `(step, success)` on the held-out tasks, of every evaluation
    # The closing table's rows without episodes, name and text.
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
    ahead: bool = False,
) -> StepMetrics:
    """The measurements of one step: of all groups that were played, trained on or not.

    `clock` has the laps "rollout", "score", "learn" and "sync"; `advantages` are their mean and standard deviation. With
    `ahead` the rollout ran during earlier steps, and its lap is what was left to wait for.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    played = [t for t in trajectories if not t.failed]
    rewards = [t.reward for t in played]
    differ = [has_spread([t.reward for t in group.trajectories if not t.failed]) for group in groups]
    tokens = sum(t.sampled_tokens for t in trajectories)
    seconds = {part: clock.seconds.get(part, 0.0) for part in ("rollout", "score", "learn", "sync")}
    sampling = sum(clock.seconds.values()) if ahead else seconds["rollout"]
    return StepMetrics(
        step=step,
        reward=_mean(rewards),
        reward_std=statistics.pstdev(rewards) if rewards else math.nan,
        success=_mean([t.success for t in played]),
        turns=_mean([len(t.turns) for t in played]),
        episodes=len(played),
        failed=len(trajectories) - len(played),
        retried=_retried(trajectories),
        mixed_groups=_mean([float(each) for each in differ]),
        truncated=_mean([float(t.end not in NO_LIMIT) for t in played]),
        sampled_tokens=tokens,
        tokens_per_second=tokens / sampling if sampling else math.nan,
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
        agent=_agent_metrics(trajectories),
        context=_mean([float(t.end == "context") for t in played]),
        summaries=_mean([len(t.summaries) for t in played]),
        env=_env_means(played),
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
        context=_mean([float(t.end == "context") for t in played]),
        env=_env_means(played),
    )


def _agent_metrics(trajectories: Sequence[Trajectory]) -> AgentMetrics | None:
    told = [t.metadata["agent"] for t in trajectories if "agent" in t.metadata]
    if not told:
        return None
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("lost", "forks", "changed")}
    for each in told:
        for name, counter in counts.items():
            counter.update(each["changed"] if name == "changed" else each["share"][name])
    sampled, trainable = (sum(each["share"][name] for each in told) for name in ("sampled", "trainable"))
    return AgentMetrics(trainable / sampled if sampled else math.nan, *(dict(counts[name]) for name in counts))


def _env_means(played: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the numbers that an environment tells at the end, and of what each player earned, over the episodes that have it."""
    told = [{**t.metrics, **{f"reward/{player}": reward for player, reward in t.rewards.items()}} for t in played]
    names = {name for numbers in told for name in numbers if name != "success"}
    return {name: _mean([numbers[name] for numbers in told if name in numbers]) for name in sorted(names)}


def _retried(trajectories: Sequence[Trajectory]) -> int:
    return sum(bool(trajectory.metadata.get("errors")) for trajectory in trajectories)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def summary_of(records: Sequence[Record], seconds: float) -> Summary:
    """The summary of the records of a `metrics.jsonl`, of a run that took these seconds."""
    train = [record for record in records if record["kind"] == "train"]
    return Summary(
        minutes=seconds / 60,
        steps=train[-1]["step"] if train else 0,
        episodes=sum(record["episodes"] for record in train),
        tokens=sum(record["sampled_tokens"] for record in train),
        curve=[(r["step"], r["success"]) for r in records if r["kind"] == "eval" and r["success"] is not None],
        instead=_closing_of_files(records, seconds),
    )


def _closing_of_files(records: Sequence[Record], seconds: float) -> list[tuple[str, str]]:
    steps = [record for record in records if "epoch" in record]
    held_out = [record for record in records if record["kind"] == HELD_OUT]
    if not steps:
        return []
    rows = []
    if held_out:
        for name, one in (("held-out at the start", held_out[0]), ("held-out at the end", held_out[-1])):
            measures = {key: value for key, value in one.items() if key not in _HELD_OUT_FIELDS}
            rows.append((name, ", ".join([f"loss {_number(one['loss']):.4f}", *_told(measures)])))
    else:
        first, last = (_number(record["loss"]) for record in (steps[0], steps[-1]))
        rows.append(("loss", f"{first:.4f} in the first step, {last:.4f} in the last"))
    rows.append(("time", f"{seconds / 60:.1f} minutes"))
    rows.append(("training", f"{len(steps)} steps, {sum(step['tokens'] for step in steps):,} learned tokens"))
    return rows


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _told(measures: Mapping[str, float | None]) -> list[str]:
    return [
        f"{name.replace('_', ' ')} {value:.1%}" if name == "accuracy" else f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in measures.items()
        if value is not None and math.isfinite(value)
    ]
