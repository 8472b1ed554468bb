"""The display of a running evaluation: a live table on a terminal, a plain line now and then elsewhere."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.budget import tokens_of
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.results import failure_in, usage_of
from agentgym.evaluate.statistics import ClusteredMean
from agentgym.evaluate.tables import count, cut, duration, money, number, one_line, percent, percent_range

REFRESH_PER_SECOND = 4
LINE_SECONDS = 10.0
FINISHED_SHOWN = 8
DETAILED = 4
LONGEST_NAME = 60
# Tokens a second are those of the last so many seconds.
PACE_SECONDS = 20.0


@dataclass
class _EvalProgress:
    """Sums over the episodes of one cell that this start has played."""

    name: str
    total: int
    before: int
    began: float
    finished: float | None = None
    ended: int = 0
    errors: int = 0
    success: ClusteredMean = field(default_factory=ClusteredMean)
    reward: float = 0.0
    tokens: int = 0
    requests: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    cost: float | None = None
    last_error: str = ""
    paces: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, trajectory: Trajectory, now: float) -> None:
        self.ended += 1
        if trajectory.failed:
            self.errors += 1
            self.last_error = failure_in(trajectory.error or "")[:300]
        else:
            self.success.add(trajectory.task_id, min(max(trajectory.success, 0.0), 1.0))
            self.reward += trajectory.reward
        metadata = trajectory.metadata
        calls = metadata.get("calls") or {}
        self.tokens += tokens_of(usage_of(trajectory))
        self.requests += calls.get("requests", 0)
        self.retries.update(calls.get("retries", {}))
        if metadata.get("cost") is not None:
            self.cost = (self.cost or 0.0) + metadata["cost"]
        if not self.paces or now - self.paces[-1][0] >= 1.0:
            self.paces.append((now, self.tokens))
            while now - self.paces[0][0] > PACE_SECONDS:
                self.paces.popleft()

    def seconds(self, now: float) -> float:
        return (now if self.finished is None else self.finished) - self.began

    def pace(self, now: float) -> float:
        """Recent tokens a second; of the whole cell once it has ended."""
        since, tokens = self.paces[0] if self.finished is None and len(self.paces) > 1 else (self.began, 0)
        end = now if self.finished is None else self.finished
        return (self.tokens - tokens) / (end - since) if end > since else 0.0

    def left(self, now: float) -> float | None:
        """Seconds to the end at the pace so far; None before the first episode has ended."""
        return self.seconds(now) * (self.total - self.before - self.ended) / self.ended if self.ended else None


class LiveDisplay:
    """Shows an evaluation: several cells are played at a time; each is `started` and `finished` once. A context manager.

    A console that is not a terminal gets a line at most every ten seconds, and one at the end of each cell.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._cells: dict[str, _EvalProgress] = {}
        self._said = clock()
        self._live: Live | None = None

    def __enter__(self) -> "LiveDisplay":
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self.picture,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                vertical_overflow="ellipsis",
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def started(self, cell: Cell, total: int, done_before: int) -> None:
        progress = self._cells[cell.name] = _EvalProgress(one_line(cell.name), total, done_before, self._clock())
        if self._live is None:
            played = "all" if done_before == total else f"{done_before:,} of them"
            before = f", {played} played before" if done_before else ""
            self._say(f"{progress.name}: {total:,} episode{'s' * (total != 1)}{before}")

    def ended(self, cell: Cell, trajectory: Trajectory) -> None:
        now, progress = self._clock(), self._cells[cell.name]
        progress.add(trajectory, now)
        if self._live is None and now - self._said >= LINE_SECONDS:
            self._say(line_of_progress(progress, now))

    def finished(self, cell: Cell) -> None:
        progress = self._cells[cell.name]
        progress.finished = self._clock()
        if self._live is None:
            self._say(line_of_progress(progress, self._clock()))

    def picture(self) -> RenderableType:
        now, cells = self._clock(), self._cells.values()
        over = [progress for progress in cells if progress.finished is not None]
        parts: list[RenderableType] = []
        if len(over) > FINISHED_SHOWN:
            parts.append(Text(f"{len(over) - FINISHED_SHOWN} cells before these", style="dim"))
        parts += [
            Text(line_of_progress(progress, now), no_wrap=True, overflow="ellipsis", style="dim")
            for progress in over[-FINISHED_SHOWN:]
        ]
        playing = [progress for progress in cells if progress.finished is None]
        for progress in playing:
            parts.append(_bar(progress, now, self._console.width))
            lines = [line for line in _details(progress, now) if line]
            # Many cells at a time have a line each, so that all are seen.
            shown = lines if len(playing) <= DETAILED else [", ".join(lines[:1])]
            parts += [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in shown]
        return Group(*parts)

    def _say(self, line: str) -> None:
        self._said = self._clock()
        self._console.print(Text(line), soft_wrap=True, highlight=False)


def line_of_progress(progress: _EvalProgress, now: float) -> str:
    left = progress.left(now)
    rest = [*_details(progress, now)[:2], duration(progress.seconds(now))]
    if progress.finished is None and left is not None:
        rest.append(f"{duration(left)} left")
    done = f"{progress.before + progress.ended:,}/{progress.total:,}"
    return ", ".join(part for part in (f"{cut(progress.name, LONGEST_NAME)}: {done}", *rest) if part)


def _bar(progress: _EvalProgress, now: float, width: int) -> RenderableType:
    done = progress.before + progress.ended
    left = progress.left(now)
    row = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None):
        row.add_column(ratio=ratio, no_wrap=True)
    row.add_row(
        Text(cut(progress.name, max(width // 2 - 4, 12)), style="bold"),
        ProgressBar(total=max(progress.total, 1), completed=done),
        Text(f"{done:,}/{progress.total:,}"),
        Text(f"{duration(left)} left" if left is not None else duration(progress.seconds(now)), style="dim"),
    )
    return row


def _details(progress: _EvalProgress, now: float) -> list[str]:
    score = ["no episode has ended yet"] if progress.finished is None and not progress.ended else []
    if (mean := progress.success.mean) is not None:
        low, high = progress.success.share_interval() or (None, None)
        score = [f"success {percent(mean)} ({percent_range(low, high)})"]
        score.append(f"reward {number(progress.reward / progress.success.count)}")
    if progress.before and progress.ended:
        score.append(f"{progress.before:,} from before not in it")
    if progress.errors:
        score.append(f"{progress.errors:,} error{'s' * (progress.errors > 1)}")
    used = [f"{count(progress.tokens)} tokens, {count(progress.pace(now))}/s"] if progress.tokens else []
    if progress.requests:
        used.append(f"{count(progress.requests)} requests")
    if progress.retries:
        causes = ", ".join(f"{one_line(cause)} x {count(times)}" for cause, times in progress.retries.most_common(3))
        used.append(f"{count(progress.retries.total())} retries ({causes})")
    if progress.cost is not None:
        used.append(money(progress.cost))
    error = [f"last error: {one_line(progress.last_error)}"] if progress.last_error else []
    return [", ".join(score), ", ".join(used), *error]
