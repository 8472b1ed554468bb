"""A server in this process and its clients, for tests: every process is gone when `serving` ends."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time

import aiohttp

from agentgym.core.registration import spec
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.env_server import serve
from agentgym.service.server.settings import ServeSettings
from agentgym.service.server.slots import SessionCounts, Slot, make_memory, map_memory

SECONDS = 30.0  # by which anything must have happened, on any machine
# Headers of a WebSocket handshake.
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def handshake(path, more=""):
    """The bytes of a WebSocket handshake; `more`: lines of other headers, each with its end."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}{more}\r\n".encode()


def new_slot():
    """What a session writes into, without a server."""
    memory = make_memory(1)
    slot = Slot(map_memory(memory), 0)
    os.close(memory)
    return slot


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid):
    """Its parent's id; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def command(*words, **pipes):
    """`agentgym serve` of the environment that does what it is told, in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])}
    line = [sys.executable, "-m", "agentgym.cli", "serve", "service_faults:Faulty", "--port", "0", "--json", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, env=environ, text=True, **pipes)


def url_told_by(process):
    """Where a `serve --json` listens, which it says first."""
    text = ""
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, "it ended"
        text += line
    return json.loads(text)["url"]


async def until(true, what="it"):
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"{what} did not come to be"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(*, tokens=None, envs=None, limits=None, **settings):
    names = envs or {"faulty": "service_faults:Faulty"}
    server = await serve(
        ServeSettings(
            envs={id: spec(name) for id, name in names.items()},
            port=0,
            tokens=tokens or {},
            limits=ServiceLimits(**(limits or {})),
            **settings,
        )
    )
    zygote = server.forks.pids()[0]
    try:
        yield server
    finally:
        workers = list(server.forks.pids()[1].values())
        await server.close()
        assert not [pid for pid in [zygote, *workers] if alive(pid)]


@contextlib.asynccontextmanager
async def browsing(server, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    settings = {"timeout": aiohttp.ClientTimeout(SECONDS), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(server.url, headers=headers, **settings) as http:
        yield http


def tally(server):
    """Counts of all environments together."""
    total = SessionCounts()
    for one in server.sessions.tallies().values():
        total.add(one)
    return total


class Client:
    """A client's session over one connection at a time."""

    def __init__(self, http, env="faulty"):
        self.http = http
        self.path = f"/envs/{env}/session"
        self.id = 0

    async def connect(self, resume=None, **kw):
        self.ws = await self.http.ws_connect(self.path + (f"?resume={resume}" if resume else ""), max_msg_size=0, **kw)
        self.hello = await self.receive()
        return self

    async def receive(self):
        return json.loads(await asyncio.wait_for(self.ws.receive_str(), SECONDS))

    async def send(self, call, **fields):
        self.id += 1
        await self.ws.send_json({"id": self.id, "call": call, **fields})

    async def ask(self, call, **fields):
        await self.send(call, **fields)
        return await self.receive()

    async def begin(self, task="a", seed=1):
        await self.ask("init", task={"id": task})
        answer = await self.ask("reset", seed=seed)
        self.pid = answer["result"]["info"]["pid"]
        return self

    async def step(self, action):
        return await self.ask("step", action=action)

    async def drop(self):
        """The connection breaks: no close frame."""
        self.ws._response.connection.transport.abort()
        await self.ws.close()

    async def ended(self):
        """The code with which the server closes."""
        message = await asyncio.wait_for(self.ws.receive(), SECONDS)
        assert message.type is aiohttp.WSMsgType.CLOSE, message
        return message.data


@contextlib.asynccontextmanager
async def session(server, env="faulty", token=None, **kw):
    async with browsing(server, token) as http:
        client = await Client(http, env).connect(**kw)
        try:
            yield client
        finally:
            await client.ws.close()
