"""The tracker of a run: takes its measurements, shows them, and keeps them in `metrics.jsonl`."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from agent_train.report.display import Display
from agent_train.report.metrics import (
    HELD_OUT,
    EvalMetrics,
    FileStep,
    HeldOut,
    SftMetrics,
    StepMetrics,
    Summary,
    eval_metrics,
    read_metrics,
    summary_of,
)
from agent_train.report.timeline import Timeline
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import Trajectory
from agentgym.storage.jsonl import encodable, finite


class Tracker:
    """Takes every measurement of a run; shows it, and appends it to `metrics.jsonl` at once. A context manager.

    The console, by default standard output, is live if it is a terminal and gets a line for each step if it is not. Of a run that is
    resumed `elapsed` are its seconds before; earlier measurements are read from `metrics.jsonl`. `also` are the trackers of
    `trainer.trackers`: each is called with every record.
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
        self._display = Display(console, title=run.name, total_steps=total_steps)
        # `phase("starting vLLM", "12 s: Loading weights")` and `activity("playing step 3")` show what the run does now, the
        # second within a step; `note` prints a line that stays.
        self.phase, self.activity, self.note = self._display.phase, self._display.activity, self._display.say
        self.timeline = Timeline(run.timeline)
        self._open()

    def _open(self) -> None:
        """Read the records of `metrics.jsonl` and append to it from now on."""
        self._records = read_metrics(self.run.metrics) if self.run.metrics.exists() else []
        self._out = self.run.metrics.open("a", encoding="utf-8")

    def go_back(self, step: int) -> None:
        """Go on as after this step: `metrics.jsonl` was cut behind it, and is another file now."""
        self._out.close()
        self._open()
        self._display.go_back(step)

    def __enter__(self) -> "Tracker":
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the display down and close the file. May be called twice."""
        self._display.stop()
        with contextlib.suppress(OSError):  # a line that a full disk did not take, as was told, is tried again
            self._out.close()
        self.timeline.write()

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far; those before it was resumed count."""
        return time.monotonic() - self._began

    def episode_ended(self, trajectory: Trajectory) -> None:
        """Count an episode, so that a long rollout is seen to move."""
        self.timeline.episode(trajectory)
        self._display.episode_ended(trajectory.error, trajectory.metadata.get("errors", []))

    def sft_step(self, step: int, steps: int, loss: float, tokens: int) -> None:
        self._write(SftMetrics(step, steps, loss, tokens))
        self.phase("warm start", f"{step} of {steps}, loss {loss:.3f}")

    def file_step(self, step: FileStep) -> None:
        self._append(step.record())
        self._display.show_file_step(step.step, step.steps, step.line())

    def held_out(self, measured: HeldOut) -> None:
        self._append(measured.record())
        self.note(measured.line())

    def measured(self, step: int) -> bool:
        """True if a step's weights were evaluated on held-out tasks, or on the examples of `data.test`."""
        return any(
            record["step"] == step and record["kind"] in (EvalMetrics.kind, HELD_OUT) for record in self._records
        )

    def train_step(self, metrics: StepMetrics, played: Sequence[Trajectory] = ()) -> None:
        """Record a step; `played` are its episodes, whose errors are shown."""
        self._write(metrics)
        self._display.show_step(metrics, *_last_errors(played))

    def evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> EvalMetrics:
        """Record the held-out episodes that were played with the weights of a step."""
        metrics = eval_metrics(step, trajectories)
        self._write(metrics)
        self._display.show_eval(metrics, _last_errors(trajectories)[1])
        return metrics

    def finish(self, outcome: str = "finished") -> Summary:
        """Close the display and print the closing table; `outcome` is in its title: "finished", "interrupted", "failed"."""
        summary = summary_of(self._records, self.elapsed)
        self.close()
        self._display.show_summary(summary, outcome, self.run)
        return summary

    def _write(self, metrics: SftMetrics | EvalMetrics | StepMetrics) -> None:
        self._append({"kind": metrics.kind, **dataclasses.asdict(metrics)})

    def _append(self, fields: dict[str, Any]) -> None:
        record = finite({"kind": fields["kind"], "elapsed": round(self.elapsed, 3), **fields})
        self._records.append(record)
        self._out.write(encodable(record, allow_nan=False) + "\n")
        self._out.flush()
        for track in self._also:
            try:
                track(record)
            except Exception as error:  # a tracker that fails does not end the run
                self.note(f"tracker {track!r}: {type(error).__name__}: {error}")


def _last_errors(played: Sequence[Trajectory]) -> tuple[str, str]:
    """Of the last episode that failed and of the last one that was run again, "" if there is none.

    Not those that were told as episodes ended: a judge fails after that, and several rollouts may run at once.
    """
    failures = [trajectory.error or "" for trajectory in played if trajectory.failed]
    again = [trajectory.metadata["errors"][-1] for trajectory in played if trajectory.metadata.get("errors")]
    return next(reversed(failures), ""), next(reversed(again), "")
