"""Difficulty pools: tasks in bands by how often the policy solves them. Each band is a queue, so none of its tasks is forgotten."""

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_train.config.schema import PoolsConfig
from agent_train.trainer.schedule import derive_seed
from agentgym.core.trajectory import Group

BANDS = ("unseen", "unsolved", "hard", "medium", "easy", "solved")


@dataclass(frozen=True)
class PoolMetrics:
    """The pools after a step: a part of `StepMetrics`."""

    tasks: dict[str, int]  # in each band, those that are retired or drawn too
    retired: int
    played: dict[str, float]  # share of the step's groups by the band that their task was in


class Pools:
    """Draws tasks, named by their place in the set, from bands by weight; of a band the one that has waited longest.

    A task that was never or always solved in its last `settings.groups` groups retires for `settings.revisit` steps. It comes back
    earlier if no band with a weight has a task; bands without one are drawn from last.
    """

    def __init__(
        self,
        settings: PoolsConfig,
        seed: int,
        order: Sequence[int],
        waiting: Mapping[str, Iterable[int]] | None = None,
        retired: Iterable[tuple[int, int]] = (),
        rates: Iterable[tuple[int, list[float]]] = (),
    ):
        """`order` is that of the unseen tasks at the start; the other arguments after `seed` are of `state`."""
        waiting = {"unseen": order} if waiting is None else waiting
        self._settings = settings
        self._seed = seed
        self._waiting = {band: deque(waiting.get(band, ())) for band in BANDS}
        self._retired = deque(retired)  # the step from which each may be drawn, and the task
        self._rates = dict(rates)  # of each task that was played: the shares of successes in its last groups
        self._size = len(order)

    def band(self, task: int) -> str:
        """The band of a task, by the mean of the shares."""
        shares = self._rates.get(task)
        if not shares:
            return "unseen"
        rate = sum(shares) / len(shares)
        if rate in (0.0, 1.0):
            return "solved" if rate else "unsolved"
        return "hard" if rate < self._settings.hard else "easy" if rate > self._settings.easy else "medium"

    def take(self, step: int, count: int) -> list[int]:
        """Draw tasks for a step, at most as many as are not drawn yet. The first of them are a fair sample of the bands too."""
        while self._retired and self._retired[0][0] <= step:
            _, task = self._retired.popleft()
            self._waiting[self.band(task)].append(task)
        chance = random.Random(derive_seed(self._seed, "pools", step))
        return [self._next(chance) for _ in range(count)]

    def _next(self, chance: random.Random) -> int:
        weights = self._settings.weights
        present = [band for band, tasks in self._waiting.items() if tasks]
        wanted = [band for band in present if weights.get(band)]
        if not wanted and self._retired:
            return self._retired.popleft()[1]
        (band,) = chance.choices(wanted or present, [weights[band] for band in wanted] or None)
        return self._waiting[band].popleft()

    def put_back(self, step: int, drawn: Sequence[int], groups: Sequence[Group]) -> PoolMetrics:
        """Take back what a step drew: `groups` are of the first of these tasks, and the others are the next of their bands."""
        played, left = drawn[: len(groups)], drawn[len(groups) :]
        bands = Counter(map(self.band, played))
        for task in reversed(left):
            self._waiting[self.band(task)].appendleft(task)
        for task, group in zip(played, groups, strict=True):
            outcomes = [trajectory.success for trajectory in group.trajectories if not trajectory.failed]
            if outcomes:
                shares = [*self._rates.get(task, []), sum(outcomes) / len(outcomes)]
                self._rates[task] = shares[-self._settings.groups :]
            band = self.band(task)
            if band in ("unsolved", "solved") and len(self._rates[task]) == self._settings.groups:
                self._retired.append((step + self._settings.revisit, task))
            else:
                self._waiting[band].append(task)
        sizes = Counter(map(self.band, self._rates))
        sizes["unseen"] = self._size - len(self._rates)
        tasks = {band: sizes[band] for band in BANDS}
        return PoolMetrics(tasks, len(self._retired), {band: bands[band] / len(groups) for band in BANDS})

    def state(self) -> dict[str, Any]:
        """The state that the next draws follow from, for JSON."""
        waiting = {band: list(tasks) for band, tasks in self._waiting.items()}
        return {"waiting": waiting, "retired": list(self._retired), "rates": list(self._rates.items())}
