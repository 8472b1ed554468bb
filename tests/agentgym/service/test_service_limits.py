"""What takes too long or is too large: the slot returns, the client is told, nobody else notices."""

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections import Counter

import aiohttp
import pytest
from service_harness import SECONDS, Client, alive, browsing, handshake, serving, session, tally, until

from agentgym.service.worker.websocket import TEXT, Frames, encoded, keep_alive


@pytest.mark.parametrize("action", ["hang", "spin"])
def test_a_step_over_its_deadline_is_killed_and_told(action):
    async def play():
        async with serving(limits={"step_seconds": 0.3}, max_sessions=2) as server, session(server) as other:
            await other.begin()
            async with session(server) as client:
                await client.begin()
                answer = await client.step(action)
                assert answer["error"]["code"] == "DEADLINE"
                assert "step took longer than its limit of 0.3 s" in answer["error"]["message"]
                assert await client.ended() == 4408
                assert len(server.sessions.open) == 1
                assert not alive(client.pid)
            assert (await other.step("echo hi"))["result"][0][0]["content"] == "1: hi"
            assert tally(server).ended == {"DEADLINE": 1}

    asyncio.run(play())


def test_an_init_over_its_deadline_is_killed():
    async def play():
        async with serving(limits={"init_seconds": 0.5}) as server, session(server) as client:
            answer = await client.ask("init", task={"id": "hang"})
            assert "init took longer than its limit of 0.5 s" in answer["error"]["message"]

    asyncio.run(play())


def test_an_environment_that_does_not_close_is_killed():
    async def play():
        stubborn = {"faulty": "service_faults:Stubborn"}
        async with serving(envs=stubborn, limits={"close_seconds": 0.3}) as server:
            async with session(server) as client:
                await client.begin()
            await until(lambda: not server.sessions.open)
            await until(lambda: not alive(client.pid))

    asyncio.run(play())


@pytest.mark.parametrize(("seconds", "ended"), [(1.0, {"closed"}), (3600.0, {"DEADLINE", "left"})])
def test_a_process_that_is_slow_to_exit_is_no_client_that_is_slow_to_read(seconds, ended):
    async def play():
        limits = {"message_seconds": 0.3, "close_seconds": 3.0}
        async with serving(envs={"faulty": "service_faults:Lingering"}, limits=limits) as server:
            async with session(server) as client:
                await client.begin()
                await client.step(str(seconds))
                assert (await client.ask("close"))["result"] == {}
                assert await client.ended() == 1000
                await until(lambda: not server.sessions.open)
            (told,) = tally(server).ended.elements()
            assert told in ended

    asyncio.run(play())


def test_an_idle_session_ends_in_good_order(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_CLOSED", str(tmp_path / "closed"))

    async def play():
        async with serving(limits={"idle_seconds": 0.3}) as server, session(server) as client:
            await client.begin()
            for _ in range(3):  # pings do not keep it
                await client.ws.ping()
            assert (await client.receive())["error"]["code"] == "IDLE"
            assert await client.ended() == 4410
            await until(lambda: not server.sessions.open)

    asyncio.run(play())
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_a_client_that_does_not_come_back_loses_its_session(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_CLOSED", str(tmp_path / "closed"))

    async def play():
        async with serving(limits={"resume_seconds": 0.2}) as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            await client.drop()
            await until(lambda: not server.sessions.open)
            assert tally(server).ended == {"IDLE": 1}

    asyncio.run(play())
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_pings_are_answered_while_a_step_runs(tmp_path):
    go = tmp_path / "go"

    async def play():
        async with serving() as server, session(server, autoping=False) as client:
            await client.begin()
            await client.send("step", action=f"until {go}")
            await until(lambda: server.sessions.states()["step"] == 1)
            await client.ws.ping(b"there?")
            message = await asyncio.wait_for(client.ws.receive(), SECONDS)
            assert (message.type, message.data) == (aiohttp.WSMsgType.PONG, b"there?")
            go.touch()
            assert (await client.receive())["result"]

    asyncio.run(play())


def raw(server):
    """A client that may do anything, past its handshake and the hello."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    sock.sendall(handshake("/envs/faulty/session"))
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(1)
    assert b" 101 " in head
    return sock


def all_of(sock):
    """The messages that come until the server closes."""
    frames, found = Frames(1 << 30, masked=False), []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            frames.buffer += data
            while (message := frames.next()) is not None:
                found.append(message)
    return found


BAD_BYTES = [
    (struct.pack("!BBQ4s", 129, 255, 1 << 40, bytes(4)), "TOO_LARGE"),
    (encoded(TEXT, b"x" * 3000, masked=True), "TOO_LARGE"),
    (encoded(TEXT, b"{}"), "BAD_FRAME"),
    (b"\x82\x80" + bytes(4), "BAD_FRAME"),
    (encoded(TEXT, b"\xff\xfe", masked=True), "BAD_FRAME"),
    (b"GET / HTTP/1.1\r\n\r\n", "BAD_FRAME"),
    (b"\x81\x90abcd{", "TOO_SLOW"),
    (b"\x81", "TOO_SLOW"),
    (b"\x01\x81" + bytes(4) + b"x", "TOO_SLOW"),
]


def test_bytes_that_are_no_message_end_the_session_with_a_word():
    async def play():
        limits = {"message_bytes": 2000, "message_seconds": 0.3}
        async with serving(limits=limits, max_sessions=1) as server:
            for data, code in BAD_BYTES:
                with await asyncio.to_thread(raw, server) as sock:
                    sock.sendall(data)
                    found = await asyncio.to_thread(all_of, sock)
                assert code.encode() in found[-2][1], (data, found)
                assert int.from_bytes(found[-1][1], "big") > 4000
                await until(lambda: not server.sessions.open)
            assert tally(server).ended == Counter(code for _, code in BAD_BYTES)
            async with session(server) as client:
                await client.begin()

    asyncio.run(play())


def test_a_request_that_does_not_arrive_is_not_waited_for():
    async def play():
        async with serving(limits={"message_seconds": 0.3}) as server:
            for head, told in [
                (b"GET /envs HT", b""),
                (b"", b""),
                (b"GET /envs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx", b"HTTP/1.1 408"),
                (
                    b"GET /envs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 9_000_000,
                    b"HTTP/1.1 413",
                ),
            ]:
                with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as sock:
                    with contextlib.suppress(ConnectionError):
                        await asyncio.to_thread(sock.sendall, head)
                    answer = b""
                    with contextlib.suppress(ConnectionResetError):
                        answer = await asyncio.to_thread(sock.recv, 12)
                    assert answer == told

    asyncio.run(play())


def test_a_client_that_drips_or_takes_no_answer_loses_its_session():
    async def play():
        async with serving(limits={"message_seconds": 0.4}) as server:
            with await asyncio.to_thread(raw, server) as dripping, await asyncio.to_thread(raw, server) as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                begin = b'[{"id": 1, "call": "init", "task": {"id": "a"}}, {"id": 2, "call": "reset"},'
                flood = b' {"id": 3, "call": "step", "action": "flood 50000000"}]'
                deaf.sendall(encoded(TEXT, begin + flood, masked=True))
                message = encoded(TEXT, b" " * 10_000, masked=True)
                end = time.monotonic() + SECONDS
                for byte in message:
                    try:
                        dripping.send(bytes((byte,)))
                    except OSError:
                        break
                    await asyncio.sleep(0.02)
                    assert time.monotonic() < end
                    if not server.sessions.open:
                        break
                await until(lambda: not server.sessions.open)
            assert tally(server).ended == {"TOO_SLOW": 2}

    asyncio.run(play())


def test_many_sessions_of_all_kinds_return_all_slots():
    """Healthy, hung, crashing and vanishing clients, more than there are slots, one after another."""

    async def play():
        limits = {"step_seconds": 1.0, "resume_seconds": 0.2}
        async with serving(limits=limits, max_sessions=8) as server, browsing(server) as http:

            async def one(kind):
                client = await (await Client(http).connect()).begin()
                if kind == "healthy":
                    for turn in range(1, 6):
                        assert (await client.step("echo"))["result"][0][0]["content"] == f"{turn}: "
                    await client.ask("close")
                elif kind == "vanish":
                    await client.drop()
                else:
                    assert (await client.step(kind))["error"]["fatal"]
                await client.ws.close()

            for _ in range(3):
                await asyncio.gather(*map(one, ["healthy", "vanish", "hang", "abort", "healthy", "exit 1", "healthy"]))
                await until(lambda: not server.sessions.open)
            assert sorted(server.sessions.free) == list(range(8))
            assert tally(server).ended == {"closed": 9, "DEADLINE": 3, "WORKER_DIED": 6, "IDLE": 3}

    asyncio.run(play())


@pytest.mark.parametrize("seconds", [0.1, 86400.0, 1e6, math.inf])
def test_a_connection_may_be_kept_alive_for_any_time(seconds):
    with socket.socket() as connection:
        keep_alive(connection, seconds)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
