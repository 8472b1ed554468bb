"""The console display of a run: a live table on a terminal, one line for each step elsewhere."""

import contextlib
import io
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agent_train.report.metrics import EvalMetrics, StepMetrics, Summary
from agent_train.trainer.run_folder import RunFolder
from agentgym.evaluate.tables import duration, one_line, percent

ROWS = 10
REFRESH_PER_SECOND = 4
# Off a terminal, new details of a phase and the progress of a step are printed only after this many seconds without a line.
QUIET_SECONDS = 15.0
NARROW = 100
COLUMNS = ("step", "reward", "success", "held-out", "tokens/s", "rollout s", "learn s", "sync s")
UPDATE_COLUMNS = ("gap", "grad norm", "entropy")
FULL = 0.1  # share of a step's episodes that fill the context: from here on it is told


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - inside rich's handler, which would end the process without a word


class Display:
    """The console's side of a tracker. It keeps nothing that is not shown. By default the console is standard output.

    A run does not end because nobody reads what it shows, or because the disk of its output is full.
    """

    def __init__(self, console: Console | None, title: str, total_steps: int):
        if console is None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # errors tell what models say: half a surrogate pair, too
        self.console = console = console or _Console()
        self._title = title
        self._total = total_steps
        self._rows: deque[dict[str, str]] = deque(maxlen=ROWS)
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
        if self.console.is_terminal and self._live is None:
            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=REFRESH_PER_SECOND)
            self._live.start()

    def stop(self) -> None:
        """Stop it; its last picture stays on the screen."""
        if self._live is not None:
            self._phase = ""
            live, self._live = self._live, None
            with self._showing():
                live.stop()

    def say(self, text: str) -> None:
        self._printed = time.monotonic()
        self._print(Text(text), soft_wrap=True, highlight=False)

    def _print(self, shown: RenderableType, **how: Any) -> None:
        with self._showing():
            self.console.print(shown, **how)

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.console.quiet = True
            # Held-back output would otherwise be tried again as the process ends, and change its exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.file.fileno())
            with contextlib.suppress(OSError):
                sys.stderr.write(f"agent-train: the run goes on, but nothing more is shown: {error}\n")

    def phase(self, name: str, detail: str = "") -> None:
        """Show the current phase. Off a terminal a new name is printed at once, a new detail only now and then."""
        is_new, is_changed = name != self._phase, detail != self._detail
        self._enter(name, detail)
        if is_new or (is_changed and self._is_quiet()):
            self._say_after_start(f"{name}{': ' + detail if detail else ''}")

    def activity(self, name: str) -> None:
        """Show what a step does now, and the episodes that end. Off a terminal quick steps, which have a line each, show none of it."""
        was_long = time.monotonic() - self._phase_began > QUIET_SECONDS
        self._enter(name)
        if was_long:
            self._say_after_start(name)

    def _enter(self, name: str, detail: str = "") -> None:
        if name != self._phase:
            self._phase_began, self._episodes = time.monotonic(), 0
        self._phase, self._detail = name, detail

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._printed > QUIET_SECONDS

    def _say_after_start(self, text: str) -> None:
        """Off a terminal, print a line with the seconds since the start."""
        if self._live is None:
            self.say(f"[{time.monotonic() - self._began:6.0f} s] {text}")

    def episode_ended(self, error: str | None, before: Sequence[str] = ()) -> None:
        """Count an episode; the latest error is shown until the step ends. `before`: the errors of its earlier tries."""
        self._episodes += 1
        if error is not None:
            self._errors += 1
            self._error = _last_line(error)
        if before:
            self._retried += 1
            self._before = _last_line(before[-1])
        if self._is_quiet():
            self._say_after_start(self._status())

    def show_file_step(self, step: int, steps: int, line: str) -> None:
        self._bar.update(self._task, completed=step, total=steps)
        if self._live is None:
            self.say(line)
        else:
            self.phase("training", line)

    def show_step(self, metrics: StepMetrics, failure: str, again: str) -> None:
        """`failure` is an error of an episode that failed, if one did, and `again` one after which an episode was run again."""
        cells = _cells(metrics)
        self._rows.append(cells)
        eta = self._eta(metrics)
        self._bar.update(self._task, completed=metrics.step, eta=eta)
        step, played = f"step {metrics.step}", metrics.episodes + metrics.failed
        if self._live is None:
            self.say(_step_line(cells, metrics, self._total) + (eta and f"  {eta}"))
        if metrics.update is None and not metrics.selection.episodes:
            why = f"algorithm.filter keeps none of the {metrics.selection.groups} groups that were played"
            if masked := metrics.selection.masked:
                why = f"all {masked} episodes were cut off at a limit, and algorithm.overlong.mask leaves those out"
            self.say(f"{step}: nothing to learn from: {why}")
        if metrics.failed:
            failed = f"{metrics.failed} of {played} episodes failed and were left out"
            self.say(f"{step}: {failed}; the last error: {_last_line(failure)}")
        if metrics.retried:
            retried = f"{metrics.retried} of {played} episodes were run again after an error"
            self.say(f"{step}: {retried}; the last: {_last_line(again)}")
        if metrics.context >= FULL:
            full = f"{metrics.context:.0%} of the episodes ended because the context was full"
            remedy = "memory.tokens or memory.summaries" if metrics.summaries else "or set memory.name=summary"
            self.say(f"{step}: {full}: raise engine.max_model_len, {remedy}")
        if metrics.journal_turns:
            self.say(f"{step}: {metrics.journal_turns:,} turns were sampled before the run was resumed")
        self._episodes = self._errors = self._retried = 0

    def go_back(self, step: int) -> None:
        """Remove later steps from the display."""
        self._rows = deque((row for row in self._rows if int(row["step"]) <= step), maxlen=ROWS)
        self._first = None
        self._episodes = self._errors = self._retried = 0
        self._bar.update(self._task, completed=step, eta="")

    def show_eval(self, metrics: EvalMetrics, again: str) -> None:
        for row in self._rows:
            if row["step"] == str(metrics.step):
                row["held-out"] = percent(metrics.success)
        self._episodes = self._errors = self._retried = 0
        told = f"{percent(metrics.low)} to {percent(metrics.high)}, {metrics.episodes} episodes"
        told += f", {metrics.failed} failed" if metrics.failed else ""
        told += f", {metrics.retried} run again after an error: {_last_line(again)}" if metrics.retried else ""
        # On a terminal the table shows those that belong to a row; step 0 belongs to none.
        if self._live is None or metrics.step == 0:
            self.say(f"held-out success after step {metrics.step}: {percent(metrics.success)} ({told})")

    def show_summary(self, summary: Summary, outcome: str, run: RunFolder) -> None:
        table = Table(title=f"{run.name}: {outcome}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in summary.instead or _closing(summary):
            table.add_row(name, text)
        paths = {"metrics": run.metrics, "trajectories": run.trajectories, "checkpoint": run.latest_checkpoint()}
        for name, path in {**paths, "report": run.report}.items():
            # Relative to the working directory where it lies below it.
            inside = path is not None and path.is_relative_to(Path.cwd())
            table.add_row(name, os.path.relpath(path) if path and inside else str(path or "none"))
        self._print(table)

    def _eta(self, metrics: StepMetrics) -> str:
        """Time to the end at the pace since the first step began, evaluations and checkpoints included."""
        now = time.monotonic()
        if self._first is None:
            self._first = (metrics.step, now - metrics.step_seconds)
        step, began = self._first
        pace = (now - began) / (metrics.step - step + 1)
        return f"{duration(pace * (self._total - metrics.step))} left" if metrics.step < self._total else ""

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if self._rows:
            parts.append(self._table())
        parts.append(self._bar)
        if self._phase:
            parts.append(Text(self._status(), no_wrap=True, overflow="ellipsis", style="dim"))
        return Group(*parts)

    def _status(self) -> str:
        """The phase, its seconds, and the episodes that ended in it."""
        status = f"{self._phase}, {time.monotonic() - self._phase_began:.0f} s"
        status += f": {self._detail}" if self._detail else ""
        status += f", {self._episodes} episodes ended" if self._episodes else ""
        status += f", {self._errors} failed ({self._error})" if self._errors else ""
        status += f", {self._retried} run again ({self._before})" if self._retried else ""
        return status

    def _table(self) -> Table:
        columns = (*COLUMNS, *UPDATE_COLUMNS) if self.console.width >= NARROW else COLUMNS
        table = Table(box=SIMPLE_HEAD, expand=True, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row.get(name, "") for name in columns))
        return table


def _last_line(error: str) -> str:
    return one_line(error.strip().splitlines()[-1])[:200] if error.strip() else "no message"


def _cells(row: StepMetrics) -> dict[str, str]:
    cells = {
        "step": str(row.step),
        "reward": f"{row.reward:.3f}",
        "success": percent(row.success),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "rollout s": f"{row.rollout_seconds:.1f}",
        "learn s": f"{row.learn_seconds:.1f}",
        "sync s": f"{row.sync_seconds:.2f}",
    }
    if (update := row.update) is not None:
        numbers = (f"{update.gap_mean:.1e}", f"{update.grad_norm:.3f}", f"{update.entropy:.3f}")
        cells |= zip(UPDATE_COLUMNS, numbers, strict=True)
    return cells


def _step_line(cells: dict[str, str], row: StepMetrics, total: int) -> str:
    parts = [f"step {row.step}/{total}", *(f"{name} {cells[name]}" for name in ("reward", "success"))]
    parts += [
        f"{cells['tokens/s']} tokens/s",
        *(f"{part} {cells[f'{part} s']} s" for part in ("rollout", "learn", "sync")),
    ]
    parts += [f"{name} {cells[name]}" for name in UPDATE_COLUMNS if name in cells] or ["no update of the policy"]
    lags = row.update.gap_by_lag if row.update is not None else {}
    parts += ["gap by lag " + ", ".join(f"{lag}: {gap['mean']:.1e}" for lag, gap in lags.items())] if lags else []
    parts += [f"explained variance {row.critic.explained_variance:.2f}"] if row.critic is not None else []
    return "  ".join(parts)


def _closing(summary: Summary) -> list[tuple[str, str]]:
    shares = [success for _, success in summary.curve]
    found = [percent(share) for share in (shares[0], shares[-1], max(shares))] if shares else ["not measured"] * 3
    told = list(zip(("success at the start", "success at the end", "best success"), found, strict=True))
    done = f"{summary.steps} steps, {summary.episodes:,} episodes, {summary.tokens:,} sampled tokens"
    return [*told, ("time", f"{summary.minutes:.1f} minutes"), ("training", done)]
