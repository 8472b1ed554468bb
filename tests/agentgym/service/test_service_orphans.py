"""Whatever is killed, nothing of it is left: not the workers, nor what their environments have started."""

import asyncio
import os
import signal

import aiohttp
import pytest
from service_harness import SECONDS, Client, alive, browsing, command, parent_of, serving, session, until, url_told_by


async def started(client, word):
    """The process that the environment has started."""
    return int((await client.step(word))["result"][0][0]["content"].split()[1])


@pytest.mark.parametrize("how", ["abort", "close", "killed"])
def test_what_a_worker_started_goes_with_it_wherever_it_hid(how):
    async def play():
        async with serving() as server, session(server) as other, session(server) as client:
            await other.begin()
            kept = await started(other, "escape")
            await client.begin()
            started_here = [await started(client, word) for word in ("child", "escape", "escape")]
            assert all(map(alive, [kept, *started_here]))
            if how == "killed":
                await until(lambda: server.sessions.states()["waiting"] == 2)  # else it dies within its answer
                os.kill(client.pid, signal.SIGKILL)
                assert (await client.receive())["error"]["code"] == "WORKER_DIED"
            elif how == "close":
                assert (await client.ask("close"))["result"] == {}
            else:
                assert (await client.step("abort"))["error"]["code"] == "WORKER_DIED"
            await until(lambda: not any(map(alive, [client.pid, *started_here])))
            assert alive(kept)
            assert (await other.step("echo on"))["result"]
        await until(lambda: not alive(kept))

    asyncio.run(play())


@pytest.mark.parametrize("who", ["zygote", "supervisor"])
def test_when_the_zygote_or_its_keeper_is_killed_nothing_is_left_and_it_starts_again(who):
    async def play():
        async with serving() as server:
            async with session(server) as client:
                await client.begin()
                left = [await started(client, word) for word in ("child", "escape")]
                zygote = parent_of(client.pid)
                supervisor = server.forks.pids()[0]
                assert parent_of(zygote) == supervisor
                await until(lambda: server.sessions.states()["waiting"] == 1)
                os.kill(zygote if who == "zygote" else supervisor, signal.SIGKILL)
                assert (await client.receive())["error"]["code"] == "WORKER_DIED"
                await until(lambda: not any(map(alive, [client.pid, zygote, supervisor, *left])))
            await until(lambda: server.forks.ready)
            async with session(server) as client:
                await client.begin()
                assert (await client.step("echo again"))["result"]

    asyncio.run(play())


def test_spare_workers_that_die_are_replaced():
    async def play():
        async with serving(workers=2) as server:
            await until(lambda: len(server.forks.pids()[1]) == 2)
            killed = set(server.forks.pids()[1].values())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            # Both are told of before a session can take them, or it finds that they are gone.
            async with session(server) as client:
                if "error" in client.hello:  # taken between its death and its being heard of
                    assert client.hello["error"]["code"] == "WORKER_DIED"
            await until(lambda: killed.isdisjoint(pids := server.forks.pids()[1].values()) and len(pids) == 2)
            async with session(server) as client:
                await client.begin()

    asyncio.run(play())


def test_nothing_is_left_of_a_front_that_is_killed():
    process = command()

    async def play(url):
        async with aiohttp.ClientSession(url) as http:
            client = await (await Client(http, "Faulty").connect()).begin()
            left = [await started(client, word) for word in ("child", "escape")]
            zygote = parent_of(client.pid)
            supervisor = parent_of(zygote)
            assert parent_of(supervisor) == process.pid
            process.kill()
            await client.ws.close()
            await until(lambda: not any(map(alive, [client.pid, zygote, supervisor, *left])))

    try:
        asyncio.run(play(url_told_by(process)))
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


def test_opening_takes_a_worker_that_waits():
    async def play():
        async with serving(workers=1) as server, browsing(server) as http:
            await until(lambda: len(server.forks.pids()[1]) == 1)
            [waiting] = server.forks.pids()[1].values()
            client = await (await Client(http).connect()).begin()
            assert client.pid == waiting
            await until(lambda: len(server.forks.pids()[1]) == 2)
            await client.ws.close()
        async with serving(workers=0) as server, session(server) as client:
            await client.begin()
            assert list(server.forks.pids()[1].values()) == [client.pid]

    asyncio.run(play())
