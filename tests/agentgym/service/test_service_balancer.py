"""One address before several servers, as a Kubernetes Service or a load balancer is: it chooses for each connection anew."""

import asyncio
import contextlib
import itertools
import threading

import pytest
from served import served

from agentgym.core.registration import make
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import Episode, run_many


class Balancer:
    """Passes each connection on to the next server; a double of a balancer that knows nothing of HTTP."""

    def __init__(self, ports):
        self.next = itertools.cycle(ports)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.passing = set()

    async def start(self):
        self.server = await asyncio.start_server(self.passed, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def passed(self, reader, writer):
        self.passing.add(asyncio.current_task())
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", next(self.next))
        try:
            await asyncio.gather(copied(reader, there_writer), copied(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, there_writer):
                each.close()
            self.passing.discard(asyncio.current_task())

    async def stop(self):
        self.server.close()
        for task in list(self.passing):
            task.cancel()
        await asyncio.gather(*self.passing, return_exceptions=True)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


async def copied(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


@contextlib.contextmanager
def balanced(*ports):
    balancer = Balancer(ports)
    balancer.thread.start()
    try:
        yield f"http://127.0.0.1:{balancer.call(balancer.start())}"
        balancer.call(balancer.stop())
    finally:
        balancer.loop.call_soon_threadsafe(balancer.loop.stop)
        balancer.thread.join(30)
        balancer.loop.close()


@pytest.mark.timeout(100)
def test_who_is_refused_by_a_full_server_comes_to_another():
    async def play(url):
        holder = make(f"http://127.0.0.1:{full.port}/frozen_lake")
        await holder.init(holder.tasks[0])
        try:
            tasks = holder.tasks.take(6)
            episodes = [Episode(task, 0, seed) for seed, task in enumerate(tasks)]
            played = await run_many(lambda: make(f"{url}/frozen_lake", patience=20.0), expert, episodes, concurrency=3)
        finally:
            await holder.close()
        return played

    def expert(episode):
        return ExpertPolicy()

    with served("frozen_lake", max_sessions=1) as full, served("frozen_lake", max_sessions=8) as roomy:
        with balanced(full.port, roomy.port) as url:
            played = asyncio.run(play(url))
        assert [trajectory.error for trajectory in played] == [None] * 6
        assert full.sessions.refused, "nobody came to the full one: this shows nothing"
