"""The error that a new start of all parts, from the newest checkpoint, can mend, and tasks side by side that let it through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LostError(RuntimeError):
    """A process, a node or a link of the run is gone or hangs. Settings, data and weights are not to blame."""


@asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first failure is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
