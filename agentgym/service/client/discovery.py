"""The servers behind one name: a Kubernetes headless service, or any name with several addresses.

Each address is a server in the pool, so that a dropped connection is reopened at the server that has the session. A name with
one address, a load balancer's, stays a name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import weakref
from urllib.parse import urlsplit

from agentgym.service.client.balance import Pool, Server

LOOK_SECONDS = 5.0  # servers come and go
_PORTS = {"http": 80, "https": 443}
_looking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Task[None]]]
_looking = weakref.WeakKeyDictionary()


async def find_servers(pool: Pool) -> None:
    """Look up the names in a pool if they are due. Concurrent callers share the look-up."""
    looking = _looking.setdefault(asyncio.get_running_loop(), {})
    present = looking.get(id(pool))
    if present is None or present.done():
        if not pool.to_find(LOOK_SECONDS):
            return
        present = looking[id(pool)] = asyncio.get_running_loop().create_task(_find(pool))
    await asyncio.shield(present)


async def _find(pool: Pool) -> None:
    for url in pool.urls:
        if (found := await _behind(url)) is not None:
            pool.found(url, found)


async def _behind(url: str) -> list[Server] | None:
    """The servers of a URL: the URL itself if its name has one address. None: the look-up failed."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host)
        return [Server(url)]
    except ValueError:
        pass
    port = parts.port or _PORTS[parts.scheme]
    try:
        told = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    # A server may have an address of each family: those of one tell how many servers there are.
    families = [
        {str(at[0]) for family, _, _, _, at in told if family is of} for of in (socket.AF_INET, socket.AF_INET6)
    ]
    hosts = next((hosts for hosts in families if len(hosts) > 1), set())
    if not hosts:
        return [Server(url)]
    shown = [f"[{host}]" if ":" in host else host for host in sorted(hosts)]
    return [Server(f"{parts.scheme}://{host}:{port}", service=url) for host in shown]
