"""What the kernel keeps a worker within."""

import asyncio
import resource

import pytest
from service_harness import Client, alive, browsing, serving, session, until

from agentgym import cli
from agentgym.service.bounds import Bounds, raise_open_files


def test_a_session_that_eats_memory_ends_alone_with_a_clear_error():
    async def play():
        async with serving(bounds=Bounds(memory_bytes=64 << 20)) as front, session(front) as other:
            await other.begin()
            async with session(front) as client:
                await client.begin()
                assert (await client.step("eat 16"))["result"]
                error = (await client.step("eat 500"))["error"]
                assert (error["code"], error["fatal"]) == ("OUT_OF_MEMORY", True)
                assert "step ran out of memory" in error["message"]
                assert "--session-memory" in error["message"]
                assert await client.ended() == 4507
            await until(lambda: len(front.sessions.open) == 1 and not alive(client.pid))
            assert front.sessions.tally().ended == {"OUT_OF_MEMORY": 1}
            assert front.sessions.tally().errors == {"OUT_OF_MEMORY": 1}
            assert (await other.step("eat 16"))["result"]

    asyncio.run(play())


def test_openenv_is_told_too():
    async def play():
        async with serving(bounds=Bounds(memory_bytes=64 << 20)) as front, browsing(front) as http:
            client = Client(http)
            client.ws = await http.ws_connect("/ws")
            await client.ws.send_json({"type": "reset", "data": {}})
            assert (await client.receive())["type"] == "observation"
            await client.ws.send_json({"type": "step", "data": {"message": "eat 500"}})
            told = await client.receive()
            assert told["type"] == "error"
            assert "OUT_OF_MEMORY" in told["data"]["message"]
            await client.ws.close()
            await until(lambda: not front.sessions.open)

    asyncio.run(play())


def test_a_worker_dumps_no_core_and_has_the_files_of_an_ordinary_process():
    async def play():
        async with serving(bounds=Bounds(open_files=300)) as front, session(front) as client:
            await client.begin()
            assert (await client.step("limits"))["result"][0][0]["content"] == "1: 0 300"
            with open(f"/proc/{client.pid}/oom_score_adj") as score:
                assert int(score.read()) >= 500

    asyncio.run(play())


@pytest.fixture
def open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_server_may_open_as_many_files_as_the_machine_allows(open_files):
    soft, hard = open_files
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
    assert raise_open_files(1) == min(soft, 500)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 500)


def test_more_sessions_than_fit_are_refused_at_the_start(open_files, capsys):
    _, hard = open_files
    if hard == resource.RLIM_INFINITY:
        pytest.skip("any number of files may be open here")
    assert cli.main(["serve", "service_faults:Faulty", "--max-sessions", str(hard)]) == 2
    said = capsys.readouterr().err.strip()
    assert f"--max-sessions: {hard + 2} sessions take" in said
    assert "serve at most" in said


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--session-memory", "lots"], "512MiB"),
        (["--session-memory", "0"], "512MiB"),
        (["--workers", "-1"], "workers"),
    ],
)
def test_a_mistake_is_told(words, wrong, capsys):
    try:
        code = cli.main(["serve", "service_faults:Faulty", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert wrong in capsys.readouterr().err
