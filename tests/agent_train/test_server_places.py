"""Which servers of a run start where not all do. The servers are doubles, which tell their health alone; Ray and its places are real."""

import asyncio
import sys
import threading
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import ray

from agent_train.engine import servers
from agent_train.engine.base import EngineLostError
from agent_train.engine.http import open_client
from agent_train.engine.servers import DEAD, HEALTHY, STALE, Servers
from agentgym.processes.vllm_server import ServerState, VllmOptions

pytestmark = pytest.mark.ray
SECONDS = 120  # for what takes one


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


class Double(servers._Server):
    """A server that answers, or dies at its start if a file that its options name is there, which it removes."""

    exit_code: int | None = None

    def launch(self):
        if self._log.exists():
            self._log.unlink()
            self.exit_code = -9
        server = HTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    def state(self):
        return ServerState(0, self.exit_code, "", "")


@pytest.fixture(scope="module", autouse=True)
def one_gpu():
    """Ray counts one GPU; there need be none. Its workers cannot import this module."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@asynccontextmanager
async def two(tmp_path, gpus):
    """Two servers that take so many GPUs each, not started."""
    options = [VllmOptions("", "", log=str(tmp_path / str(number)), gpu=False) for number in (0, 1)]
    held = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": "DEFAULT" if gpus else "SPREAD"}
    async with open_client("") as client:
        made = Servers(options, [held] * 2, start_timeout=SECONDS, client=client)
        try:
            yield made
        finally:
            await made.close()


def run(test):
    asyncio.run(asyncio.wait_for(test, 2 * SECONDS))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.05)


def test_servers_without_room_at_the_start_come_as_soon_as_there_is_some(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_Server", Double)

    async def test():
        async with two(tmp_path, gpus=1) as both:
            await both.start(None, first=1)
            assert [server.state for server in both.all] == [STALE, DEAD]
            both.serve(both.those(STALE))
            both.fill()
            both.fill()
            await asyncio.sleep(1)
            assert both.numbers(HEALTHY, STALE) == [0]
            ray.kill(both.all[0].actor)
            await until(lambda: both.numbers(STALE) == [1])
            assert both.losses == 0, "one that comes late was not lost"

    run(test())


def test_a_server_that_is_lost_at_the_start_holds_up_no_other_and_comes_later(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_Server", Double)
    (tmp_path / "1").touch()

    async def test():
        async with two(tmp_path, gpus=0) as both:
            await both.start(None, first=2)
            assert both.numbers(STALE) == [0]
            assert "has exited with code -9" in both.all[1].why
            both.fill()
            await until(lambda: both.numbers(STALE) == [0, 1])

    run(test())


def test_without_any_server_there_is_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "_Server", Double)
    for number in "01":
        (tmp_path / number).touch()

    async def test():
        async with two(tmp_path, gpus=0) as both:
            with pytest.raises(EngineLostError, match="has exited with code -9"):
                await both.start(None, first=2)

    run(test())
