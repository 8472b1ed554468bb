"""The number of concurrent episodes: places whose number may follow the load of the engine."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Sequence

from agent_train.engine.base import Engine, Load
from agent_train.report.timeline import LOOP, Timeline

LOW, HIGH = 0.6, 0.9  # shares of a key-value cache: below there is room for more episodes, above for fewer
SECONDS = 1.0  # between two looks at the load

log = logging.getLogger(__name__)


class Places:
    """Places of episodes; their number, `size`, may change. Who waits gets one by its order, the lowest first, and then by its turn.

    Nobody is sent away: where there are too few, those who have one give it back between two episodes.
    """

    def __init__(self, size: int):
        self._size = size
        self.taken = 0
        self._turns = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self._admit()

    async def take(self, order: int) -> None:
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._turns), given))
        self._admit()
        if given.done():  # goes on at once, as others that take a place in the same moment do
            return
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self.taken -= 1
        self._admit()

    def short(self, order: int) -> bool:
        """True if there are too few, or a lower order waits: who has one of this order then exchanges it before its next episode."""
        while self._waiting and self._waiting[0][2].done():  # who waited was cancelled
            heapq.heappop(self._waiting)
        return self.taken > self._size or (bool(self._waiting) and self._waiting[0][0] < order)

    async def exchange(self, order: int) -> None:
        """Give a place back and wait for another. A caller that is cancelled still has one to leave."""
        self.leave()
        try:
            await self.take(order)
        except asyncio.CancelledError:
            self.taken += 1
            raise

    def _admit(self) -> None:
        while self._waiting and self.taken < self._size:
            *_, given = heapq.heappop(self._waiting)
            if not given.done():  # else who waited was cancelled
                self.taken += 1
                given.set_result(None)


def fitting(size: int, taken: int, most: int, loads: Sequence[Load]) -> int:
    """The number of places, 1 to `most`, after a look at every replica; the fullest counts.

    An eighth more while all are taken, no request waits and the cache is below LOW. An eighth fewer above HIGH, once the last
    cut has taken effect: the episodes that have not begun wait, and those in flight go on.
    """
    step, fullest = max(1, size // 8), max((load.cache for load in loads), default=LOW)
    if fullest > HIGH and taken <= size:
        return max(1, size - step)
    if fullest < LOW and taken >= size and not any(load.waiting for load in loads):
        return min(most, size + step)
    return size


async def follow_load(places: Places, most: int, engine: Engine, timeline: Timeline) -> None:
    """Fit the places to the load, every second, until cancelled. They begin as a quarter of `most`."""
    places.size = max(1, most // 4)
    while True:
        try:
            loads = await engine.loads()
        except Exception as error:  # nothing is known, and the run goes on
            log.warning("the load of the engine is not known: %r", error)
            loads = []
        places.size = fitting(places.size, places.taken, most, loads)
        timeline.count(LOOP, "places", places.size)
        for number, load in enumerate(loads):
            timeline.count(("engine", number), "percent of the cache", round(100 * load.cache))
        await asyncio.sleep(SECONDS)
