"""Opens a session on the server with the most room."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from agentgym.service.client.address import Address, Unavailable
from agentgym.service.client.balance import Pool, Server, find_servers, pool_of
from agentgym.service.client.connection import NotOpened, get
from agentgym.service.client.session_client import RemoteSession
from agentgym.service.client.sharing import in_background, shared

PATIENCE_SECONDS = 60.0
ASK_SECONDS = 2.0
# A server that says no for good is tried again now and then: it may be restarted with another token file.
LASTING_REST = 30.0
# One that says that it failed is tried so often: more of the same would be waited for in vain.
BROKEN_TRIES = 3

_dice = random.Random()  # the global one is the episodes'


async def open_session(
    address: Address, patience: float = PATIENCE_SECONDS, expects: Mapping[str, Any] = MappingProxyType({})
) -> tuple[RemoteSession, Server]:
    """A new session on the server with the most room. `pool_of(address.servers).leave(server)` when it has ended."""
    pool = pool_of(address.servers)
    until = asyncio.get_running_loop().time() + patience
    refused: dict[str, str] = {}
    while True:
        await find_servers(pool)
        await shared(("loads", address.servers), lambda: _ask_loads(address, pool))
        server = pool.take()
        if server is not None:
            opened = await _tried(address, pool, server, expects, refused)
            if opened is not None:
                return opened, server
        if all(known.url in refused for known in pool.servers):
            raise Unavailable(f"{address.env}: no server gives a session: {pool.reasons()}")
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"{address.env}: no server had a session within {patience:g} s: {pool.reasons()}")
        await asyncio.sleep(min(left, pool.wait() + _dice.uniform(0.0, 0.02)))


async def _tried(
    address: Address, pool: Pool, server: Server, expects: Mapping[str, Any], refused: dict[str, str]
) -> RemoteSession | None:
    """A session on this server; None, with the failure noted, if it gives none."""
    opened = None
    try:
        opened = await RemoteSession.open(replace(address, service=server.service), server.url, expects)
    except NotOpened as failure:
        if failure.wait is not None:
            pool.full(server, str(failure), failure.wait)
        elif failure.lasting:
            refused[server.url] = str(failure)
            pool.full(server, str(failure), LASTING_REST)
        else:
            pool.failed(server, str(failure), failure.broken)
            if failure.broken and server.broken >= BROKEN_TRIES:
                refused[server.url] = str(failure)
    else:
        pool.well(server)
    finally:
        if opened is None:
            pool.leave(server)
    return opened


def look_around(address: Address) -> None:
    """Ask servers for their load in the background, unless it is known freshly."""
    pool = pool_of(address.servers)
    in_background(find_servers(pool))
    for server in pool.to_ask():
        in_background(_ask_load(address, pool, server))


async def _ask_loads(address: Address, pool: Pool) -> None:
    """Ask the servers whose load is not known freshly."""
    servers = pool.to_ask()
    doubtful = [server for server in servers if server.doubtful]
    if doubtful and pool.has_others(doubtful):
        # A hanging server answers late: do not wait for it if there is another.
        for server in doubtful:
            in_background(_ask_load(address, pool, server))
        servers = [server for server in servers if not server.doubtful]
    await asyncio.gather(*(_ask_load(address, pool, server) for server in servers))


async def _ask_load(address: Address, pool: Pool, server: Server) -> None:
    from aiohttp import ClientError

    try:
        status, body = await get(replace(address, service=server.service), server.url, "/ready", ASK_SECONDS)
        record = json.loads(body)
        sessions, room = record.get("sessions"), record.get("max_sessions")
        if status == 503:
            pool.full(server, "it is draining" if record.get("draining") else "it is not ready", ASK_SECONDS)
    except (OSError, ClientError, ValueError, AttributeError) as error:  # TimeoutError is an OSError
        pool.failed(server, f"/ready: {error or type(error).__name__}")
        return
    if type(sessions) is int and sessions >= 0:
        pool.told(server, sessions, room if type(room) is int and room > 0 else None)
