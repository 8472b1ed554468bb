"""The executor of one environment runs its calls in order, without blocking other environments.

All `def` calls run in one thread (a database connection may refuse any other), all `async def` calls in one task (a cancel
scope may not be left in another). Threads are daemons: a call that never returns does not block the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentgym.core.tracebacks import text_of_error

if TYPE_CHECKING:  # the server of environments reads this module, and needs no Gymnasium
    from agentgym.core.env import Env

_log = logging.getLogger("agentgym.rollout.episode")


@dataclass(slots=True)
class _Flag:
    up: bool = False


@dataclass(slots=True)
class _EnvCall:
    """One call. Once `outcome` is cancelled, nobody waits for it any more."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    executor: EnvExecutor
    outcome: asyncio.Future[Any]
    started: bool = False
    interrupted: bool = False
    # Apart from the call: `busy` must not keep the call alive, which holds its environment.
    returned: _Flag = field(default_factory=_Flag)


class EnvExecutor:
    """Runs calls one after another; thread and task start when first needed. An executor serves one event loop at a time."""

    def __init__(self, name: str):
        self.name = name
        self.thread: int | None = None  # its ident, once it has started
        self._thread_calls: queue.SimpleQueue[tuple[_EnvCall, _Inbox] | None] | None = None
        self._task_calls: asyncio.Queue[_EnvCall] | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_in_thread = self._last_in_task = _Flag(up=True)

    @property
    def busy(self) -> bool:
        """True if a call has not returned yet, though nobody may be waiting for it any more."""
        return not (self._last_in_thread.up and self._last_in_task.up)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Begin `function(*args, **kwargs)`; the future has its result. An awaitable that a `def` returns is awaited first.

        Cancelling the future cancels an `async def` call, and removes a waiting `def` call; the result of a running one is dropped.
        """
        return self._start(inspect.iscoroutinefunction(function), function, args, kwargs)

    def start_method(self, env: Env, name: str, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        in_task = name in env.get_wrapper_attr("async_methods")
        return self._start(in_task, env.get_wrapper_attr(name), args, kwargs)

    def _start(self, in_task: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> asyncio.Future[Any]:
        call = _EnvCall(function, args, kwargs, self, asyncio.get_running_loop().create_future())
        if in_task:
            self.in_task(call)
        else:
            self._in_thread(call)
        return call.outcome

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.start(function, *args, **kwargs)

    def stop(self) -> None:
        """End the thread once its calls are done, and the task at once."""
        if self._thread_calls is not None:
            self._thread_calls.put(None)
            self._thread_calls = None
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and took its tasks with it
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _in_thread(self, call: _EnvCall) -> None:
        if self._thread_calls is None:
            self._thread_calls = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(self._thread_calls,), name=self.name, daemon=True)
            thread.start()
            self.thread = thread.ident
        self._last_in_thread = call.returned
        if (inbox := _inboxes.get(loop := call.outcome.get_loop())) is None:
            inbox = _inboxes[loop] = _Inbox()
        self._thread_calls.put((call, inbox))

    def in_task(self, call: _EnvCall) -> None:
        loop = call.outcome.get_loop()
        if self._task is None or self._task_calls is None or self._task.done() or self._task.get_loop() is not loop:
            self._task_calls = asyncio.Queue()
            self._task = loop.create_task(_serve_async(self._task_calls), name=self.name)
        self._last_in_task = call.returned
        call.outcome.add_done_callback(functools.partial(_interrupt, call, self._task))
        self._task_calls.put_nowait(call)


class _Inbox:
    """Answers of threads to an event loop. One wake-up of the loop takes all that have come."""

    def __init__(self) -> None:
        self._answers: deque[tuple[_EnvCall, Any, BaseException | None]] = deque()
        self._woken = False

    def put(self, call: _EnvCall, value: Any, error: BaseException | None) -> None:
        loop = call.outcome.get_loop()
        self._answers.append((call, value, error))
        if not self._woken or loop.is_closed():
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._answers.clear()

    def _take(self) -> None:
        self._woken = False  # before looking: what comes from here on wakes the loop again
        while self._answers:
            _answer(*self._answers.popleft())


_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = weakref.WeakKeyDictionary()


def _serve(calls: queue.SimpleQueue[tuple[_EnvCall, _Inbox] | None]) -> None:
    while (taken := calls.get()) is not None:
        call, inbox = taken
        value: Any = None
        error: BaseException | None = None
        try:
            if not call.outcome.cancelled():
                value = call.function(*call.args, **call.kwargs)
        except BaseException as raised:
            error = raised
        call.returned.up = True
        inbox.put(call, value, error)
        del taken, call, value, error


async def _serve_async(calls: asyncio.Queue[_EnvCall]) -> None:
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    while True:
        call = await calls.get()
        value: Any = None
        error: BaseException | None = None
        try:
            if not call.outcome.cancelled():
                call.started = True
                value = await call.function(*call.args, **call.kwargs)
        except asyncio.CancelledError as raised:
            error = raised
            if task.cancelling() > call.interrupted:
                raise
        except (KeyboardInterrupt, GeneratorExit) as raised:  # meant for the loop, or for this coroutine
            error = raised
            raise
        except BaseException as raised:
            error = raised
        finally:
            call.returned.up = True
            _settle(call.outcome, value, error)
        if call.interrupted:
            task.uncancel()
        del call, value, error


def _interrupt(call: _EnvCall, task: asyncio.Task[None], outcome: asyncio.Future[Any]) -> None:
    """Cancel a call in a task when nobody waits for it any more."""
    if outcome.cancelled() and call.started and not call.returned.up:
        call.interrupted = True  # so that the task tells this from a cancel that is meant for itself
        task.cancel()


def _answer(call: _EnvCall, value: Any, error: BaseException | None) -> None:
    """Settle a call that ran in a thread; an awaitable that it returned is awaited first, in the task."""
    if error is None and not call.outcome.done() and inspect.isawaitable(value):
        # An awaitable is what `_serve_async` awaits.
        call.function, call.args, call.kwargs, call.returned = lambda: value, (), {}, _Flag()
        call.executor.in_task(call)
    else:
        _settle(call.outcome, value, error)


def _settle(outcome: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(passed_on(error))


def passed_on(error: BaseException) -> Exception:
    """The error of a call, for those who wait for it; what would end their task or loop, not the call alone, is wrapped."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    passed = RuntimeError(f"{type(error).__name__}({text_of_error(error)}) was raised by the call")
    passed.__cause__ = error
    return passed


_executors: weakref.WeakKeyDictionary[Env, EnvExecutor] = weakref.WeakKeyDictionary()


def has_executor(env: Env) -> bool:
    return env in _executors


def executor_of(env: Env, executor: EnvExecutor | None = None) -> EnvExecutor:
    """The executor of an environment. If it has none, it gets `executor` or a new one."""
    if env not in _executors:
        _executors[env] = executor or EnvExecutor(f"agentgym {name_of(env)}")
        weakref.finalize(env, _executors[env].stop).atexit = False
    return _executors[env]


def name_of(env: Env) -> str:
    spec = env.unwrapped.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__


async def close_env(env: Env, timeout: float | None = 5.0) -> None:
    """Close an environment where its other calls ran; one that hangs closes itself once its call returns. Errors are logged."""
    executor = executor_of(env)
    closing = executor.start_method(env, "close")
    await asyncio.wait({closing}, timeout=timeout)
    if not closing.done():
        _log.warning("%s: close took longer than its limit of %g s", name_of(env), timeout or 0)
    elif not closing.cancelled() and (error := closing.exception()):
        _log.warning("%s: close failed: %s: %s", name_of(env), type(error).__name__, text_of_error(error))
    _executors.pop(env, None)
    executor.stop()


async def discard(executor: EnvExecutor, made: list[Env], timeout: float | None) -> None:
    """Close the environment that an executor has made, or is making, when nobody will take it."""
    from agentgym.core.env import is_async

    def close_late() -> None:
        for env in made:
            if not is_async(env, "close"):
                env.close()

    turn = executor.start(lambda: None)
    await asyncio.wait({turn}, timeout=timeout)
    if not made and not turn.done():
        executor.start(close_late)  # in its thread, behind the call that makes it
    if made:
        executor_of(made[0], executor)
        await close_env(made[0], timeout)
    executor.stop()
