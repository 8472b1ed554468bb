"""What all players have in common: open sessions, and step all of them until the time is over, as often as is asked.

A player is told, a line each on its standard input, for how many seconds to step. It prints one JSON line when its sessions are
open, one after each round, and ends them when its input does. For the standard library of any Python.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

AT_ONCE = 16  # handshakes under way
MESSAGE = "I would like to know what you think of this."


@dataclass(frozen=True)
class Way:
    """How a client is used.

    Attributes:
        opened: opens a session and begins an episode in it.
        stepped: one step of a session.
        closed: ends it.
    """

    opened: Callable[[], Awaitable[Any]]
    stepped: Callable[[Any], Awaitable[None]]
    closed: Callable[[Any], Awaitable[None]]


def tell(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def play(way: Way, sessions: int) -> None:
    """Open so many sessions, then step them for as long as each line of the input says."""
    room = asyncio.Semaphore(AT_ONCE)

    async def opened() -> Any:
        async with room:
            return await way.opened()

    began = time.perf_counter()
    envs = await asyncio.gather(*(opened() for _ in range(sessions)))
    tell(open_seconds=time.perf_counter() - began)
    gc.collect()
    while line := await asyncio.to_thread(sys.stdin.readline):
        until = time.perf_counter() + float(line)
        began, cpu = time.perf_counter(), cpu_seconds()
        steps = sum(await asyncio.gather(*(stepping(way, env, until) for env in envs)))
        tell(steps=steps, wall=time.perf_counter() - began, cpu=cpu_seconds() - cpu)
    await asyncio.gather(*(way.closed(env) for env in envs))


async def stepping(way: Way, env: Any, until: float) -> int:
    steps = 0
    while time.perf_counter() < until:
        for _ in range(8):
            await way.stepped(env)
        steps += 8
    return steps
