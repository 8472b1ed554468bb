"""The console display of a run: a live table on a terminal, one line for each step elsewhere."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from agent_train.algorithms.selection import SelectionMetrics
    from agent_train.report.tracking import EvalMetrics, SftMetrics, StepMetrics, Summary
    from agent_train.trainer.run_folder import RunFolder

ROWS = 10
REFRESH_PER_SECOND = 4
# Off a terminal, a phase whose detail keeps changing is printed again only after so many seconds.
REPEAT_PHASE_SECONDS = 15.0
NARROW = 100
# On a narrow terminal those that the step's line must have stay: all up to "sync s".
ALWAYS = 8
COLUMNS = (
    "step",
    "reward",
    "success",
    "held-out",
    "tokens/s",
    "rollout s",
    "learn s",
    "sync s",
    "gap",
    "grad norm",
    "entropy",
)


class Display:
    """The console's side of a tracker. It keeps nothing that is not shown."""

    def __init__(self, console: Console, title: str, total_steps: int):
        self.console = console
        self._title = title
        self._total = total_steps
        self._rows: deque[StepMetrics] = deque(maxlen=ROWS)
        self._evals: dict[int, EvalMetrics] = {}
        self._phase = self._detail = ""
        self._phase_began = self._printed = self._began = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._episodes = self._errors = self._retried = 0
        self._error = self._before = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, eta="")
        self._live: Live | None = None

    def start(self) -> None:
        """Put up the live display, if the console is a terminal."""
        if self.console.is_terminal and self._live is None:
            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=REFRESH_PER_SECOND)
            self._live.start()

    def stop(self) -> None:
        """Take it down; what it showed last stays on the screen."""
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print one line above the live display."""
        self.console.print(Text(text), soft_wrap=True, highlight=False)

    def phase(self, name: str, detail: str) -> None:
        """Show the current phase. Off a terminal a new name is printed at once, a new detail only now and then."""
        now = time.monotonic()
        if name != self._phase:
            self._phase_began, self._episodes = now, 0
        repeat = name != self._phase or (detail != self._detail and now - self._printed > REPEAT_PHASE_SECONDS)
        self._phase, self._detail = name, detail
        if self._live is None and repeat:
            self._printed = now
            self.say(f"[{now - self._began:6.0f} s] {name}{': ' + detail if detail else ''}")

    def episode_ended(self, error: str | None, before: Sequence[str] = ()) -> None:
        """One episode more; the latest error is shown until the step ends. `before` are those for which it was run again."""
        self._episodes += 1
        if error is not None:
            self._errors += 1
            self._error = _last_line(error)
        if before:
            self._retried += 1
            self._before = _last_line(before[-1])

    def show_sft(self, metrics: SftMetrics) -> None:
        """One optimizer step of the warm start."""
        self.phase("warm start", f"{metrics.step} of {metrics.steps}, loss {metrics.loss:.3f}")

    def show_file_step(self, step: int, steps: int, line: str) -> None:
        """One optimizer step of a mode without episodes."""
        self._bar.update(self._task, completed=step, total=steps)
        if self._live is None:
            self.say(line)
        else:
            self.phase("training", line)

    def show_step(self, metrics: StepMetrics) -> None:
        """One training step."""
        self._rows.append(metrics)
        eta = self._eta(metrics)
        self._bar.update(self._task, completed=metrics.step, eta=eta)
        if self._live is None:
            self.say(f"{_step_line(metrics, self._total)}{'  ' + eta if eta else ''}")
        if metrics.update is None and not metrics.selection.episodes:
            self.say(f"step {metrics.step}: nothing to learn from: {_why_nothing(metrics.selection)}")
        if metrics.failed:
            of = metrics.episodes + metrics.failed
            self.say(
                f"step {metrics.step}: {metrics.failed} of {of} episodes failed and were left out; the last error: {self._error}"
            )
        if metrics.retried:
            self.say(
                f"step {metrics.step}: {metrics.retried} of {metrics.episodes + metrics.failed} episodes were run again after an"
                f" error; the last: {self._before}"
            )
        self._episodes = self._errors = self._retried = 0

    def show_eval(self, metrics: EvalMetrics) -> None:
        """One evaluation."""
        self._evals[metrics.step] = metrics
        self._episodes = self._errors = self._retried = 0
        failed = f", {metrics.failed} failed" if metrics.failed else ""
        failed += f", {metrics.retried} run again after an error: {self._before}" if metrics.retried else ""
        line = f"held-out success after step {metrics.step}: {_percent(metrics.success)} ({_percent(metrics.low)} to {_percent(metrics.high)}, {metrics.episodes} episodes{failed})"
        # On a terminal the table shows those that belong to a row; step 0 belongs to none.
        if self._live is None or metrics.step == 0:
            self.say(line)

    def show_summary(self, summary: Summary, outcome: str, run: RunFolder) -> None:
        """The closing table."""
        table = Table(title=f"{run.name}: {outcome}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in summary.instead or _closing(summary):
            table.add_row(name, text)
        checkpoint = run.latest_checkpoint()
        for name, path in (
            ("metrics", run.metrics),
            ("trajectories", run.trajectories),
            ("checkpoint", checkpoint),
            ("report", run.report),
        ):
            table.add_row(name, "none" if path is None else _short(path))
        self.console.print(table)

    def _eta(self, metrics: StepMetrics) -> str:
        """Time to the end at the pace since the first step began, evaluations and checkpoints included."""
        now = time.monotonic()
        if self._first is None:
            self._first = (metrics.step, now - metrics.step_seconds)
        step, began = self._first
        pace = (now - began) / (metrics.step - step + 1)
        return f"{_duration(pace * (self._total - metrics.step))} left" if metrics.step < self._total else ""

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if self._rows:
            parts.append(self._table())
        parts.append(self._bar)
        if self._phase:
            parts.append(Text(self._status(), no_wrap=True, overflow="ellipsis", style="dim"))
        return Group(*parts)

    def _status(self) -> str:
        seconds = time.monotonic() - self._phase_began
        episodes = f", {self._episodes} episodes ended" if self._episodes else ""
        failed = f", {self._errors} failed ({self._error})" if self._errors else ""
        failed += f", {self._retried} run again ({self._before})" if self._retried else ""
        return f"{self._phase} {seconds:.0f} s{': ' + self._detail if self._detail else ''}{episodes}{failed}"

    def _table(self) -> Table:
        shown = len(COLUMNS) if self.console.width >= NARROW else ALWAYS
        table = Table(box=SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in COLUMNS[:shown]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*self._cells(row)[:shown])
        return table

    def _cells(self, row: StepMetrics) -> tuple[str, ...]:
        held_out = self._evals.get(row.step)
        return (
            str(row.step),
            f"{row.reward:.3f}",
            _percent(row.success),
            _percent(held_out.success) if held_out else "",
            f"{row.tokens_per_second:,.0f}",
            f"{row.rollout_seconds:.1f}",
            f"{row.learn_seconds:.1f}",
            f"{row.sync_seconds:.2f}",
            *_update_cells(row),
        )


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1][:200] if error.strip() else "no message"


def _why_nothing(selection: SelectionMetrics) -> str:
    if selection.masked:
        return f"all {selection.masked} episodes were cut off at a limit, and algorithm.overlong.mask leaves those out"
    return f"algorithm.filter keeps none of the {selection.groups} groups that were played"


def _update_cells(row: StepMetrics) -> tuple[str, str, str]:
    """Gap, gradient norm and entropy; nothing where the policy was not updated."""
    if row.update is None:
        return "", "", ""
    return f"{row.update.gap_mean:.1e}", f"{row.update.grad_norm:.3f}", f"{row.update.entropy:.3f}"


def _learned(row: StepMetrics) -> str:
    """The learner's part of a step's line."""
    gap, norm, entropy = _update_cells(row)
    update = f"gap {gap}  grad norm {norm}  entropy {entropy}" if gap else "no update of the policy"
    return update if row.critic is None else f"{update}  explained variance {row.critic.explained_variance:.2f}"


def _step_line(row: StepMetrics, total: int) -> str:
    return (
        f"step {row.step}/{total}  reward {row.reward:.3f}  success {_percent(row.success)}  {row.tokens_per_second:,.0f} tokens/s  "
        f"rollout {row.rollout_seconds:.1f} s  learn {row.learn_seconds:.1f} s  sync {row.sync_seconds:.2f} s  "
        f"{_learned(row)}"
    )


def _closing(summary: Summary) -> list[tuple[str, str]]:
    """The rows of a run that played episodes."""
    shares = {
        "success at the start": summary.start,
        "success at the end": summary.end,
        "best success": summary.best,
    }
    rows = [(name, "not measured" if share is None else _percent(share)) for name, share in shares.items()]
    done = f"{summary.steps} steps, {summary.episodes:,} episodes, {summary.tokens:,} sampled tokens"
    return [*rows, ("time", f"{summary.minutes:.1f} minutes"), ("training", done)]


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
