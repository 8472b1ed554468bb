"""Which lane an environment's calls run in, and closing an environment there."""

from __future__ import annotations

import asyncio
import logging
import weakref

from agentgym.core.env import Env
from agentgym.core.executor import EnvExecutor

_log = logging.getLogger("agentgym.rollout.episode")
_lanes: weakref.WeakKeyDictionary[Env, EnvExecutor] = weakref.WeakKeyDictionary()


def has_lane(env: Env) -> bool:
    """Whether calls of this environment have a lane already."""
    return env in _lanes


def lane_of(env: Env, lane: EnvExecutor | None = None) -> EnvExecutor:
    """The lane of an environment's calls; `lane`, or a new one, becomes it where it has none."""
    if env not in _lanes:
        _lanes[env] = lane or EnvExecutor(f"agentgym {name_of(env)}")
        weakref.finalize(env, _lanes[env].stop).atexit = False
    return _lanes[env]


def name_of(env: Env) -> str:
    """Its id, or its class where it was made without one."""
    spec = env.unwrapped.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__


async def close_env(env: Env, timeout: float | None = 5.0) -> None:
    """Close an environment where its other calls ran. One that is stuck is left to close itself when it comes back.

    Errors of `close` are logged: the episode that used the environment has already ended.
    """
    lane = lane_of(env)
    closing = lane.start(env.close)
    await asyncio.wait({closing}, timeout=timeout)
    if not closing.done():
        _log.warning("%s: close took longer than its limit of %g s", name_of(env), timeout or 0)
    elif not closing.cancelled() and (error := closing.exception()):
        _log.warning("%s: close failed: %s: %s", name_of(env), type(error).__name__, error)
    _lanes.pop(env, None)
    lane.stop()


async def discard(lane: EnvExecutor, made: list[Env], timeout: float | None) -> None:
    """Close the environment that a lane has made, or is making, though nobody takes it any more."""
    turn = lane.start(lambda: None)
    await asyncio.wait({turn}, timeout=timeout)
    if made:
        lane_of(made[0], lane)
        await close_env(made[0], timeout)
    lane.stop()
