"""Statistics: clustered means and their intervals, pass@k, pass^k, paired differences. Plain functions of numbers."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

_Z95 = 1.959964
# Two-sided 95% of Student's t with 1 to 9 degrees of freedom; above, `_t95` has a series that is good to 1e-4.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)

Interval = tuple[float, float]


class ClusteredMean:
    """The mean of episodes' numbers and its interval, clustered by task. Kept as sums: one more costs the same at any size.

    Episodes of one task are not independent, so the variance is that of task totals (arXiv 2411.00640).
    """

    __slots__ = ("_cross", "_origin", "_sizes", "_squares", "_tasks", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        # Numbers are kept as distances from the first one, so that sums of squares do not cancel.
        self._origin = 0.0
        self._tasks: dict[Hashable, tuple[int, float]] = {}
        self._total = self._squares = self._cross = 0.0
        self._sizes = 0

    @classmethod
    def of(cls, groups: Iterable[Iterable[float]]) -> "ClusteredMean":
        made = cls()
        for task, values in enumerate(groups):
            for value in values:
                made.add(task, value)
        return made

    def add(self, task: Hashable, value: float) -> None:
        if self.count == 0:
            self._origin = value
        value -= self._origin
        episodes, total = self._tasks.get(task, (0, 0.0))
        self._tasks[task] = (episodes + 1, total + value)
        self.count += 1
        self._total += value
        # Its effect on the sums over tasks of total**2, episodes * total, and episodes**2.
        self._squares += value * (2 * total + value)
        self._cross += total + (episodes + 1) * value
        self._sizes += 2 * episodes + 1

    @property
    def tasks(self) -> int:
        return len(self._tasks)

    @property
    def mean(self) -> float | None:
        return self._origin + self._total / self.count if self.count else None

    @property
    def variance(self) -> float:
        """Variance of the mean, from task totals and unbiased for the number of tasks; 0 with one task."""
        if self.count == 0:
            return 0.0
        mean, tasks = self._total / self.count, self.tasks
        residuals = self._squares - 2 * mean * self._cross + mean * mean * self._sizes
        if not math.isfinite(residuals):
            return math.inf
        rounding = 1e-12 * (self._squares + mean * mean * self._sizes)
        return residuals / self.count**2 * tasks / max(tasks - 1, 1) if residuals > rounding else 0.0

    def interval(self) -> Interval | None:
        """95% interval by Student's t over tasks; None with fewer than two, and for numbers too large to be squared."""
        mean, variance = self.mean, self.variance
        if mean is None or self.tasks < 2 or math.isinf(variance):
            return None
        half = _t95(self.tasks - 1) * math.sqrt(variance)
        return mean - half, mean + half

    def share_interval(self, most: int | None = None) -> Interval | None:
        """95% Wilson interval of numbers from 0 to 1; None without numbers. See `success_interval`.

        `most`: independent episodes that the numbers can be worth; None: as many as there are.
        """
        mean, variance = self.mean, self.variance
        if mean is None:
            return None
        most = self.count if most is None else most
        worth = min(mean * (1 - mean) / variance, most) if variance > 0 and 0 < mean < 1 else self.tasks
        centre = (mean + _Z95**2 / (2 * worth)) / (1 + _Z95**2 / worth)
        spread = max(mean * (1 - mean), 0.0) / worth + _Z95**2 / (4 * worth**2)
        half = _Z95 / (1 + _Z95**2 / worth) * math.sqrt(spread)
        return max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))


def success_interval(successes: Sequence[Sequence[float]]) -> Interval:
    """95% interval of the mean of successes (0 to 1), grouped by task.

    The clustered variance gives the number of independent episodes that these are worth, for a Wilson interval, which stays
    in [0, 1] and has a width where all succeed. That number is at most the episodes, and the tasks where the variance is 0.
    """
    found = ClusteredMean.of(successes).share_interval()
    if found is None:
        raise ValueError("an interval needs at least one episode")
    return found


def _t95(freedom: int) -> float:
    """Two-sided 95% of Student's t: a table, then the series around the normal's (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples drawn from n, of which c succeed, succeeds: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374)."""
    _check_draw("pass@k", n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of k samples drawn from n, of which c succeed, succeed: C(c, k) / C(n, k) (arXiv 2406.12045)."""
    _check_draw("pass^k", n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_draw(name: str, n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"{name} needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")


def ks_of(samples: int) -> list[int]:
    """The k for which pass@k and pass^k are reported: 1, 2, 4, ... and `samples`."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


Passes = tuple[dict[int, float], dict[int, float], dict[int, Interval], dict[int, Interval]]


def passes(outcomes: Iterable[tuple[int, int]], samples: int) -> Passes:
    """pass@k, pass^k, and the 95% Wilson intervals of both, by k up to `samples`; means over the tasks with at least k episodes.

    `outcomes` are `(episodes, successes)` of each task.
    """
    found: Passes = {}, {}, {}, {}
    at, hat, at_interval, hat_interval = found
    played = sorted(outcomes)  # whose order must not change the last bits
    for k in ks_of(samples):
        enough = [(n, c) for n, c in played if n >= k]
        for estimate, means, intervals in ((pass_at_k, at, at_interval), (pass_hat_k, hat, hat_interval)):
            values = [estimate(n, c, k) for n, c in enough]
            interval = ClusteredMean.of([value] for value in values).share_interval(sum(n for n, _ in enough))
            if interval is not None:
                means[k], intervals[k] = math.fsum(values) / len(values), interval
    return found


@dataclass(frozen=True)
class Difference:
    """The difference from `a` to `b` on the tasks that both have, each task's episodes averaged first.

    Attributes:
        a, b: the means over these tasks; `mean` is b minus a.
        low, high: 95% interval of `mean`, by Student's t over the tasks' differences; None with fewer than two tasks.
        wins, ties, losses: tasks on which b was better, the same, worse.
        p: two-sided exact sign test of wins against losses; with one episode of each task and successes this is McNemar's.
    """

    tasks: int
    a: float
    b: float
    mean: float
    low: float | None
    high: float | None
    wins: int
    ties: int
    losses: int
    p: float


def paired_difference(pairs: Sequence[Interval]) -> Difference:
    """The difference of tasks' means; `pairs` are `(mean of a, mean of b)` of each task."""
    if not pairs:
        raise ValueError("a paired difference needs at least one task that both have")
    differences = [b - a for a, b in pairs]
    interval = ClusteredMean.of([difference] for difference in differences).interval()
    wins, losses = sum(d > _SAME for d in differences), sum(d < -_SAME for d in differences)
    tasks = len(pairs)
    a, b, mean = (math.fsum(values) / tasks for values in (*zip(*pairs, strict=True), differences))
    low, high = interval or (None, None)
    return Difference(tasks, a, b, mean, low, high, wins, tasks - wins - losses, losses, sign_test(wins, losses))


# Means of the same numbers in another order may differ by rounding.
_SAME = 1e-9


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of wins and losses if both are equally likely; 1.0 without any."""
    n, lgamma = wins + losses, math.lgamma
    logs = (lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) - n * math.log(2) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))
