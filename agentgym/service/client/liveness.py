"""Asks whether a server is alive during a long call, in which its session cannot answer."""

from __future__ import annotations

import asyncio
import weakref

from agentgym.policies import endpoints
from agentgym.service.client.address import Address, RemoteError

SILENT_SECONDS = 15.0

_Asked = dict[tuple[Address, str], asyncio.Task[bool]]
_asked: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked] = weakref.WeakKeyDictionary()


async def answers(address: Address, server: str) -> bool:
    """True if a server answers within `SILENT_SECONDS`. Concurrent callers share one request."""
    asked = _asked.setdefault(asyncio.get_running_loop(), {})
    present = asked.get((address, server))
    if present is None or present.done():
        present = asked[address, server] = asyncio.create_task(_answers(address, server))
    return await asyncio.shield(present)


async def _answers(address: Address, server: str) -> bool:
    import aiohttp

    try:
        tls = address.tls()
        http = await endpoints.session()
        timeout = aiohttp.ClientTimeout(total=SILENT_SECONDS)
        ssl = True if tls is None else tls
        headers, name = address.headers(), address.server_hostname
        async with http.get(f"{server}/health", headers=headers, timeout=timeout, ssl=ssl, server_hostname=name):
            return True
    except TimeoutError:
        return False
    except (OSError, aiohttp.ClientError, RemoteError):
        return True  # it, or its machine, said no: that is the connection's to find out
