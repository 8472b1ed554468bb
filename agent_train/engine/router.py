"""Routes a request to the replica that holds the episode's prefix, else to the least loaded one."""

from __future__ import annotations

from collections import OrderedDict

from agent_train.engine.base import EngineError

_REMEMBERED = 4096


class Router:
    """Picks among `size` replicas, numbered from 0. A picked one is busy until `done`."""

    def __init__(self, size: int):
        self.in_flight = [0] * size
        self.dead: dict[int, str] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()

    def pick(self, episode: str | None = None) -> int:
        """A living replica: where `episode` was before if it is named, else the least busy. EngineError if none lives."""
        living = [number for number in range(len(self.in_flight)) if number not in self.dead]
        if not living:
            raise EngineError("; ".join(self.dead.values()) or "the engine has no replica")
        home = self._homes.get(episode) if episode is not None else None
        number = home if home in living else min(living, key=lambda each: self.in_flight[each])
        if episode is not None:
            self._homes[episode] = number
            self._homes.move_to_end(episode)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        self.in_flight[number] += 1
        return number

    def done(self, number: int) -> None:
        self.in_flight[number] -= 1

    def bury(self, number: int, why: str) -> None:
        """Leave a replica out from now on."""
        self.dead.setdefault(number, why)
