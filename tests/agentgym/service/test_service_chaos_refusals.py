"""Who is not let in, and what is not waited for: wrong tokens, resume tokens of others, what is too large or too slow."""

import asyncio
import json
import socket
import time

import aiohttp
import pytest
from chaos_harness import Raw
from service_harness import SECONDS, UPGRADE, Client, browsing, serving, session, until

ANN, BOB = "ann-" + "a" * 28, "bob-" + "b" * 28
TOKENS = {"ann": ANN, "bob": BOB}
SESSION = "/envs/faulty/session"
# Every address at which a session, an episode or a task can be had.
DOORS = [
    "GET " + SESSION,
    "GET /ws",
    "GET /faulty/ws",
    "GET /mcp",
    "POST /mcp",
    "POST /reset",
    "POST /step",
    "GET /envs",
]
DOORS += ["GET /envs/faulty/tasks", "GET /metrics", "POST /faulty/tasks", "GET /schema", f"GET {SESSION}?token={ANN}"]


WRONG = [
    "",
    "Bearer",
    "Bearer  ",
    f"Bearer {ANN[:-1]}",
    f"Bearer {ANN}a",
    f"Bearer {ANN.upper()}",
    f"Bearer {ANN}, {BOB}",
]
WRONG += [f"Basic {ANN}", ANN, "Bearer \xff\xfe", f"Bearer {ANN} {ANN}"]


def test_a_wrong_token_opens_no_door():
    async def knock(server, door, given):
        method, _, path = door.partition(" ")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
        lines += [f"Authorization: {given}"] if given else []
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        assert answer.startswith(b"HTTP/1.1 401 "), (door, given, answer)
        assert b"WWW-Authenticate: Bearer" in answer
        writer.transport.abort()

    async def knock_everywhere():
        async with serving(tokens=TOKENS) as server:
            for given in WRONG:
                for door in DOORS:
                    await knock(server, door, given)
            assert not server.sessions.open

    asyncio.run(knock_everywhere())


def test_two_tokens_in_one_request_are_none():
    async def knock():
        async with serving(tokens=TOKENS) as server:
            headers = f"Authorization: Bearer wrong\r\nAuthorization: Bearer {ANN}\r\n"
            raw = await Raw.open(server.port, SESSION, headers)
            assert raw.status in (400, 401)
            await raw.close()

    asyncio.run(knock())


def test_a_resume_token_is_its_owners_alone_and_is_used_once():
    async def knock():
        async with serving(tokens=TOKENS) as server, browsing(server, ANN) as http:
            client = await (await Client(http).connect()).begin()
            first = client.hello["resume"]
            await client.drop()
            await until(lambda: server.sessions.states()["detached"] == 1)
            for bearer in (BOB, ANN + "x"):
                raw = await Raw.open(server.port, f"{SESSION}?resume={first}", f"Authorization: Bearer {bearer}\r\n")
                assert raw.status == (409 if bearer == BOB else 401)
                await raw.close()
            await client.connect(resume=first)  # what another tried has not used it up
            assert (await client.step("echo"))["result"]
            async with http.get(SESSION, params={"resume": first}, headers=UPGRADE) as replayed:
                assert (replayed.status, (await replayed.json())["error"]["code"]) == (409, "RESUME_REFUSED")
            assert (await client.step("echo"))["result"]  # and the session has noticed nothing
            await client.ask("close")
            await client.ws.close()
            await until(lambda: not server.sessions.open)
            async with http.get(SESSION, params={"resume": client.hello["resume"]}, headers=UPGRADE) as late:
                assert (late.status, (await late.json())["error"]["code"]) == (409, "RESUME_REFUSED")

    asyncio.run(knock())


def _dripped(port, at_once, then):
    """Send the rest of a request one byte at a time until the server has had enough; what it said."""
    end = time.monotonic() + SECONDS
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
        sock.sendall(at_once)
        sock.settimeout(0.02)
        for byte in then:
            assert time.monotonic() < end
            try:
                sock.send(bytes((byte,)))
                return sock.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                return b""
    return b"all was taken"


HEAD = f"GET {SESSION} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n".encode()
BODY = b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"


@pytest.mark.parametrize(
    ("at_once", "then", "said"), [(b"", HEAD + b"X-Long: y\r\n" * 500, b""), (BODY, b" " * 9000, b"HTTP/1.1 408")]
)
def test_a_request_that_drips_is_not_waited_for(at_once, then, said):
    async def drip():
        async with serving(limits={"message_seconds": 0.5}) as server:
            answer = await asyncio.to_thread(_dripped, server.port, at_once, then)
            assert answer[:12] == said
            assert not server.sessions.open

    asyncio.run(drip())


@pytest.mark.parametrize("path", [SESSION, "/ws", "/mcp"])
def test_a_message_over_the_limit_ends_the_connection(path):
    async def send():
        async with serving(limits={"message_bytes": 2000}) as server:
            raw = await Raw.open(server.port, path)
            raw.send(json.dumps({"type": "step", "data": {"message": "x" * 3000}}))
            texts, code = await raw.ended()
            assert code in (4413, 1009), (texts, code)
            await raw.close()
            await until(lambda: not server.sessions.open)

    asyncio.run(send())


def test_a_body_over_the_limit_is_refused():
    async def send():
        async with serving(limits={"message_bytes": 2000}) as server, browsing(server) as http:
            for path in ("/reset", "/step", "/mcp", "/faulty/tasks"):
                async with http.post(path, data=b" " * 3000) as answer:
                    assert answer.status == 413, path
            assert not server.sessions.open

    asyncio.run(send())


def test_who_says_nothing_over_mcp_is_not_kept():
    async def wait():
        async with serving(limits={"idle_seconds": 0.5}) as server, browsing(server) as http:
            async with http.ws_connect("/mcp") as ws:
                await until(lambda: len(server.sessions.open) == 1)
                told = await ws.receive_json(timeout=SECONDS)
                assert (told["error"]["code"], "(IDLE)" in told["error"]["message"]) == (-32000, True)
                message = await asyncio.wait_for(ws.receive(), SECONDS)
                assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
            await until(lambda: not server.sessions.open)
            async with session(server) as client:
                await client.begin()

    asyncio.run(wait())
