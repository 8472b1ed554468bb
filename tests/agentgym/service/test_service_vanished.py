"""A client's machine that is gone from one moment to the next: no FIN comes, nothing is confirmed, and its slot returns all the same."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys

import pytest
from service_harness import SECONDS, serving, tally, until

TOKEN = "t" * 20
# Opens a session and begins an episode; says so; asks for a step that takes a while; and is silent from then on.
CLIENT = """
import json, sys, time
from agentgym.service.client.blocking_websocket import BlockingWebSocket
url, action = sys.argv[1:]
headers = {"Authorization": "Bearer TOKEN"}
ws = BlockingWebSocket(url + "/envs/faulty/session", headers, None, time.monotonic() + 20)
ws.receive(time.monotonic() + 20)
for id, call in enumerate([{"call": "init", "task": {"id": "a"}}, {"call": "reset"}], 1):
    ws.send(json.dumps({"id": id, **call}), time.monotonic() + 20)
    ws.receive(time.monotonic() + 20)
if action:
    ws.send(json.dumps({"id": 3, "call": "step", "action": action}), time.monotonic() + 20)
print("playing", flush=True)
time.sleep(600)
""".replace("TOKEN", TOKEN)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture
def link():
    """A network namespace with a link to here: its name, this end's name, and this end's address."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (iproute2): no network namespace can be made")
    number = os.getpid() % 16000
    space, here, there = f"agentgym-{number}", f"agh{number}", f"agt{number}"
    net = f"10.253.{number // 64}.{number % 64 * 4}".rpartition(".")
    mine, its = (f"{net[0]}.{int(net[2]) + host}" for host in (1, 2))
    with contextlib.ExitStack() as made:
        try:
            ip("netns", "add", space)
            made.callback(ip, "netns", "delete", space)  # and the link with it
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
            ip("address", "add", f"{mine}/30", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", space, "address", "add", f"{its}/30", "dev", there)
            ip("-n", space, "link", "set", there, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace is to be had here: {error.stderr.strip()}")
        yield space, here, mine


def test_the_slot_of_a_machine_that_vanished_returns(link, tmp_path):
    space, here, address = link

    async def play(server, action):
        words = ["ip", "netns", "exec", space, sys.executable, "-c", CLIENT, server.url, action]
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        async with asyncio.timeout(SECONDS):
            assert await process.stdout.readline() == b"playing\n"
        return process

    async def vanish():
        go, limits = tmp_path / "go", {"resume_seconds": 1.0, "message_seconds": 1.0}
        async with serving(host=address, tokens={"ann": TOKEN}, limits=limits) as server:
            # One waits for its agent; one is sent an answer that nobody confirms.
            clients = await asyncio.gather(play(server, ""), play(server, f"until {go}"))
            try:
                await until(lambda: server.sessions.states()["step"] == 1)
                assert len(server.sessions.open) == 2
                ip("link", "set", here, "down")
                go.touch()
                await until(lambda: not server.sessions.open, "the end of both sessions")
                assert tally(server).ended == {"IDLE": 2}
            finally:
                for client in clients:
                    client.kill()
                    await client.wait()

    asyncio.run(vanish())
