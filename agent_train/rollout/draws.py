"""The tasks of each step. They follow from the seed, the step and the results of earlier steps, so a resumed run draws the same."""

import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agent_train.config.schema import Config
from agent_train.rollout.pools import PoolMetrics, Pools
from agent_train.trainer.checkpoint import CheckpointError
from agent_train.trainer.schedule import derive_seed
from agentgym.core.trajectory import Group, Trajectory
from agentgym.storage.jsonl import line_of_any


def pick_tasks(size: int, first: int, count: int, seed: int) -> list[int]:
    """`count` tasks, from place `first`, of an endless sequence of epochs over `size` tasks, each in a new order."""
    places = (divmod(place, size) for place in range(first, first + count))
    return [_order(size, derive_seed(seed, "epoch", epoch))[place] for epoch, place in places]


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


class Epochs:
    """Draws every task once an epoch. What a step leaves is the next to be drawn."""

    def __init__(self, size: int, seed: int, taken: int = 0, left: Sequence[int] = ()):
        """`taken` and `left` are of `state`."""
        self._size = size
        self._seed = seed
        self._taken = taken
        self._left = list(left)

    def take(self, step: int, count: int) -> list[int]:
        found, self._left = self._left[:count], self._left[count:]
        if more := count - len(found):
            found += pick_tasks(self._size, self._taken, more, self._seed)
            self._taken += more
        return found

    def put_back(self, step: int, drawn: Sequence[int], groups: Sequence[Group]) -> None:
        self._left += drawn[len(groups) :]

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken, "left": list(self._left)}


def surplus_of(state: Mapping[str, Any]) -> list[Group]:
    """The `surplus` of the `Draws` that had this state."""
    return [Group(task, [Trajectory.from_json(each) for each in group]) for task, group in state.get("surplus", ())]


class Draws:
    """The tasks of each step, by their places in the training set, from when its rollout begins until it is trained on.

    `surplus` are the groups of the last step that the next one is to train on.

    A step draws what all its rounds of dynamic sampling may need, so that rollouts at the same time share no task of an epoch. What it
    does not play goes back. With a staleness s the draw of step n reads the results of the steps before n - s, and of no other.
    """

    def __init__(self, config: Config, size: int, state: Mapping[str, Any] | None = None):
        """Of `size` tasks; `state` is that of the run which goes on. Raises CheckpointError if its tasks were others."""
        trainer, saved = config.trainer, dict(state or {})
        if (before := saved.pop("size", size)) != size:
            raise CheckpointError(f"the run drew from {before} tasks and finds {size}: give it those it began with")
        self._size = size
        self.surplus = surplus_of(saved)
        saved.pop("surplus", None)
        self._drawn: dict[int, list[int]] = {int(step): tasks for step, tasks in saved.pop("drawn", {}).items()}
        self._most = trainer.groups_per_step * config.algorithm.filter.rounds
        self._source: Epochs | Pools
        if config.pools.groups:
            self._most = min(self._most, size // (trainer.staleness + 1))  # enough for all rollouts under way
            order = _order(size, derive_seed(trainer.seed, "epoch", 0))
            self._source = Pools(config.pools, trainer.seed, order, **saved)
        else:
            self._source = Epochs(size, trainer.seed, **saved)

    def of_step(self, step: int) -> list[int]:
        """The tasks that a step may play, in this order."""
        if step not in self._drawn:
            self._drawn[step] = self._source.take(step, self._most)
        return self._drawn[step]

    def played(self, step: int, groups: Sequence[Group], surplus: Sequence[Group] = ()) -> PoolMetrics | None:
        """Take in the groups of a step, which are of the first tasks that it drew, and what it leaves of them; None without pools."""
        self.surplus = list(surplus)
        return self._source.put_back(step, self._drawn.pop(step), groups)

    def state(self) -> dict[str, Any]:
        """The state that the next draws follow from, for JSON."""
        surplus = [(g.task_id, [json.loads(line_of_any(t.to_json())) for t in g.trajectories]) for g in self.surplus]
        return {"size": self._size, "drawn": dict(self._drawn), "surplus": surplus, **self._source.state()}
