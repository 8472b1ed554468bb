"""Who leaves in the middle of something: a client in its handshake, the server while it is told things. Nobody is to hear of it."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
from collections import Counter

import pytest
from service_harness import Client, alive, browsing, handshake, parent_of, serving, session, until

from agentgym.service.server.http_connections import relayed
from agentgym.service.server.task_catalogue import tell_tasks
from agentgym.service.worker.websocket import CLOSE, TEXT, encoded

CLOSING = encoded(CLOSE, struct.pack("!H", 1000), masked=True)


def open_files():
    kinds = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
    return kinds


@pytest.mark.parametrize("linger", [True, False], ids=["reset", "closed"])
def test_a_client_that_leaves_in_its_handshake_is_not_an_error(linger, caplog):
    async def knock():
        async with serving(max_sessions=1) as server:
            await until(lambda: len(server.forks.pids()[1]) == 2)
            files = open_files()
            for path in ("/envs/faulty/session", "/ws", "/mcp", "/envs/faulty/session"):
                for _ in range(3):
                    # It has gone before the server, in this very thread, reads a word.
                    sock = socket.create_connection(("127.0.0.1", server.port))
                    sock.sendall(handshake(path))
                    if linger:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
                    await asyncio.sleep(0.01)
                    await until(lambda: not server.runner.server.connections)
                    await until(lambda: not server.sessions.open)
            async with session(server) as client:
                await client.begin()
                token = client.hello["resume"]
                await client.drop()
                sock = socket.create_connection(("127.0.0.1", server.port))
                sock.sendall(handshake(f"/envs/faulty/session?resume={token}"))
                sock.close()
                await client.connect(resume=token)  # it was not used up
                assert (await client.step("echo on"))["result"]
            await until(lambda: not server.sessions.open)
            await until(lambda: open_files() == files, lambda: (files, open_files()))

    with caplog.at_level(logging.WARNING):
        asyncio.run(knock())
    assert not caplog.records


@pytest.mark.parametrize("busy", [False, True], ids=["in one packet", "while a call runs"])
def test_a_request_that_a_close_frame_follows_is_not_run(busy, tmp_path):
    note = tmp_path / "ran"

    async def play():
        async with serving() as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            sock = client.ws._response.connection.transport.get_extra_info("socket")
            if busy:  # the worker reads neither of them before the server sees the client gone
                await client.send("step", action="sleep 2")
                await asyncio.sleep(0.2)
            late = {"id": client.id + 1, "call": "step", "action": f"note {note}"}
            os.write(sock.fileno(), encoded(TEXT, json.dumps(late).encode(), masked=True) + CLOSING)
            sock.shutdown(socket.SHUT_WR)
            await until(lambda: not server.sessions.open, "the end of the session, which may not be resumed")

    asyncio.run(play())
    assert not note.exists()


def test_a_connection_that_breaks_within_a_message_is_no_leave():
    """Bytes from the middle of a message may look like a close frame."""

    async def play():
        async with serving(limits={"close_seconds": 0.1}) as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            session = server.sessions.open[client.hello["session"]]
            sock = client.ws._response.connection.transport.get_extra_info("socket")
            message = encoded(TEXT, CLOSING * 1000, masked=True)
            os.write(sock.fileno(), message[:10])
            await until(lambda: server.sessions.states()["reading"] == 1)
            os.kill(client.pid, signal.SIGSTOP)  # it has not read the rest when the server sees the client gone
            os.write(sock.fileno(), message[8 + len(CLOSING) : -1])
            sock.shutdown(socket.SHUT_RDWR)
            await until(lambda: session.client is None)
            os.kill(client.pid, signal.SIGCONT)
            await asyncio.sleep(2.0)  # longer than a client that has left may keep its session
            await client.connect(resume=client.hello["resume"])
            assert (await client.step("sleep 2"))["result"]
            await client.ws.close()

    asyncio.run(play())


def test_what_is_to_be_relayed_may_have_gone():
    async def play():
        outer, client = socket.socketpair()
        inner, worker = socket.socketpair()
        with outer, worker:
            _, writer = await asyncio.open_connection(sock=client)
            writer.transport.abort()
            with pytest.raises(ConnectionError):
                await relayed(writer.transport, inner)
            inner.close()
            assert worker.recv(1) == b""

    asyncio.run(play())


def test_tasks_are_told_to_a_server_that_has_left():
    for question in ("", json.dumps({"env": "nowhere"}) + "\n"):
        server, theirs = socket.socketpair()
        server.sendall(question.encode())
        server.close()
        with theirs:
            tell_tasks(theirs, {}, {})


def test_the_process_that_tells_tasks_is_replaced_when_it_has_died():
    async def play():
        async with serving(workers=0) as server, browsing(server) as http:
            for _ in range(3):
                assert (await http.get("/envs")).status == 200
                [telling] = server.forks.pids()[1].values()
                os.kill(telling, signal.SIGKILL)
                await until(lambda: not server.forks.pids()[1])

    asyncio.run(play())


def test_a_zygote_whose_server_has_left_says_nothing_of_it(capfd):
    async def play():
        async with serving(workers=2) as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            zygote = parent_of(client.pid)
            os.kill(zygote, signal.SIGSTOP)
            workers = list(server.forks.pids()[1].values())
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not any(map(alive, workers)))
            server.forks.packets.close()  # so deaths and this are found at once
            os.kill(zygote, signal.SIGCONT)
            await until(lambda: not alive(zygote))
            await client.drop()

    asyncio.run(play())
    assert "Traceback" not in capfd.readouterr().err
