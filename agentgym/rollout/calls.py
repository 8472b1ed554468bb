"""Calls of environments and policies under a time limit, and the checks of what they return.

Every error names the call, and says how long it ran or what it returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.core.messages import Observation, assistant, problem_of
from agentgym.core.tracebacks import place_of, traceback_of
from agentgym.policies.base import EndEpisode, EndpointError, Reply

Check = Callable[[Any], Any]


class CallFailed(RuntimeError):
    """A call of an environment or a policy raised or gave nonsense. The message names the call, the turn and the time."""

    def facts(self) -> dict[str, Any]:
        """What a trajectory keeps of the exception: `status` of an endpoint's refusal, the `traceback` of any other."""
        error = self.__cause__
        if error is None:
            return {}
        if isinstance(error, EndpointError):
            return {} if error.status is None else {"status": error.status}
        return {"traceback": traceback_of(error)}


class CallTimeout(CallFailed):
    """A call took longer than its limit."""


@dataclass(frozen=True, slots=True)
class _Part:
    what: str
    seconds: float
    since: float


class Parts:
    """The parts of one call, each with its own name and limit. The call says which comes by `go_on`, from any thread.

    Args:
        limits: seconds by the name of the part, in order; None: no limit.
    """

    def __init__(self, **limits: float | None):
        self._limits = {what: math.inf if seconds is None else seconds for what, seconds in limits.items()}
        self._shortest = min(self._limits.values())
        self.given_up = False
        self.go_on(next(iter(limits)))

    def go_on(self, what: str) -> None:
        """This part begins now."""
        self.now = _Part(what, self._limits[what], time.perf_counter())

    @property
    def what(self) -> str:
        """The part that it is in."""
        return self.now.what

    def took(self) -> str:
        """How long it has been in this part."""
        return f"{time.perf_counter() - self.now.since:.1f} s"

    def look_after(self) -> float:
        """Seconds after which to see how far it is: a later part with a shorter limit may have begun by then."""
        return max(0.0, min(self.now.since + self.now.seconds - time.perf_counter(), self._shortest))

    def check_time(self) -> None:
        """Raises `CallTimeout` where the part has taken longer than its limit."""
        now = self.now
        if time.perf_counter() >= now.since + now.seconds:
            raise CallTimeout(f"{now.what} took longer than its limit of {now.seconds:g} s")


async def bounded(
    what: str, awaitable: Awaitable[Any], seconds: float | None, check: Check = lambda result: result
) -> Any:
    """The checked result of a call that is called `what`.

    Raises:
        CallFailed: it raised, took longer than `seconds`, or gave what `check` refuses.
        EndEpisode: the policy's, let through.
    """
    return await bounded_parts(Parts(**{what: seconds}), awaitable, check)


async def bounded_parts(parts: Parts, awaitable: Awaitable[Any], check: Check) -> Any:
    """The checked result of a call of several parts. Raises as `bounded`."""
    call = asyncio.ensure_future(awaitable)
    try:
        while not call.done():
            await _wait(call, parts.look_after())
            if not call.done():
                parts.check_time()
        if call.cancelled():
            raise CallFailed(f"{parts.what} cancelled itself after {parts.took()}")
        return check(call.result())
    except (EndEpisode, CallFailed):
        raise
    except Exception as error:
        place = f" ({found})" if (found := place_of(error)) else ""
        raise CallFailed(f"{parts.what} failed after {parts.took()}: {type(error).__name__}: {error}{place}") from error
    finally:
        parts.given_up = not call.done()
        call.cancel()


async def _wait(call: asyncio.Future[Any], seconds: float) -> None:
    """Wait until a call is done or its time is up, as `asyncio.wait` would, which takes three times as long for it.

    Not asyncio.timeout: what swallows its cancellation would be waited for all the same.
    """
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = None if seconds == math.inf else loop.call_later(seconds, end)
    call.add_done_callback(end)
    try:
        await over
    finally:
        call.remove_done_callback(end)
        if timer is not None:
            timer.cancel()


def numbers_in(info: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of an info, truth values as 0.0 and 1.0."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(OverflowError):  # a whole number that no float can hold
            if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
                found[str(name)] = float(value)
    return found


def _checked_observation(observation: Any, call: str) -> Observation:
    if not isinstance(observation, list):
        raise TypeError(f"{call} must return a list of messages as its observation, not {type(observation).__name__}")
    for message in observation:
        if problem := problem_of(message):
            raise ValueError(f"{call} returned a bad message: {problem}: {message!r:.200}")
    return list(observation)


def checked_reset(result: Any) -> tuple[Observation, dict[str, Any]]:
    """The observation and info that `reset` returned. What is no dict is no info.

    Raises:
        TypeError, ValueError: it is no `(observation, info)`.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset must return (observation, info), not {result!r:.200}")
    observation, info = result
    return _checked_observation(observation, "reset"), dict(info) if isinstance(info, dict) else {}


def checked_step(result: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Gymnasium's five values of what `step` returned.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(f"step must return (observation, reward, terminated, truncated, info), not {result!r:.200}")
    observation, reward, terminated, truncated, info = result
    if not isinstance(reward, numbers.Real | np.bool_) or not math.isfinite(reward):
        raise ValueError(f"step must return a finite number as its reward, not {reward!r}")
    if not isinstance(info, dict):
        raise TypeError(f"step must return a dict as its info, not {type(info).__name__}")
    return _checked_observation(observation, "step"), float(reward), bool(terminated), bool(truncated), dict(info)


def checked_reply(reply: Any) -> Reply:
    """What `act` returned.

    Raises:
        TypeError, ValueError: it is no reply.
    """
    if not isinstance(reply, Reply):
        raise TypeError(f"act must return a Reply, not {type(reply).__name__}")
    assistant(reply.message)
    return reply
