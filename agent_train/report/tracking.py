"""Metrics of a run: shown while it runs, kept in `metrics.jsonl`.

A record of that file is one JSON object with `kind` ("sft", "eval" or "train"), `step` and `elapsed` (seconds since the
run began), and the fields of the dataclass of its kind. A number that is not finite is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from agent_train.algorithms.collapse import Health, health
from agent_train.report.display import Display
from agent_train.report.metrics_file import read_metrics
from agent_train.trainer.offline.metrics import HELD_OUT, FileStep, HeldOut, closing
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import Group, Trajectory
from agentgym.evaluate import success_interval

if TYPE_CHECKING:
    from agent_train.algorithms.selection import SelectionMetrics
    from agent_train.learner.critic_objective import CriticMetrics
    from agent_train.learner.measures import UpdateMetrics
    from agent_train.learner.prm_objective import PrmMetrics


class Clock:
    """Stopwatch of a step: `lap(name)` ends a part that began at the previous lap, or when the clock was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> float:
        """End the present part and call it `name`; its seconds are returned, and added up where a name comes again."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last, elapsed = now, now - self._last
        return elapsed

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())


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
        reward, turns: means.
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
    """One training step. Episodes that failed are in no mean.

    Attributes:
        reward, success, turns: means over episodes; `reward_std` is the spread of the rewards (n, not n-1).
        episodes: how many were played to an end; `failed` others were not.
        retried: how many of all were run again after an error, of a lost server for example.
        mixed_groups: share of the groups whose rewards differ, which are those that teach.
        truncated: share of the episodes that a limit ended.
        sampled_tokens: tokens that the policy sampled; `tokens_per_second` is these over the rollout's seconds.
        rollout_seconds, score_seconds, learn_seconds, sync_seconds, step_seconds: wall time; the last is all of them together.
            `score` is the scoring by the other models, and the advantages.
        weights_checksum: of the weights that the engine holds after the step.
        health: signs of a collapse, of all episodes that were played to an end.
        selection: how much of the step was trained on.
        advantage_mean, advantage_std: of the advantages, over the sampled tokens in the loss.
        kl_coef: coefficient of the KL to the reference, in the reward or in the loss.
        update: of the policy; None where nothing was left to train on, or the critic learns alone.
        critic, prm: of the critic and of PRIME's reward model, where the run has them.
    """

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
    health: Health | None
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
        start, end, best: success on the held-out tasks, 0 to 1: first, last and highest evaluation; None without any.
        minutes: wall time from the tracker's start.
        episodes, tokens: of training, evaluation not counted.
        curve: `(step, success)` of every evaluation.
        instead: what a run without episodes has to say for itself, name and text.
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


class Tracker:
    """Takes every measurement of a run; shows it, and appends it to `metrics.jsonl` at once.

    Use it as a context manager: the live display must be taken down before the terminal is given back.

    Args:
        run: where `metrics.jsonl` is.
        total_steps: training steps of the run.
        console: default: standard output. Live if it is a terminal, a line for each step if it is not.
        also: the trackers of `trainer.trackers`: each is called with every record of `metrics.jsonl`.
        elapsed: seconds that the run had taken before it was resumed. What it had measured is read from `metrics.jsonl`.
    """

    def __init__(
        self,
        run: RunFolder,
        total_steps: int,
        console: Console | None = None,
        elapsed: float = 0.0,
        also: Sequence[Callable[[dict[str, Any]], object]] = (),
    ):
        self.run = run
        self._also = also
        self._began = time.monotonic() - elapsed
        self._display = Display(console or Console(), title=run.name, total_steps=total_steps)
        self._evals: list[EvalMetrics] = []
        self._file_steps: list[FileStep] = []
        self._held_out: list[HeldOut] = []
        self._steps = self._episodes = self._tokens = 0
        for record in read_metrics(run.metrics) if run.metrics.exists() else []:
            self._count_again(record)
        self._out = run.metrics.open("a", encoding="utf-8")

    def __enter__(self) -> Tracker:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the display down and close the file. May be called twice."""
        self._display.stop()
        self._out.close()

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far; those before it was resumed count."""
        return time.monotonic() - self._began

    def phase(self, name: str, detail: str = "") -> None:
        """Say what is going on: `phase("starting vLLM", "12 s: Loading weights")`."""
        self._display.phase(name, detail)

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""
        self._display.say(text)

    def episode_ended(self, trajectory: Trajectory) -> None:
        """Count an episode, so that a long rollout is seen to move."""
        self._display.episode_ended(trajectory.error, trajectory.metadata.get("errors", []))

    def sft_step(self, step: int, steps: int, loss: float, tokens: int) -> None:
        """Record one optimizer step of the warm start."""
        metrics = SftMetrics(step=step, steps=steps, loss=loss, tokens=tokens)
        self._write(metrics)
        self._display.show_sft(metrics)

    def file_step(self, step: FileStep) -> None:
        """Record one optimizer step of a mode that learns from files."""
        self._file_steps.append(step)
        self._append(step.record())
        self._display.show_file_step(step.step, step.steps, step.line())

    def held_out(self, measured: HeldOut) -> None:
        """Record the held-out examples of such a mode."""
        self._held_out.append(measured)
        self._append(measured.record())
        self._display.say(measured.line())

    def train_step(self, metrics: StepMetrics) -> None:
        """Record one training step."""
        self._steps = metrics.step
        self._episodes += metrics.episodes
        self._tokens += metrics.sampled_tokens
        self._write(metrics)
        self._display.show_step(metrics)

    def evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> EvalMetrics:
        """Record the held-out episodes that were played with the weights of a step."""
        metrics = eval_metrics(step, trajectories)
        self._evals.append(metrics)
        self._write(metrics)
        self._display.show_eval(metrics)
        return metrics

    def summary(self) -> Summary:
        """The run so far."""
        curve = [(m.step, m.success) for m in self._evals if math.isfinite(m.success)]
        return Summary(
            start=curve[0][1] if curve else None,
            end=curve[-1][1] if curve else None,
            best=max(success for _, success in curve) if curve else None,
            minutes=self.elapsed / 60,
            steps=self._steps,
            episodes=self._episodes,
            tokens=self._tokens,
            curve=curve,
            instead=closing(self._held_out, self._file_steps, self.elapsed) if self._file_steps else [],
        )

    def finish(self, outcome: str = "finished") -> Summary:
        """Close the display and print the closing table.

        Args:
            outcome: how the run ended, for its title: "finished", "interrupted", "failed".
        """
        summary = self.summary()
        self.close()
        self._display.show_summary(summary, outcome, self.run)
        return summary

    def _count_again(self, record: dict[str, Any]) -> None:
        """Take up what the run measured before it was resumed."""
        if record["kind"] == "eval":
            names = [field.name for field in dataclasses.fields(EvalMetrics)]
            record = {"retried": 0, **record}  # which runs of before did not count
            values: dict[str, Any] = {n: math.nan if record[n] is None else record[n] for n in names}
            self._evals.append(EvalMetrics(**values))
        elif record["kind"] == HELD_OUT:
            self._held_out.append(HeldOut.of(record))
        elif "epoch" in record:
            self._file_steps.append(FileStep.of(record))
        elif record["kind"] == "train":
            self._steps = record["step"]
            self._episodes += record["episodes"]
            self._tokens += record["sampled_tokens"]

    def _write(self, metrics: SftMetrics | EvalMetrics | StepMetrics) -> None:
        self._append({"kind": metrics.kind, **dataclasses.asdict(metrics)})

    def _append(self, fields: dict[str, Any]) -> None:
        record = {"kind": fields["kind"], "elapsed": round(self.elapsed, 3), **fields}
        record = _finite(record)
        self._out.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._out.flush()
        for track in self._also:
            try:
                track(record)
            except Exception as error:  # a tracker that fails does not end the run
                self.note(f"tracker {track!r}: {type(error).__name__}: {error}")


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
        selection: how much of the step was trained on.
        advantages: their mean and standard deviation.
        kl_coef, update, critic, prm: as in `StepMetrics`.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    played = [t for t in trajectories if not t.failed]
    rewards = [t.reward for t in played]
    spreads = [{t.reward for t in group.trajectories if not t.failed} for group in groups]
    tokens = sum(t.sampled_tokens for t in trajectories)
    rollout = clock.seconds.get("rollout", 0.0)
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
        tokens_per_second=tokens / rollout if rollout else math.nan,
        rollout_seconds=rollout,
        score_seconds=clock.seconds.get("score", 0.0),
        learn_seconds=clock.seconds.get("learn", 0.0),
        sync_seconds=clock.seconds.get("sync", 0.0),
        step_seconds=clock.total,
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
    """The measurements of one evaluation."""
    played = [t for t in trajectories if not t.failed]
    success = [t.success for t in played]
    by_task: dict[str, list[float]] = {}
    for trajectory in played:
        by_task.setdefault(trajectory.task_id, []).append(trajectory.success)
    low, high = success_interval(list(by_task.values())) if played else (0.0, 1.0)
    return EvalMetrics(
        step=step,
        success=_mean(success),
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


def _finite(value: Any) -> Any:
    """The same value with null in place of every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
