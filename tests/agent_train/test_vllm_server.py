"""The life and death of a vLLM server process; one that is killed is in test_engines.py. Those without the `vllm` mark need no vLLM."""

import asyncio
import socket
import subprocess
import sys
import time

import psutil
import pytest
from aiohttp import web
from engine_models import build

from agent_train.config.schema import EngineConfig
from agent_train.engine.base import EngineError, Sampling
from agent_train.engine.http import ServerFailed, events, open_client, post
from agent_train.engine.servers import Router, Servers
from agent_train.engine.vllm import VllmEngine, server_options
from agentgym.processes.vllm_server import ServingError, VllmServer, check_vllm


def test_a_port_in_use_is_named_before_anything_starts(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = VllmServer(server_options("none", tmp_path / "logs", EngineConfig(port=port)))
        with pytest.raises(ServingError, match=rf"cannot listen on port {port} of 127\.0\.0\.1"):
            server.launch()
        assert not (tmp_path / "logs").exists()


def test_missing_vllm_is_said_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in (check_vllm() or "")


@pytest.mark.vllm
def test_checking_for_vllm_is_quick_and_imports_none_of_it() -> None:
    code = (
        "import sys, time; from agentgym.processes.vllm_server import check_vllm; t = time.perf_counter(); "
        "assert check_vllm() is None; assert time.perf_counter() - t < 10; "
        "assert not {'vllm', 'torch', 'ray', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_the_router_prefers_the_episodes_home_then_the_least_busy_and_leaves_the_dead_out() -> None:
    router, all_of_them = Router(3, episodes=4), [0, 1, 2]
    assert [router.pick(all_of_them, "a"), router.pick(all_of_them, "b"), router.pick(all_of_them)] == [0, 1, 2]
    assert router.pick(all_of_them, "b") == 1
    router.in_flight[2] -= 1
    assert router.pick(all_of_them) == 2
    assert router.pick([0, 2], "b") in (0, 2)
    assert router.pick([0], "b") == 0


def test_the_router_knows_the_home_of_an_episode_that_rests_while_others_come_and_go() -> None:
    router, all_of_them = Router(2, episodes=8192), [0, 1]
    homes = {f"slow {n}": router.pick(all_of_them, f"slow {n}") for n in range(4096)}
    assert set(homes.values()) == {0, 1}
    for n in range(2 * 8192):
        router.pick(all_of_them, f"short {n}")
    router.in_flight = [0, 10**6]  # no episode would go to the second one now
    assert {name: router.pick(all_of_them, name) for name in homes} == homes


def test_a_closed_engine_refuses_at_once() -> None:
    async def ask() -> None:
        config = EngineConfig(max_model_len=64)
        engine = VllmEngine(Servers([], [], config.start_timeout, open_client()), config, "")
        await engine.close()
        with pytest.raises(EngineError, match="the vLLM engine is closed"):
            await engine.generate([5], Sampling(1))

    asyncio.run(asyncio.wait_for(ask(), 5))


def serve(handler, call):
    """Run `call(client, url)` against a faulty endpoint made for the test."""

    async def run():
        app = web.Application()
        app.router.add_post("/x", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with open_client() as client:
                return await call(client, url)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_connection_broken_by_the_server_is_tried_again() -> None:
    calls = []

    async def breaks_every_second_time(request):
        calls.append(1)
        if len(calls) % 2 == 1:
            request.transport.abort()
        return web.json_response({"ok": True})

    async def twice(client, url):
        return [await post(client, url, "/x", {}, 5, "asking") for _ in range(2)]

    assert serve(breaks_every_second_time, twice) == [{"ok": True}] * 2
    assert len(calls) == 4


def test_an_endpoint_that_always_breaks_fails_after_a_few_tries() -> None:
    async def breaks(request):
        request.transport.abort()
        return web.Response()

    with pytest.raises(ServerFailed, match="asking"):
        serve(breaks, lambda client, url: post(client, url, "/x", {}, 5, "asking"))


def test_a_slow_endpoint_is_a_timeout_with_its_name() -> None:
    async def slow(request):
        await asyncio.sleep(3)
        return web.json_response({})

    async def ask(client, url):
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"asking: .* did not answer within 0\.3 s"):
            await post(client, url, "/x", {}, 0.3, "asking")
        return time.monotonic() - begun

    assert serve(slow, ask) < 2


@pytest.mark.parametrize(("status", "kind"), [(400, ValueError), (500, ServerFailed)])
def test_a_refusal_is_a_value_error_and_a_failure_an_engine_error(status: int, kind: type) -> None:
    async def answers(request):
        return web.Response(status=status, text="because of the moon")

    with pytest.raises(kind, match=f"{status}: because of the moon"):
        serve(answers, lambda client, url: post(client, url, "/x", {}, 5, "asking"))


def listened(handler):
    """The events of an endpoint, and how it failed after them."""

    async def listen(client, url):
        found = []
        try:
            async for event in events(client, url, "/x", {}, "asking"):
                found.append(event)
        except EngineError as error:
            return found, error
        return found, None

    return serve(handler, listen)


def test_events_come_one_by_one_until_the_last() -> None:
    calls = []

    async def streams(request):
        calls.append(1)
        if len(calls) == 1:  # nothing has been told yet, so it is tried again
            request.transport.abort()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b': a comment\n\ndata: {"n": 1}\n\nda')
        await response.write(b'ta: {"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n')
        return response

    assert listened(streams) == ([{"n": 1}, {"n": 2}], None)
    assert len(calls) == 2


@pytest.mark.parametrize("aborts", [True, False])
def test_events_without_the_last_are_a_failure(aborts: bool) -> None:
    async def breaks(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        if aborts:
            request.transport.abort()
        return response

    found, error = listened(breaks)
    assert found == [{"n": 1}]
    assert isinstance(error, ServerFailed)


@pytest.fixture(scope="module")
def ray_cluster(workers_as_forks):
    import ray

    with workers_as_forks():
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.vllm
@pytest.mark.ray
def test_a_server_that_cannot_start_is_an_error_with_the_end_of_its_log(ray_cluster, tmp_path) -> None:
    config = EngineConfig(max_model_len=64, start_timeout=120)
    with pytest.raises(EngineError, match=r"exited with code [\s\S]*vllm-0\.log[\s\S]*Error"):
        asyncio.run(VllmEngine.start(config, tmp_path / "no-model", tmp_path / "logs"))
    assert "no-model" in (tmp_path / "logs" / "vllm-0.log").read_text()


@pytest.mark.vllm
@pytest.mark.ray
def test_a_server_that_is_not_ready_in_time_is_stopped_and_named(ray_cluster, tmp_path) -> None:
    config = EngineConfig(max_model_len=64, start_timeout=1)
    with pytest.raises(EngineError, match=r"not ready within 1 s \(engine\.start_timeout\)"):
        asyncio.run(VllmEngine.start(config, build(tmp_path / "model"), tmp_path / "logs"))
    wait_until(lambda: not processes_with(str(tmp_path)))


def processes_with(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and word in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found
