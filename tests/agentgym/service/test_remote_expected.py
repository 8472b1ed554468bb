"""What a client expects of servers: all make the same environment, none hangs it, and each says what it serves."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faulty_server import FaultyServer, running
from served import served

import agentgym
from agentgym.cli import main
from agentgym.core.registration import EnvSpec, spec
from agentgym.policies.base import ExpertPolicy, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, close_env, run_episode, run_many
from agentgym.service.client import balance, connection, lookup
from agentgym.service.client import session_client as client
from agentgym.service.client.address import SessionLost, Unavailable, parse
from agentgym.service.client.connection import difference
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.env_server import EnvServer

sys.path.insert(0, str(Path(__file__).parents[2] / "acceptance"))
from serving_process import Serving, serving


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.setattr(balance, "_pools", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)


def of_size(size: int) -> dict[str, EnvSpec]:
    return {"frozen_lake": dataclasses.replace(spec("frozen_lake"), kwargs={"size": size})}


@pytest.mark.parametrize(
    ("expects", "made_with", "words"),
    [
        ({}, {"size": 4}, ""),
        ({}, None, ""),
        ({"size": 4, "goals": (1, 2)}, {"size": 4, "goals": [1, 2], "more": 1}, ""),
        ({"size": 4}, {"size": 5}, "size=4 is expected, and the server makes it with size=5"),
        ({"size": 4}, {"size": 4.0}, "size=4 is expected"),
        ({"size": None}, {}, "size=None is expected, and the server makes it with no size"),
        ({"size": 4}, None, "with no size"),
    ],
)
def test_a_difference_is_told_by_name(expects: dict[str, Any], made_with: Any, words: str) -> None:
    assert words in difference(expects, made_with)
    assert bool(words) == bool(difference(expects, made_with))


def test_several_servers_must_all_make_the_same_environment() -> None:
    async def play(urls: str) -> list[str]:
        env: Any = await asyncio.to_thread(agentgym.make, urls)
        envs = [env.spec.make() for _ in range(4)]
        for one in envs:
            await one.reset(seed=1)
        used = [one.session.server for one in envs]
        await asyncio.gather(*(close_env(one) for one in envs))
        return used

    with served(specs=of_size(4)) as four, served(specs=of_size(5)) as five:
        urls = [f"{server.url}/frozen_lake" for server in (four, five)]
        assert asyncio.run(play(",".join(urls))) == [four.url] * 4
        assert asyncio.run(play(",".join(reversed(urls)))) == [five.url] * 4
        with pytest.raises(ValueError, match="size=6 is expected, and the server makes it with size=4"):
            agentgym.make(",".join(urls), size=6)


def test_a_server_that_starts_again_with_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.service.client.session_client.RECONNECT_SECONDS", 0.3)

    async def play(url: str, stack: contextlib.ExitStack, port: int) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, url)
        await env.reset(seed=1)
        await asyncio.to_thread(stack.close)
        with pytest.raises(SessionLost, match=r"WORKER_DIED|could not be opened again"):
            await env.step("up")
        again = contextlib.ExitStack()
        await asyncio.to_thread(again.enter_context, served(specs=of_size(5), port=port))
        try:
            with pytest.raises(Unavailable, match="size=4 is expected, and the server makes it with size=5"):
                await env.reset(seed=1)
        finally:
            await asyncio.to_thread(again.close)

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(specs=of_size(4)))
        asyncio.run(play(f"{server.url}/frozen_lake", stack, server.port))


def test_an_evaluation_is_not_gone_on_with_where_the_server_makes_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def evaluated(server: Any, n: int) -> int:
        monkeypatch.setattr(lookup, "known_records", {})  # as in a process of its own
        monkeypatch.setattr(balance, "_pools", {})
        words = ["--policy", "expert", "-n", str(n), "--out", str(folder), "--quiet"]
        return main(["eval", f"{server.url}/frozen_lake", *words])

    with served(specs=of_size(4)) as server:
        assert evaluated(server, 2) == 0
        assert evaluated(server, 3) == 0
    [cell] = json.loads((folder / "run.json").read_text())["cells"]
    assert cell["served"]["kwargs"]["size"] == 4
    assert cell["served"]["split"]["size"] == len(spec("frozen_lake").tasks("test"))
    episodes = (folder / cell["file"]).read_text()
    assert episodes.count("\n") == 3
    with served(specs=of_size(5), port=server.port) as other:
        assert evaluated(other, 4) == 2
    assert "the server's kwargs size was 4, is now 5" in capsys.readouterr().err
    assert (folder / cell["file"]).read_text() == episodes


def test_a_spec_is_held_to_what_its_servers_make_now() -> None:
    with served(specs=of_size(4)) as server:
        remote = spec(f"{server.url}/frozen_lake")
        assert lookup.held(remote).kwargs["expects"]["size"] == 4
        mine = dataclasses.replace(remote, kwargs={**remote.kwargs, "expects": {"size": 7}})
        assert lookup.held(mine).kwargs["expects"]["size"] == 7
        assert lookup.told_of(remote, "no such split").keys() == {"kwargs"}
    here = spec("frozen_lake")
    assert lookup.held(here) is here
    assert lookup.told_of(here, "test") == {}


def test_many_that_are_made_at_once_ask_once_and_need_no_server_later(monkeypatch: pytest.MonkeyPatch) -> None:
    server, asked = FaultyServer(spec("frozen_lake")), []
    real = lookup.ask

    def ask(address: Any, path: str, *more: Any, **limits: Any) -> Any:
        asked.extend([path] if path == address.path else [])
        return real(address, path, *more, **limits)

    monkeypatch.setattr(lookup, "ask", ask)
    made: list[Any] = []
    with running(server):
        threads = [threading.Thread(target=lambda: made.append(agentgym.make(server.url))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert (len(made), len(asked)) == (16, 1)
    monkeypatch.setattr(lookup, "RECORD_SECONDS", 0.0)
    assert agentgym.make(server.url).max_turns == made[0].max_turns  # type: ignore[union-attr]
    assert len(asked) == 2
    with pytest.raises(Unavailable, match="no server answers"):
        agentgym.make(server.url.replace("frozen_lake", "sokoban"))


def test_a_server_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with served("gsm8k", specs=of_size(5)) as server:
        assert main(["list", server.url, "--json"]) == 0
        told = {env["id"]: env for env in json.loads(capsys.readouterr().out)}
        assert set(told) == {"gsm8k", "frozen_lake"}
        assert told["frozen_lake"]["kwargs"]["size"] == 5
        assert main(["list", server.url, "--tag", "math"]) == 0
        shown = capsys.readouterr().out
        assert f"{server.url}/gsm8k" in shown
        assert "frozen_lake" not in shown
    for url, words in [
        ("gsm8k", "bad URL 'gsm8k': write http://HOST:PORT"),
        (f"{server.url}/gsm8k", f"names an environment: write {server.url}"),
        (server.url, f"{server.url}: no server answers"),
    ]:
        assert main(["list", url]) == 2
        assert words in capsys.readouterr().err


ODD = [
    ({"tags": 3}, "its tags are no list of texts: 3"),
    ({"tags": [["a"]]}, "its tags are no list of texts"),
    ({"splits": [1]}, r"its splits are no table: \[1\]"),
    ({"splits": {"test": None}}, "its split 'test' has no size: None"),
    ({"splits": {"test": {}}}, "its split 'test' has no size: {}"),
    ({"splits": {"test": {"size": "9"}}}, "its split 'test' has no size"),
    ({"kwargs": [1]}, r"its kwargs are no table: \[1\]"),
]


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("record", "words"), ODD)
def test_a_record_that_is_none_makes_a_server_unavailable(
    record: dict[str, Any], words: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(address: Any, path: str, **limits: Any) -> Any:
        if listed and path != "/envs":
            raise lookup.NotFound(path)
        return {"envs": [{"id": "x", **record}]} if listed else {"id": "x", **record}

    monkeypatch.setattr(lookup, "ask", ask)
    with pytest.raises(Unavailable, match=f"x at http://h:1: GET /envs.*{words}"):
        agentgym.make("http://h:1/x")


def test_what_a_record_has_no_value_for_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"tags": None, "splits": None, "kwargs": None}
    monkeypatch.setattr(lookup, "ask", lambda *args, **limits: {"id": "x", "max_turns": None, **empty})
    remote = spec("http://h:1/x")
    assert lookup.record_of(parse("http://h:1/x")) == {"id": "x", "max_turns": None}
    assert lookup.told_of(remote, "test") == {}
    assert lookup.held(remote) is remote


# A server that sends without an end.


@contextlib.contextmanager
def dripping(start: bytes) -> Iterator[str]:
    """The URL of a server that sends this, and then a byte at a time for as long as somebody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send() -> None:
            with contextlib.suppress(OSError):
                client, _ = listening.accept()
                with client:
                    client.recv(1 << 16)
                    client.sendall(start)
                    while True:
                        client.sendall(b"a")
                        time.sleep(0.02)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.join(10)
    assert not thread.is_alive()


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "start",
    [b"", HEAD + b"X-Of: ", HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"],
    ids=["status", "head", "body", "chunk"],
)
def test_an_answer_that_comes_a_byte_at_a_time_is_given_up(start: bytes) -> None:
    with dripping(start) as url, pytest.raises(TimeoutError, match="its answer was not whole after 6 s"):
        lookup.fetch(parse(f"{url}/x"), url, "/health", {}, seconds=2.0)


def test_a_server_that_says_nothing_is_given_up_after_one_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="timed out"):
            lookup.fetch(parse(f"{url}/x"), url, "/health", {}, seconds=2.0)


def test_an_answer_that_is_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LARGEST_ANSWER", 1 << 20)
    monkeypatch.setattr(lookup, "LARGEST", 1 << 20)
    server = FaultyServer(spec("frozen_lake"))
    with running(server):
        address = parse(server.url)
        [url] = address.servers
        for size, enough in ((1 << 19, True), (1 << 21, False)):
            server.load["filling"] = "a" * size
            refused = contextlib.nullcontext() if enough else pytest.raises(Exception, match="it sends more than 1 MiB")
            with refused:
                assert asyncio.run(connection.get(address, url, "/ready", 10.0))[0] == 200
            with refused:
                assert lookup.fetch(address, url, "/ready", {})[0] == 200


# A server that hangs: SIGSTOP to all its processes.


@contextlib.contextmanager
def frozen(server: Serving) -> Iterator[None]:
    server = psutil.Process(server.process.pid)
    family = [server, *server.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    try:
        yield
    finally:
        for process in family:
            with contextlib.suppress(psutil.Error):
                os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_hangs_fails_its_episode_in_time_and_no_other() -> None:
    class Freezing(ScriptedPolicy):
        """Freezes the server before its second turn."""

        async def act(self, messages: Any, tools: Any = ()) -> Any:
            if len(messages) > 2:
                stack.enter_context(frozen(server))
            return await super().act(messages, tools)

    with serving("sokoban") as server, contextlib.ExitStack() as stack:
        env = agentgym.make(f"{server.url}/sokoban")
        [task] = env.tasks.take(1)  # type: ignore[union-attr]
        begun = time.monotonic()
        limits = Limits(step_timeout=2.0, close_timeout=2.0)
        played = asyncio.run(run_episode(env, Freezing(["up", "up", "up"]), task, limits=limits))  # type: ignore[arg-type]
        assert played.error is not None
        assert "turn 2: step took longer than its limit of 2 s" in played.error
        assert time.monotonic() - begun < 60
        stack.close()
        again = asyncio.run(run_episode(env, ExpertPolicy(), task))  # type: ignore[arg-type]
        assert (again.error, again.end) == (None, "terminated")
        asyncio.run(close_env(env))  # type: ignore[arg-type]


def test_one_of_two_servers_hangs_and_every_episode_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(client, "SILENT_SECONDS", 1.5)
    with serving("sokoban") as well, serving("sokoban") as hangs, contextlib.ExitStack() as stack:
        made = spec(f"{well.url}/sokoban,{hangs.url}/sokoban")
        todo = [Episode(task, 0, i) for i, task in enumerate(made.tasks("train").take(16))]
        ended: list[Any] = []

        def on_end(trajectory: Any) -> None:
            ended.append(trajectory)
            if len(ended) == 4:
                stack.enter_context(frozen(hangs))

        played = asyncio.run(
            run_many(made.make, lambda _: ExpertPolicy(), todo, concurrency=4, retries=3, on_end=on_end)
        )
    assert [trajectory.error for trajectory in played] == [None] * 16
    assert {trajectory.end for trajectory in played} == {"terminated"}
    told = [error for trajectory in played for error in trajectory.metadata.get("errors", ())]
    assert all(f"{hangs.url}: the session is lost: " in error for error in told)


def test_a_step_that_takes_long_on_a_server_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.05)
    asked: list[str] = []
    real = client.still_answers

    async def counted(address: Any, server: str) -> bool:
        asked.append(server)
        return await real(address, server)

    monkeypatch.setattr(client, "still_answers", counted)

    async def play(url: str) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, url)
        await env.reset(seed=1)
        session = env.session
        await env.step("sleep 1")
        assert env.session is session
        await env.close()

    with served(specs={"faulty": EnvSpec(id="faulty", entry_point="service_faults:Faulty")}) as server:
        asyncio.run(play(f"{server.url}/faulty"))
    assert len(asked) > 1


@pytest.mark.parametrize("limit", [600.0, float("inf")])
def test_a_client_comes_back_to_a_call_that_takes_longer_than_a_session_to_open(
    limit: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(client, "RECONNECT_SECONDS", 0.2)
    go = tmp_path / "go"

    async def play(server: EnvServer) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, f"{server.url}/faulty")
        await env.reset(seed=1)
        session = env.session
        assert session.hello.limits.step_seconds == limit
        step = asyncio.create_task(env.step(f"until {go}"))
        while not server.sessions.states()["step"]:
            await asyncio.sleep(0.01)
        connection.cut(session.ws)
        await asyncio.sleep(1.0)
        go.touch()
        observation, *_ = await step
        assert observation[0]["content"].startswith("1: ")
        assert (env.session, session.reconnects) == (session, 1)
        await env.close()

    limits = ServiceLimits(step_seconds=limit)
    with served(specs={"faulty": EnvSpec("faulty", "service_faults:Faulty")}, limits=limits) as server:
        asyncio.run(play(server))


SLOW = {"slow": EnvSpec(id="slow", entry_point="service_faults:MadeSlowly", kwargs={"seconds": 1.5})}


def test_an_environment_may_take_longer_to_make_than_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.4)
    monkeypatch.setattr(lookup, "SECONDS", 0.4)
    with served(specs=SLOW, max_sessions=1) as server:
        env, task = agentgym.make(f"{server.url}/slow"), agentgym.Task("1")
        played = asyncio.run(run_episode(env, ScriptedPolicy(["done"]), task))  # type: ignore[arg-type]
        assert (played.error, played.reward) == (None, 1.0)


def test_a_session_that_is_given_up_while_it_is_opened_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(specs=SLOW, max_sessions=1, limits=ServiceLimits(close_seconds=0.5, resume_seconds=600.0)) as server:
        env, task = agentgym.make(f"{server.url}/slow"), agentgym.Task("1")
        limits = Limits(init_timeout=0.5)
        given_up = asyncio.run(run_episode(env, ScriptedPolicy(["done"]), task, limits=limits))  # type: ignore[arg-type]
        assert "init took longer" in str(given_up.error)
        again = asyncio.run(run_episode(env, ScriptedPolicy(["done"]), task))  # type: ignore[arg-type]
        assert (again.error, again.reward) == (None, 1.0)
