"""Calls of environments and policies under a time limit, and the checks of what they return.

Every error names the call, and its duration or its result.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from agentgym.core.env import is_finite
from agentgym.core.executor import passed_on
from agentgym.core.messages import Observation, assistant, problem_of
from agentgym.core.tracebacks import place_of, text_of_error, traceback_of
from agentgym.core.trajectory import REWARDS, TURN_OF
from agentgym.policies.base import EndEpisode, EndpointError, Reply

Check = Callable[[Any], Any]
Result = TypeVar("Result")
LEAVE_SECONDS = 5.0


class CallFailed(RuntimeError):
    """A call of an environment or a policy raised, or returned something invalid. The message names the call."""

    def facts(self) -> dict[str, Any]:
        """Metadata for the trajectory: the `status` of an endpoint's refusal, or the `traceback` of another exception."""
        error = self.__cause__
        if error is None:
            return {}
        if isinstance(error, EndpointError):
            return {} if error.status is None else {"status": error.status}
        return {"traceback": traceback_of(error)}


class CallTimeout(CallFailed):
    """A call took longer than its limit."""


async def bounded(
    what: str, awaitable: Awaitable[Any], seconds: float | None, check: Check = lambda result: result
) -> Any:
    """Await a call under a time limit and check its result; `what` names it in errors. A call that takes longer is cancelled.

    Raises CallFailed, CallTimeout, or a policy's EndEpisode.
    """
    started = time.perf_counter()
    call = asyncio.ensure_future(awaitable)
    try:
        if not call.done():
            await _wait(call, seconds)
        if not call.done():
            raise CallTimeout(f"{what} took longer than its limit of {seconds:g} s")
        took = time.perf_counter() - started
        if call.cancelled():
            raise CallFailed(f"{what} cancelled itself after {took:.1f} s")
        return check(call.result())
    except (EndEpisode, CallFailed):
        raise
    except Exception as error:
        place = f" ({found})" if (found := place_of(error)) else ""
        said = f"{type(error).__name__}: {text_of_error(error)}"
        raise CallFailed(f"{what} failed after {took:.1f} s: {said}{place}") from error
    finally:
        call.cancel()


async def contained(call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call. SystemExit, or a panic of a library in Rust, ends it alone, and not who waits for it."""
    try:
        return await call()
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise passed_on(error) from error


async def _wait(call: asyncio.Future[Any], seconds: float | None) -> None:
    """Wait until a call is done or its time is up.

    As `asyncio.wait`, in a third of its time. `asyncio.timeout` would go on waiting for a call that swallows its cancellation.
    """
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = None if seconds is None or seconds == math.inf else loop.call_later(seconds, end)
    call.add_done_callback(end)
    try:
        await over
    finally:
        call.remove_done_callback(end)
        if timer is not None:
            timer.cancel()


async def leaving(main: Awaitable[Result]) -> Result:
    """Await it, then end all other tasks of the loop. One that swallows its cancellation is left, where `asyncio.run` would wait on."""
    try:
        return await main
    finally:
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            _, deaf = await asyncio.wait(others, timeout=LEAVE_SECONDS)
            for task in deaf:
                asyncio.tasks._unregister_task(task)  # private: there is no public way to have `asyncio.run` not wait
            if deaf:  # kept until the process ends: a coroutine that is deleted is told to end, and may again not obey
                threading.Thread(target=lambda _: threading.Event().wait(), args=(deaf,), daemon=True).start()


def numbers_in(info: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in info.items():
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            if is_finite(value):
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
    """The observation and info that `reset` returned; an info that is not a dict becomes {}."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset must return (observation, info), not {result!r:.200}")
    observation, info = result
    return _checked_observation(observation, "reset"), dict(info) if isinstance(info, dict) else {}


def checked_step(result: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(f"step must return (observation, reward, terminated, truncated, info), not {result!r:.200}")
    observation, reward, terminated, truncated, info = result
    if not is_finite(reward):
        raise ValueError(f"step must return a finite number as its reward, not {reward!r}")
    if not isinstance(info, dict):
        raise TypeError(f"step must return a dict as its info, not {type(info).__name__}")
    return _checked_observation(observation, "step"), float(reward), bool(terminated), bool(truncated), dict(info)


def next_player(info: dict[str, Any], before: str | None = None) -> str | None:
    """The player who acts next: `info` names it, else it is the previous player. Raises CallFailed for invalid rewards."""
    rewards = info.get(REWARDS, {})
    if before is not None and not (isinstance(rewards, dict) and all(map(is_finite, rewards.values()))):
        raise CallFailed(f"info[{REWARDS!r}] must be finite numbers by player, not {rewards!r:.200}")
    player = info.get(TURN_OF)
    return player if isinstance(player, str) else before


def checked_cut_off(result: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]] | None:
    return None if result is None else checked_step(result)


def checked_reply(reply: Any) -> Reply:
    if not isinstance(reply, Reply):
        raise TypeError(f"act must return a Reply, not {type(reply).__name__}")
    assistant(reply.message)
    if not isinstance(reply.usage, Mapping) or not all(map(is_finite, reply.usage.values())):
        raise TypeError(f"a reply's usage must be numbers by name, not {reply.usage!r:.200}")
    if not isinstance(reply.finish_reason, str | None):
        raise TypeError(f"a reply's finish_reason must be text or None, not {reply.finish_reason!r:.200}")
    return reply
