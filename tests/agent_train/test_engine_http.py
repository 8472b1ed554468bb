"""The HTTP client of engines: connections are kept and given up as HTTP/1.1 says, whatever way an answer ends."""

import asyncio
import contextlib

import pytest

from agent_train.engine.base import EngineError
from agent_train.engine.http import ServerFailed, ask, get, open_client, post

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
OK = JSON + b"Content-Length: 2\r\n\r\n{}"


def talk(call, *answers, closes=()):
    """Run `call(client, url)` against a server that gives each request the next answer as it is; the connections and what each asked.

    It closes a connection after the answers whose numbers `closes` names. None is no answer.
    """
    left, connections = list(enumerate(answers)), []

    async def serve(reader, writer):
        requests = []
        connections.append(requests)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                requests.append((head.decode(), await reader.readexactly(length)))
                number, answer = left.pop(0)
                if answer is not None:
                    writer.write(answer)
                if number in closes:
                    break
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, open_client("secret") as client:
            return await asyncio.wait_for(call(client, url), 20)

    return asyncio.run(run()), connections


def test_requests_one_after_another_share_a_connection_and_bring_body_and_key():
    async def twice(client, url):
        return await post(client, url, "/a?b=1", {"x": [1, 2]}, 5, "asking"), await ask(client, url, "/c", 5, "asking")

    found, (requests,) = talk(
        twice, JSON + b'Content-Length: 9\r\n\r\n{"y": 12}', b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    )
    assert found == ({"y": 12}, None)
    (first, body), (second, nothing) = requests
    assert first.startswith("POST /a?b=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAuthorization: Bearer secret\r\n" in first
    assert body == b'{"x": [1, 2]}'
    assert second.startswith("GET /c HTTP/1.1\r\n")
    assert nothing == b""


def test_requests_at_the_same_time_have_a_connection_each():
    async def three(client, url):
        return await asyncio.gather(*(post(client, url, "/", {}, 5, "asking") for _ in range(3)))

    found, connections = talk(three, OK, OK, OK)
    assert found == [{}] * 3
    assert [len(requests) for requests in connections] == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "closes", "connections"),
    [
        (JSON + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\n[1,\r\n2\r\n2]\r\n0\r\nTrailer: t\r\n\r\n", (), 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + JSON + b"Content-Length: 5\r\n\r\n[1,2]", (), 1),
        (JSON + b"Connection: close\r\nContent-Length: 5\r\n\r\n[1,2]", (), 2),
        (JSON + b"\r\n[1,2]", (0,), 2),
        (JSON.replace(b"1.1", b"1.0") + b"Content-Length: 5\r\n\r\n[1,2]", (), 2),
        (JSON + b"Content-Length: 5\r\n\r\n[1,2]", (0,), 2),
    ],
    ids=["chunked", "continue", "asked to close", "until the end", "HTTP/1.0", "closed while idle"],
)
def test_an_answer_ends_where_its_headers_say_and_the_next_one_is_another(answer, closes, connections):
    async def twice(client, url):
        first = await post(client, url, "/", {}, 5, "asking")
        await asyncio.sleep(0.05)
        return first, await post(client, url, "/", {}, 5, "asking")

    found, made = talk(twice, answer, OK, closes=closes)
    assert found == ([1, 2], {})
    assert len(made) == connections


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_request():
    async def twice(client, url):
        with pytest.raises(EngineError, match=r"did not answer within 0\.2 s"):
            await post(client, url, "/slow", {}, 0.2, "asking")
        return await post(client, url, "/", {}, 5, "asking")

    found, (slow, quick) = talk(twice, None, OK)
    assert found == {}
    assert slow[0][0].startswith("POST /slow")
    assert quick[0][0].startswith("POST / ")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", JSON + b"Content-Length: many\r\n\r\n", OK[:-1]])
def test_what_is_no_whole_answer_is_a_failure_after_some_attempts(answer):
    async def once(client, url):
        assert await get(client, url, 5) is None
        with pytest.raises(ServerFailed, match=r"asking: http://127\.0\.0\.1:\d+/: ") as failed:
            await post(client, url, "/", {}, 5, "asking", attempts=2)
        return failed.value.status

    assert talk(once, answer, answer, answer, closes=(0, 1, 2))[0] == 0


def test_a_server_that_is_not_there_is_told_at_once():
    async def once(client, url):
        with pytest.raises(ServerFailed, match="UnreachableError"):
            await post(client, "http://127.0.0.1:9", "/", {}, 5, "asking")

    talk(once)
