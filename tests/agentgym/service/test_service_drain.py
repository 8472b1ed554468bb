"""SIGTERM: what runs goes on until the time is up, nothing new begins; a second one ends all at once."""

import asyncio
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from service_harness import SECONDS, UPGRADE, Client, alive, browsing, command, parent_of, serving, until, url_told_by

from agentgym.service.server import env_server


@pytest.fixture
def started():
    running = []

    def start(*words):
        running.append(command(*words, stderr=subprocess.PIPE))
        return running[-1], url_told_by(running[-1])

    yield start
    for process in running:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()
        process.stderr.close()


async def ended(process, *pids):
    await until(lambda: process.poll() is not None and not any(map(alive, pids)))
    return process.returncode


def test_the_running_episode_ends_and_no_new_one_begins(started):
    async def play():
        process, url = started("--drain-timeout", "600")
        async with aiohttp.ClientSession(url) as http:
            client = await (await Client(http, "Faulty").connect()).begin()
            zygote = parent_of(client.pid)
            process.send_signal(signal.SIGTERM)
            while (await (await http.get("/ready")).json())["ready"]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # the worker hears of it by a socket of its own
            for path in ("/envs/Faulty/session", "/envs/Faulty/session"):
                async with http.get(path, headers=UPGRADE) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "DRAINING")
                    assert int(answer.headers["Retry-After"]) > 0
            for turn in (1, 2):
                assert (await client.step("echo on"))["result"][0][0]["content"] == f"{turn}: on"
            assert (await client.step("end"))["result"][2]
            error = (await client.ask("reset"))["error"]
            assert (error["code"], error["fatal"]) == ("DRAINING", True)
            await client.ws.close()
            assert await ended(process, client.pid, zygote) == 0
            assert "waiting for 1 session" in process.stderr.read()

    asyncio.run(play())


def test_a_session_that_is_opened_as_the_drain_begins_begins_no_episode(monkeypatch):
    hand_over = env_server.hand_over

    async def play():
        async with serving(drain_seconds=SECONDS) as server, browsing(server) as http:
            begun = []

            async def late(*args):
                begun.append(asyncio.create_task(server.drain()))
                await until(lambda: server.sessions.draining)
                return await hand_over(*args)

            monkeypatch.setattr(env_server, "hand_over", late)
            client = await Client(http, "faulty").connect()
            error = (await client.ask("init", task={"id": "a"}))["error"]
            assert (error["code"], error["fatal"]) == ("DRAINING", True)
            await client.ws.close()
            await asyncio.wait_for(begun[0], SECONDS)

    asyncio.run(play())


def test_when_the_time_is_up_the_rest_is_ended(started):
    async def play():
        process, url = started("--drain-timeout", "0.2")
        async with aiohttp.ClientSession(url) as http:
            client = await (await Client(http, "Faulty").connect()).begin()
            process.send_signal(signal.SIGTERM)
            assert (await client.receive())["error"]["code"] == "DRAINING"
            assert await client.ended() == 4504
            await client.ws.close()
            assert await ended(process, client.pid) == 0

    asyncio.run(play())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(started, how):
    async def play():
        process, url = started("--drain-timeout", "600")
        async with aiohttp.ClientSession(url) as http:
            client = await (await Client(http, "Faulty").connect()).begin()
            await client.send("step", action="hang")
            zygote = parent_of(client.pid)
            process.send_signal(how)
            while (await (await http.get("/ready")).json())["ready"]:
                await asyncio.sleep(0.01)
            process.send_signal(how)
            assert await ended(process, client.pid, zygote) == 0
            await client.ws.close()

    asyncio.run(play())


def test_a_signal_while_it_imports_ends_it(tmp_path):
    (tmp_path / "slow_import.py").write_text(
        "import os, time, agentgym\n"
        "class Slow(agentgym.Env):\n    pass\n"
        "if os.environ.get('SLOW_NOTE') and 'server.zygote' in ' '.join(open('/proc/self/cmdline').read().split('\\0')):\n"
        "    open(os.environ['SLOW_NOTE'], 'w').write(str(os.getpid()))\n"
        "    time.sleep(3600)\n"
    )
    note = tmp_path / "note"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "SLOW_NOTE": str(note)}
    words = [sys.executable, "-m", "agentgym.cli", "serve", "slow_import:Slow", "--port", "0"]
    process = subprocess.Popen(words, env=environ)

    async def play():
        await until(lambda: note.exists() and note.read_text())
        process.terminate()
        assert await ended(process, int(note.read_text())) == 0

    try:
        asyncio.run(play())
    finally:
        process.kill()
        process.wait(SECONDS)
