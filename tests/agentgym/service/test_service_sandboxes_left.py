"""Sandboxes of served environments go with the worker that made them, on the real back ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from service_harness import SECONDS, Client, alive, parent_of, session, until, url_told_by

from agentgym.core.registration import EnvSpec, spec
from agentgym.sandbox.backends.select import sandboxes
from agentgym.service.server.env_server import serve
from agentgym.service.server.settings import ServeSettings

BACKENDS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


def boxed(backend):
    found = spec("code_mbpp")
    return EnvSpec(found.id, found.entry_point, {**found.kwargs, "sandbox": backend, "data": "own"})


async def boxes_of(pid):
    """The sandboxes that a process has made."""
    return [found for found in (await asyncio.to_thread(sandboxes))[0] if found.pid == pid]


async def begun(client):
    """Play until there is a sandbox: an answer is run in one."""
    assert "result" in await client.ask("reset", seed=1)
    assert "result" in await client.ask("step", action="```python\nimport time\ntime.sleep(0.1)\n```")


async def none_left(pid):
    for _ in range(int(SECONDS * 10)):
        if not await boxes_of(pid):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"left: {await boxes_of(pid)}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_is_killed_leaves_no_sandbox(backend):
    async def play():
        server = await serve(ServeSettings(envs={"code": boxed(backend)}, port=0))
        try:
            async with session(server, "code") as client:
                await begun(client)
                [pid] = [pid for pid in server.forks.pids()[1].values() if await boxes_of(pid)]
                await until(lambda: server.sessions.states()["waiting"] == 1)  # else it dies within its answer
                os.kill(pid, signal.SIGKILL)
                assert (await client.receive())["error"]["code"] == "WORKER_DIED"
                await none_left(pid)
                assert not alive(pid)
        finally:
            await server.close()

    asyncio.run(play())


def against_a_process(backend, play):
    """Have `play` talk to an `agentgym serve`, which it gets with its URL."""
    kwargs = json.dumps({"sandbox": backend, "data": "own"})
    words = ["serve", "code_mbpp", "--port", "0", "--json", "--drain-timeout", "0", "--kwargs", kwargs]
    process = subprocess.Popen([sys.executable, "-m", "agentgym.cli", *words], stdout=subprocess.PIPE, text=True)
    try:
        asyncio.run(play(process, url_told_by(process)))
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", ["server", "zygote", "nobody"])
def test_a_server_that_ends_leaves_no_sandbox(backend, who):
    async def play(process, url):
        async with aiohttp.ClientSession(url) as http:
            client = await Client(http, "code_mbpp").connect()
            await begun(client)
            mine = [found.pid for found in (await asyncio.to_thread(sandboxes))[0] if _is_below(found.pid, process.pid)]
            assert len(mine) == 1
            zygote = parent_of(mine[0])
            if who == "nobody":
                process.terminate()
            else:
                os.kill({"server": process.pid, "zygote": zygote}[who], signal.SIGKILL)
            await client.ws.close()
            await until(lambda: not alive(mine[0]) and not alive(zygote))
            await none_left(mine[0])

    against_a_process(backend, play)


# It ends as a worker does whose pool is still closing a sandbox.
ENDS_WITH_ONE = """
import os
from agentgym.sandbox import SandboxSpec, acquire
acquire(SandboxSpec(), "bubblewrap")
print(os.getpid(), flush=True)
os._exit(0)
"""


@pytest.mark.bubblewrap
def test_a_server_that_ends_removes_what_a_process_left_that_ended_well():
    async def play(process, url):
        async with aiohttp.ClientSession(url) as http:
            client = await Client(http, "code_mbpp").connect()
            await begun(client)
            left = subprocess.run([sys.executable, "-c", ENDS_WITH_ONE], capture_output=True, text=True, check=True)
            assert await boxes_of(int(left.stdout))
            process.terminate()
            await client.ws.close()
            await none_left(int(left.stdout))

    against_a_process("bubblewrap", play)


def _is_below(pid, above):
    """Whether a living process is a descendant of another."""
    while alive(pid) and pid > 1:
        if pid == above:
            return True
        pid = parent_of(pid)
    return False
