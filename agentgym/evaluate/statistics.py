"""What trajectories say: means, intervals, pass@k. Plain functions of numbers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.trajectory import Trajectory

_Z95 = 1.959964


@dataclass(frozen=True)
class Report:
    """What an evaluation found. Episodes that failed are counted in `errors` and are in no other number.

    Attributes:
        env, split: what was played.
        tasks: how many tasks.
        samples: episodes of each task.
        episodes: episodes that were played to an end, over all tasks.
        errors: episodes that failed (environment or endpoint).
        reward: mean reward of an episode; None if no episode ended.
        success: share of successful episodes; None if no episode ended.
        success_low, success_high: 95% interval of `success`; see `success_interval`.
        pass_at: unbiased pass@k for k = 1, 2, 4 ... `samples`, over the tasks with at least k episodes.
        turns: mean replies of an episode.
        ends: how many episodes ended how.
        error_texts: the commonest errors, at most five, and how often each came.
        seconds: wall time.
    """

    env: str
    split: str
    tasks: int
    samples: int
    episodes: int
    errors: int
    reward: float | None
    success: float | None
    success_low: float | None
    success_high: float | None
    pass_at: dict[int, float]
    turns: float | None
    ends: dict[str, int] = field(default_factory=dict)
    error_texts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def summarise(
    trajectories: Sequence[Trajectory], *, env: str, split: str, samples: int, seconds: float = 0.0
) -> Report:
    """The report of trajectories; those that failed count as errors only."""
    played = [t for t in trajectories if not t.failed]
    by_task: dict[str, list[float]] = defaultdict(list)
    for trajectory in played:
        by_task[trajectory.task_id].append(trajectory.success)
    low, high = success_interval(list(by_task.values())) if played else (None, None)
    errors = Counter(_cause(t) for t in trajectories if t.failed)
    return Report(
        env=env,
        split=split,
        tasks=len({t.task_id for t in trajectories}),
        samples=samples,
        episodes=len(played),
        errors=len(trajectories) - len(played),
        reward=_mean([t.reward for t in played]),
        success=_mean([t.success for t in played]),
        success_low=low,
        success_high=high,
        pass_at=_pass_at(list(by_task.values()), samples),
        turns=_mean([len(t.turns) for t in played]),
        ends=dict(Counter(t.end for t in trajectories)),
        error_texts=dict(errors.most_common(5)),
        seconds=seconds,
    )


def _cause(trajectory: Trajectory) -> str:
    """The error without its task, turn and time, so that equal failures count together."""
    return re.sub(r" after [\d.]+ s\b", "", (trajectory.error or "").partition(": ")[2])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples drawn from n, of which c succeed, succeeds: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374).

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _pass_at(successes: Sequence[Sequence[float]], samples: int) -> dict[int, float]:
    ks = [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples]
    found = {}
    for k in ks:
        tasks = [values for values in successes if len(values) >= k]
        if tasks:
            found[k] = sum(pass_at_k(len(v), sum(x > 0 for x in v), k) for v in tasks) / len(tasks)
    return found


def success_interval(successes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% interval of the mean of successes (0 to 1), grouped by task.

    Episodes of one task are not independent: the variance is that of task totals (clustered, arXiv 2411.00640), and gives the
    number of independent episodes that these are worth, for a Wilson interval, which stays in [0, 1] and has a width
    where all succeed. That number is at most the episodes, and the tasks where the variance is 0.
    """
    total = sum(len(values) for values in successes)
    mean = sum(map(sum, successes)) / total
    tasks = len(successes)
    residuals = sum((sum(values) - len(values) * mean) ** 2 for values in successes)
    variance = residuals / total**2 * (tasks / (tasks - 1) if tasks > 1 else 1.0)
    worth = min(mean * (1 - mean) / variance, total) if variance > 0 else tasks
    centre = (mean + _Z95**2 / (2 * worth)) / (1 + _Z95**2 / worth)
    half = _Z95 / (1 + _Z95**2 / worth) * math.sqrt(mean * (1 - mean) / worth + _Z95**2 / (4 * worth**2))
    return max(0.0, centre - half), min(1.0, centre + half)
