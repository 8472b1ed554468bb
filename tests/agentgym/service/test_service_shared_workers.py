"""Sessions that share a process: opened without a fork, ended without its end, and lost together where one breaks a limit."""

import asyncio
import contextlib
import functools

from service_harness import Client, browsing, serving, tally, until


@contextlib.asynccontextmanager
async def two_to_a_process():
    """A server whose sessions share a process, two at most, and a way to open them."""
    async with (
        serving(workers=1, sessions_per_worker=2, limits={"step_seconds": 1.0}) as server,
        browsing(server) as http,
    ):
        yield server, http


def played(test):
    """The test, run with a server and what opens sessions there."""

    @functools.wraps(test)
    def run(self):
        async def play():
            async with two_to_a_process() as (server, http):
                await test(self, server, http)

        asyncio.run(play())

    del run.__wrapped__  # pytest would take its arguments for fixtures
    return run


async def opened(http, task):
    return await (await Client(http).connect()).begin(task)


class TestSharing:
    @played
    async def test_a_process_takes_as_many_sessions_as_it_may_and_the_next_has_another(self, server, http):
        first, second, third = [await opened(http, task) for task in "abc"]
        assert first.pid == second.pid != third.pid

    @played
    async def test_sessions_have_environments_and_requests_of_their_own(self, server, http):
        first, second = [await opened(http, task) for task in "ab"]
        slow = asyncio.create_task(first.step("sleep 0.5"))
        assert (await second.step("x"))["id"] == 3
        assert not slow.done()
        assert "result" in await slow
        assert tally(server).counters["steps"] == 2

    @played
    async def test_one_that_ends_leaves_its_process_to_the_others_and_to_the_next(self, server, http):
        first, second = [await opened(http, task) for task in "ab"]
        assert (await first.ask("close"))["result"] == {}
        await until(lambda: len(server.sessions.open) == 1)
        third = await opened(http, "c")
        assert third.pid == second.pid == first.pid
        assert "result" in await second.step("x")
        assert tally(server).ended == {"closed": 1}

    @played
    async def test_a_dropped_connection_is_resumed_in_the_same_process(self, server, http):
        first, _ = [await opened(http, task) for task in "ab"]
        token = first.hello["resume"]
        await first.drop()
        await first.connect(token)
        assert first.hello["last"] == 2
        assert "result" in await first.step("x")

    @played
    async def test_a_client_that_leaves_in_a_call_costs_the_others_nothing(self, server, http):
        first, second = [await opened(http, task) for task in "ab"]
        await first.send("step", action="sleep 0.5")
        await first.ws.close()
        await until(lambda: len(server.sessions.open) == 1)
        assert "result" in await second.step("x")


class TestOneThatHangs:
    @played
    async def test_ends_the_process_and_the_others_are_told_why(self, server, http):
        first, second = [await opened(http, task) for task in "ab"]
        await first.send("step", action="sleep 60")
        assert (await first.receive())["error"]["code"] == "DEADLINE"
        told = (await second.receive())["error"]
        assert (told["code"], told["fatal"]) == ("SHARED_WORKER_KILLED", True)
        assert "step took longer than its limit of 1 s" in told["message"]
        assert await second.ended() == 4509
        assert tally(server).ended == {"DEADLINE": 1, "SHARED_WORKER_KILLED": 1}

    @played
    async def test_does_not_keep_new_sessions_from_being_opened(self, server, http):
        first, second = [await opened(http, task) for task in "ab"]
        await first.send("step", action="sleep 60")
        await first.receive()
        await second.receive()
        third = await opened(http, "c")
        assert third.pid != first.pid


def test_an_environment_that_runs_programs_keeps_a_process_for_each_session():
    async def play():
        envs = {"sums": "gsm8k_python", "faulty": "service_faults:Faulty"}
        async with serving(workers=1, sessions_per_worker=2, envs=envs) as server, browsing(server) as http:
            for _ in range(2):
                await Client(http, "sums").connect()
            assert len(server.sessions.envs_by_process()) == 2
            for _ in range(2):
                await Client(http, "faulty").connect()
            assert len(server.sessions.envs_by_process()) == 3

    asyncio.run(play())
