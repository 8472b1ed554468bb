"""Opens sessions on the server with the most room; a failed one is tried again later.

Servers report their load (`/ready`); in between, sessions that this process opened and closed are counted. If a URL's
name has several addresses (a Kubernetes headless service), each is a server in the pool, so that a dropped connection
is reopened at the server that has the session. A name with one address, a load balancer's, stays a name.
"""

import asyncio
import functools
import ipaddress
import json
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from agentgym.service.client.address import Address, Unavailable
from agentgym.service.client.connection import NotOpened, get, in_background, shared
from agentgym.service.client.session_client import RemoteSession

PATIENCE_SECONDS = 60.0
ASK_SECONDS = 2.0
# A server that says no for good is tried again now and then: it may be restarted with another token file.
LASTING_REST = 30.0
# One that says that it failed is tried so often: more of the same would be waited for in vain.
BROKEN_TRIES = 3

FIND_SECONDS = 5.0  # servers come and go
FRESH_SECONDS = 2.0
FIRST_REST, LONGEST_REST = 0.5, 30.0
NO_ROOM_TOLD = 1_000_000
_log = logging.getLogger("agentgym.service")
_dice = random.Random()  # the global one is the episodes'


@dataclass
class Server:
    """The state of one server in this process. Times are of the monotonic clock."""

    url: str
    own: int = 0
    reported: int = 0
    own_then: int = 0
    room: int | None = None
    asked: float = -math.inf
    rests_until: float = -math.inf
    failures: int = 0
    broken: int = 0
    doubtful: bool = False
    why: str = ""
    service: str = ""

    @property
    def awake(self) -> bool:
        return self.rests_until <= time.monotonic()

    @property
    def sessions(self) -> int:
        """The sessions of the server by now, estimated."""
        return max(self.own, self.reported + self.own - self.own_then)

    @property
    def fullness(self) -> float:
        """The used share of the server's sessions; their number if the maximum is not known."""
        return self.sessions / (self.room or NO_ROOM_TOLD)


class Pool:
    """The servers of one environment, shared by all environments of a process with the same `urls`. Thread-safe."""

    def __init__(self, urls: Iterable[str]):
        self.urls = tuple(urls)
        self.servers = [Server(url) for url in self.urls]
        self.find_at = -math.inf
        self._lock = threading.RLock()

    def found(self, url: str, servers: Sequence[Server]) -> None:
        """Set the servers of a URL. Servers that were known keep their state."""
        with self._lock:
            known = {server.url: server for server in self.servers}
            own = [known.get(server.url, server) for server in servers]
            self.servers = [s for s in self.servers if url not in (s.url, s.service)] + own

    def take(self) -> Server | None:
        """Reserve a session on the server with the most room; None while all rest. `leave` gives it back."""
        with self._lock:
            awake = [server for server in self.servers if server.awake]
            if not awake:
                return None
            chosen = min(awake, key=lambda server: (server.doubtful, server.fullness, _dice.random()))
            chosen.own += 1
            return chosen

    def leave(self, server: Server) -> None:
        with self._lock:
            server.own -= 1

    def well(self, server: Server) -> None:
        with self._lock:
            self._is_back(server)
            server.failures, server.broken, server.why = 0, 0, ""

    def refused(self, server: Server, failure: NotOpened) -> bool:
        """The server gave no session; returns whether it is in vain to try again."""
        if failure.wait is not None:
            self.full(server, str(failure), failure.wait)
        elif failure.lasting:
            self.full(server, str(failure), LASTING_REST)
        else:
            self.failed(server, str(failure), failure.broken)
        return failure.lasting or (failure.broken and server.broken >= BROKEN_TRIES)

    def failed(self, server: Server, why: str, broken: bool = False) -> None:
        """The server failed: let it rest, longer each time. The first failure is logged."""
        with self._lock:
            if not server.doubtful:
                others = sum(not s.doubtful for s in self.servers) - 1
                _log.warning("lost the server %s (%s); %d others of its environment are left", server.url, why, others)
            server.doubtful = True
            server.why = why
            if server.rests_until > time.monotonic():
                return  # concurrent callers met one failure
            server.failures += 1
            server.broken += broken
            rest = min(FIRST_REST * 2 ** (server.failures - 1), LONGEST_REST) * _dice.uniform(0.75, 1.0)
            server.rests_until = time.monotonic() + rest

    def full(self, server: Server, why: str, seconds: float) -> None:
        """The server is full for this many seconds."""
        with self._lock:
            server.why = why
            # Refused callers should not come back at the same moment.
            server.rests_until = time.monotonic() + min(max(seconds, 0.05), LONGEST_REST) * _dice.uniform(1.0, 1.25)

    def move(self, url: str, to: str) -> None:
        with self._lock:
            self.urls = tuple(to if one == url else one for one in self.urls)
            self.servers = [Server(to) if server.url == url else server for server in self.servers]

    def told(self, server: Server, sessions: int, room: int | None) -> None:
        """Note the load that a server reported."""
        with self._lock:
            self._is_back(server)
            server.reported, server.own_then, server.room = sessions, server.own, room

    @staticmethod
    def _is_back(server: Server) -> None:
        if server.doubtful:
            _log.warning("the server %s answers again", server.url)
            server.doubtful = False

    def to_ask(self) -> list[Server]:
        """The servers whose load is not known freshly; marks them as asked. Empty if there is only one server."""
        with self._lock:
            now = time.monotonic()
            if len(self.servers) == 1:
                return []
            old = [server for server in self.servers if server.asked + FRESH_SECONDS <= now and server.awake]
            for server in old:
                server.asked = now
            return old

    def better_than(self, server: Server) -> bool:
        """True if a new episode should move to a server with clearly more room and fewer sessions of this process."""
        with self._lock:
            others = [s for s in self.servers if s is not server and s.awake and not s.doubtful]
            without = (server.sessions - 1) / (server.room or NO_ROOM_TOLD)
            # Without the second condition, processes that follow one report would move back and forth together.
            return any(other.fullness < without and other.own + 1 < server.own for other in others)

    def wait(self) -> float:
        """Seconds until a server may be tried again."""
        with self._lock:
            return max(0.0, min(s.rests_until for s in self.servers) - time.monotonic())

    def reasons(self) -> str:
        with self._lock:
            known = [f"{server.url}: {server.why}" for server in self.servers if server.why]
            return "; ".join(known) or "no reason known"


_pools: dict[tuple[str, ...], Pool] = {}


def pool_of(servers: tuple[str, ...]) -> Pool:
    return _pools.setdefault(servers, Pool(servers))


async def find_servers(pool: Pool) -> None:
    """Look up the names in a pool if they are due. Concurrent callers share the look-up."""

    async def find() -> None:
        for url in pool.urls:
            if (found := await _behind(url)) is not None:
                pool.found(url, found)
        pool.find_at = time.monotonic() + FIND_SECONDS

    if pool.find_at <= time.monotonic():
        await shared(("servers", pool.urls), find)


async def _behind(url: str) -> list[Server] | None:
    """The servers of a URL: the URL itself if its name has one address. None: the look-up failed."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host)
        return [Server(url)]
    except ValueError:
        pass
    port = parts.port or (443 if parts.scheme == "https" else 80)
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


async def open_session(address: Address, patience: float, expects: Mapping[str, Any]) -> tuple[RemoteSession, Server]:
    """A new session on the server with the most room, to which it is given back when it is abandoned."""
    pool = pool_of(address.servers)
    until = asyncio.get_running_loop().time() + patience
    hopeless: set[str] = set()
    while True:
        await find_servers(pool)
        if len(pool.servers) > 1:
            await shared(("loads", address.servers), lambda: _ask_loads(address, pool))
        if (server := pool.take()) is not None:
            opened = None
            try:
                opened = await RemoteSession.open(replace(address, service=server.service), server.url, expects)
                opened.give_back = functools.partial(pool.leave, server)
                pool.well(server)
                return opened, server
            except NotOpened as failure:
                if pool.refused(server, failure):
                    hopeless.add(server.url)
            finally:
                if opened is None:
                    pool.leave(server)
        if hopeless.issuperset(known.url for known in pool.servers):
            raise Unavailable(f"{address.env}: no server gives a session: {pool.reasons()}")
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            raise Unavailable(f"{address.env}: no server had a session within {patience:g} s: {pool.reasons()}")
        await asyncio.sleep(min(left, pool.wait() + _dice.uniform(0.0, 0.02)))


def look_around(address: Address) -> None:
    """Look up the servers and their load in the background, unless they are known freshly."""
    pool = pool_of(address.servers)
    in_background(find_servers(pool))
    in_background(_ask_loads(address, pool))


async def _ask_loads(address: Address, pool: Pool) -> None:
    """Ask the servers whose load is not known freshly. A hanging one answers late: if there is another, none waits."""
    servers = pool.to_ask()
    doubtful = [server for server in servers if server.doubtful]
    if doubtful and any(server.awake for server in pool.servers if server not in doubtful):
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
