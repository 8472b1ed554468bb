"""Background work of an event loop, and work that concurrent callers share."""

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

_tasks: set[asyncio.Task[Any]] = set()  # a loop holds its tasks only weakly
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_shared = weakref.WeakKeyDictionary()


def in_background(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[Any]:
    task = (loop or asyncio.get_running_loop()).create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def shared(key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `work()`. Callers with the same key share it while it runs."""
    running = _shared.setdefault(asyncio.get_running_loop(), {})
    if key not in running or running[key].done():
        running[key] = in_background(work())
    return await asyncio.shield(running[key])  # a caller that is cancelled leaves it to the others
