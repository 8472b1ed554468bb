"""What the kernel keeps a worker within."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from service_harness import Client, alive, browsing, parent_of, serving, session, tally, until

from agentgym import cli
from agentgym.processes import cgroups
from agentgym.service.server.bounds import Bounds, raise_open_files


def test_a_session_that_eats_memory_ends_alone_with_a_clear_error():
    async def play():
        async with serving(bounds=Bounds(memory_bytes=64 << 20)) as server, session(server) as other:
            await other.begin()
            async with session(server) as client:
                await client.begin()
                assert (await client.step("eat 16"))["result"]
                error = (await client.step("eat 500"))["error"]
                assert (error["code"], error["fatal"]) == ("OUT_OF_MEMORY", True)
                assert "step ran out of memory" in error["message"]
                assert "--session-memory" in error["message"]
                assert await client.ended() == 4507
            await until(lambda: len(server.sessions.open) == 1 and not alive(client.pid))
            assert tally(server).ended == {"OUT_OF_MEMORY": 1}
            assert tally(server).errors == {"OUT_OF_MEMORY": 1}
            assert (await other.step("eat 16"))["result"]

    asyncio.run(play())


def test_openenv_is_told_too():
    async def play():
        async with serving(bounds=Bounds(memory_bytes=64 << 20)) as server, browsing(server) as http:
            client = Client(http)
            client.ws = await http.ws_connect("/ws")
            await client.ws.send_json({"type": "reset", "data": {}})
            assert (await client.receive())["type"] == "observation"
            await client.ws.send_json({"type": "step", "data": {"message": "eat 500"}})
            told = await client.receive()
            assert told["type"] == "error"
            assert "OUT_OF_MEMORY" in told["data"]["message"]
            await client.ws.close()
            await until(lambda: not server.sessions.open)

    asyncio.run(play())


def test_a_worker_dumps_no_core_and_has_the_files_of_an_ordinary_process():
    async def play():
        async with serving(bounds=Bounds(open_files=300)) as server, session(server) as client:
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
    [(["--session-memory", "lots"], "512MiB"), (["--session-memory", "0"], "512MiB"), (["--workers", "-1"], "workers")],
)
def test_a_mistake_is_told(words, wrong, capsys):
    try:
        code = cli.main(["serve", "service_faults:Faulty", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert wrong in capsys.readouterr().err


@pytest.fixture(scope="module")
def in_groups():
    """Whether a session gets a control group here."""
    try:
        group = cgroups.create_plain("agentgym-test-session", 64 << 20, 10)
    except OSError as error:
        pytest.skip(f"no control groups: {error}")
    cgroups.remove(group)


def groups_of(server):
    """The folders of control groups of a server's sessions."""
    zygotes = {str(parent_of(pid)) for pid in server.forks.pids()[1].values()}
    begins = tuple(f"agentgym-session-{zygote}-" for zygote in zygotes)
    folders = os.walk("/sys/fs/cgroup")  # which passes over folders that go meanwhile
    found = [Path(place, name) for place, names, _ in folders for name in names if name.startswith(begins)]
    return [folder for folder in found if folder.is_dir()]


@pytest.mark.parametrize("greedy", ["share 200", "feed 60"])
def test_shared_memory_and_children_count_as_a_sessions_own(in_groups, greedy):
    async def play():
        async with serving(bounds=Bounds(memory_bytes=64 << 20), workers=0) as server, session(server) as other:
            await other.begin()
            async with session(server) as client:
                await client.begin()
                assert (await client.step("echo"))["result"]
                await client.step(greedy)
                if greedy.startswith("share"):
                    assert tally(server).ended == {"OUT_OF_MEMORY": 1}
                else:  # the kernel takes a child, or now and then the worker itself
                    await until(
                        lambda: sum_of_oom(server) or tally(server).ended["OUT_OF_MEMORY"], "a process that was killed"
                    )
            await until(lambda: len(server.sessions.open) == 1 and len(server.forks.pids()[1]) == 1)
            assert (await other.step("share 16"))["result"]

    asyncio.run(play())


def sum_of_oom(server):
    """How often the kernel killed a process in a session's group."""
    files = [folder / name for folder in groups_of(server) for name in ("memory.oom_control", "memory.events")]
    kills = 0
    for file in files:
        with contextlib.suppress(OSError):  # there is one or the other, and it goes with its session
            kills += sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    return kills


def test_a_session_that_forks_without_end_meets_its_own_limit_and_is_gone_when_it_ends(in_groups):
    async def play():
        async with serving(bounds=Bounds(pids=40)) as server, session(server) as other:
            await other.begin()
            async with session(server) as client:
                await client.begin()
                text = (await client.step("fork"))["result"][0][0]["content"]
                assert 10 < int(text.split()[1]) < 40
                assert (await other.step("child"))["result"], "another may still start processes"
                async with session(server) as third:
                    await third.begin()
                full = [f for f in groups_of(server) if len((f / "cgroup.procs").read_text().split()) > 10]
                assert full
            await until(lambda: not any(folder.exists() for folder in full), "the end of what it forked")

    asyncio.run(play())


def test_where_no_group_can_be_made_the_server_says_so_and_serves():
    hide = "mount -t tmpfs none /sys/fs/cgroup && exec $0 -m agentgym.cli serve frozen_lake --port 0 --session-memory 64MiB"
    words = ["unshare", "--mount", "sh", "-c", hide, sys.executable]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        told = server.stdout.readline()
        if not told:
            pytest.skip(f"nothing can be mounted here: {server.stderr.read()}")
        assert "frozen_lake at http" in told
    finally:
        server.terminate()
        said = server.communicate(timeout=30)[1]
    assert "no control groups for sessions" in said
    assert "--session-memory counts each process alone" in said
