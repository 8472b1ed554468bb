"""Rollouts that run while the learner learns, within a bound of staleness. Synchronous training is a bound of 0, by the same code."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent_train.rollout.sampler import admit
from agentgym.core.trajectory import Group, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """The episodes of a step."""

    groups: list[Group]  # in the order of their tasks
    greedy: list[Trajectory]  # of each task, for ReMax
    rounds: int  # of dynamic sampling
    carried: Sequence[Group] = ()  # what dynamic sampling left in the step before


class Rollouts(Generic[T]):
    """The rollouts of steps 0, 1, ... `steps` - 1, whole, and taken in that order whatever ends first.

    That of step n begins when the engine serves version n - `staleness` or a newer one, and is trained on at version n: no
    token is older than `staleness` versions, and nothing is thrown away. Counted by trajectories, `admit` would begin none of them
    earlier or later. `play(n)` makes the rollout, and is called when it begins.
    """

    def __init__(self, play: Callable[[int], Coroutine[Any, Any, T]], staleness: int, steps: int):
        self._play = play
        self._staleness = staleness
        self._steps = steps
        self._running: dict[int, asyncio.Task[T]] = {}  # and the one that was taken last
        self._begun: int | None = None  # steps whose rollouts have begun in this or an earlier start of the run

    def begin(self, version: int) -> None:
        """Begin every rollout that the engine's present version may play."""
        begun = version if self._begun is None else self._begun
        bound = {"batch": 1, "version": version, "staleness": self._staleness}
        self._begun = begun + admit(**bound, accepted=begun, running=0, max_concurrent=max(0, self._steps - begun))
        for step in range(begun, self._begun):
            self._running[step] = asyncio.create_task(self._play(step), name=f"rollout of step {step + 1}")

    async def take(self, version: int) -> T:
        """The rollout that the present version trains on. Raises as `play`."""
        self.begin(version)
        self._running.pop(version - 1, None)
        return await self._running[version]

    def before(self, step: int) -> asyncio.Task[T] | None:
        """The rollout of the step before this one, which begins now; None if an earlier start of the run took it."""
        return self._running.get(step - 1)

    async def close(self) -> None:
        """Cancel all that run. May be called twice."""
        running, self._running = list(self._running.values()), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
