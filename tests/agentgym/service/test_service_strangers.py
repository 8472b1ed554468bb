"""What those can do who have no token, and pages of other sites: little, and at no cost to others."""

import asyncio
import contextlib
import gzip
import socket
import time
import tracemalloc
import zlib

from service_harness import SECONDS, UPGRADE, browsing, serving, session, until

from agentgym.service.server.env_server import SPARE_CONNECTIONS
from agentgym.service.server.http_connections import inflated

TOKEN = "t" * 20


def bomb(mebibytes):
    pack = zlib.compressobj(9, wbits=31)
    return b"".join([*(pack.compress(bytes(1 << 20)) for _ in range(mebibytes)), pack.flush()])


class TestBodies:
    def test_nothing_is_inflated_for_those_who_are_not_let_in(self):
        packed = bomb(200)
        begun = time.process_time()
        zlib.decompressobj(31).decompress(packed)
        inflating_one = time.process_time() - begun

        async def knock():
            async with serving(tokens={"ann": TOKEN}) as server, browsing(server) as http:
                begun = time.process_time()
                for path in ("/reset", "/envs", "/nowhere", "/health"):
                    for encoding in ("gzip", "deflate"):
                        post = http.request("GET", path, data=packed, headers={"Content-Encoding": encoding})
                        async with post as answer:
                            assert answer.status == (200 if path == "/health" else 401)
                assert time.process_time() - begun < inflating_one, "of the eight, some were inflated"

        asyncio.run(knock())

    def test_a_body_is_inflated_within_the_largest_message(self):
        async def ask(http, body, encoding):
            async with http.post("/reset", data=body, headers={"Content-Encoding": encoding}) as answer:
                return answer.status

        async def knock():
            async with serving(limits={"message_bytes": 100_000}) as server, browsing(server) as http:
                good = b'{"seed": 3}'
                assert await ask(http, gzip.compress(good), "gzip") == 200
                assert await ask(http, zlib.compress(good), "deflate") == 200
                assert await ask(http, zlib.compress(good)[2:-4], "deflate") == 200  # as some clients send it
                assert await ask(http, good, "identity") == 200
                assert await ask(http, bomb(50), "gzip") == 413
                assert await ask(http, gzip.compress(good)[:-4], "gzip") == 400
                assert await ask(http, good, "gzip") == 400
                assert await ask(http, good, "br") == 415

        asyncio.run(knock())

    def test_it_is_bounded_while_it_is_inflated(self):
        packed, most = bomb(50), 1 << 20
        tracemalloc.start()
        try:
            assert inflated(packed, "gzip", most) is None
            assert tracemalloc.get_traced_memory()[1] < 4 * most
        finally:
            tracemalloc.stop()

    def test_no_websocket_is_compressed(self):
        async def knock():
            async with serving(max_sessions=1, limits={"resume_seconds": 0.1}) as server, browsing(server) as http:
                headers = {**UPGRADE, "Sec-WebSocket-Extensions": "permessage-deflate"}
                for path in ("/envs/faulty/session", "/ws", "/mcp", "/ws?session_id=none"):
                    async with http.get(path, headers=headers) as answer:
                        assert (answer.status, "Sec-WebSocket-Extensions" in answer.headers) == (101, False), path
                        answer.close()
                    await until(lambda: not server.sessions.open)
                async with session(server), http.get("/ws", headers=headers) as refused:
                    assert (refused.status, "Sec-WebSocket-Extensions" in refused.headers) == (101, False)

        asyncio.run(knock())


@contextlib.contextmanager
def idle(port, count):
    """Connections that say nothing."""
    with contextlib.ExitStack() as open_ones:
        yield [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
            for _ in range(count)
        ]


class TestConnections:
    def test_idle_ones_without_a_token_make_room_for_probes_and_for_those_with_one(self):
        async def knock():
            async with serving(tokens={"ann": TOKEN}, max_sessions=2) as server, browsing(server, TOKEN) as ann:
                cap = 2 * 2 + SPARE_CONNECTIONS
                async with session(server, token=TOKEN) as client:
                    await client.begin()
                    assert (await ann.get("/envs")).status == 200
                    kept = next(iter(server.connections.known))
                    with idle(server.port, cap + 30):
                        await until(lambda: server.connections.cut["capacity"] >= 30)
                        async with browsing(server) as probe:
                            assert (await probe.get("/health")).status == 200
                        async with session(server, token=TOKEN) as another:
                            assert (await another.begin()).pid
                        assert (await client.step("echo on"))["result"]
                        assert kept in server.connections.known, "the one with a token was cut"
                        assert (await ann.get("/envs")).status == 200
                        assert len(server.connections) <= cap
                await until(lambda: server.connections.states()["anonymous"] == 0)

        asyncio.run(knock())

    def test_those_in_which_a_request_runs_stay(self):
        async def knock():
            async with serving(max_sessions=1) as server, browsing(server) as http:
                running = asyncio.create_task(http.post("/step", json={"action": {"message": "sleep 1.5"}}))
                await until(lambda: server.sessions.states()["step"] == 1)
                with idle(server.port, 2 + SPARE_CONNECTIONS + 20):
                    await until(lambda: server.connections.cut["capacity"] >= 20)
                    assert (await running).status == 200

        asyncio.run(knock())

    def test_a_second_request_has_as_long_to_come_as_the_first(self):
        whole, part = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HT"

        def asked(port, *said):
            """What is answered until the server closes."""
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
                answers = []
                for words in said:
                    sock.sendall(words)
                    answers.append(sock.recv(1 << 16))
                answers.append(sock.recv(1 << 16))
                return [answer[9:12] for answer in answers]

        async def knock():
            async with serving(limits={"message_seconds": 0.4}) as server, browsing(server) as http:
                assert await asyncio.to_thread(asked, server.port, whole, part) == [b"200", b"", b""]
                assert await asyncio.to_thread(asked, server.port, whole + part) == [b"200", b""]
                assert (await http.get("/health")).status == 200
                [kept] = server.connections.strangers
                await asyncio.sleep(1.0)  # with no request begun it may wait
                assert (await http.get("/health")).status == 200
                assert list(server.connections.strangers) == [kept]

        asyncio.run(knock())


class TestHosts:
    def test_a_name_that_was_led_here_is_refused_where_no_token_is_asked(self):
        """DNS rebinding: the page's own origin is the name, so its browser sends no Origin, or one that agrees."""

        async def status(http, path, host, **headers):
            async with http.get(path, headers={"Host": host, **headers}) as answer:
                return answer.status

        async def knock():
            async with serving(allowed_hosts=("our.example",)) as server, browsing(server) as http:
                for path in ("/envs", "/envs/faulty/tasks", "/metrics", "/envs/faulty/session", "/ws", "/nowhere"):
                    assert await status(http, path, "evil.example", **UPGRADE) == 403, path
                evil = {"Origin": "http://evil.example"}
                assert await status(http, "/envs", "evil.example", **evil) == 403
                assert await status(http, "/envs", "localhost", **evil) == 403
                assert await status(http, "/envs", "our.example:8000", Origin="http://our.example:8000") == 200
                assert await status(http, "/envs", f"localhost:{server.port}") == 200
                assert await status(http, "/health", "10.0.0.7:8000") == 200  # probes ask by an address
                assert not server.sessions.open
            async with serving(tokens={"ann": TOKEN}) as server, browsing(server, TOKEN) as http:
                assert await status(http, "/envs", "any.example") == 200  # the token says who asks

        asyncio.run(knock())


def test_what_is_open_is_counted():
    async def look():
        async with serving(tokens={"ann": TOKEN}) as server, browsing(server, TOKEN) as http:
            with idle(server.port, 3):
                await until(lambda: len(server.connections) == 3)
                text = await (await http.get("/metrics")).text()
            assert 'agentgym_connections{state="anonymous"} 3\n' in text
            assert 'agentgym_connections{state="busy"} 1\n' in text

    asyncio.run(look())
