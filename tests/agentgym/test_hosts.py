"""Which `Host` headers name this machine, and which requests come from web pages."""

import asyncio

import pytest

from agentgym.hosts import KEY_VARIABLE, ServerGuard, is_ours


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:7", "a.localhost", "our.example"])
def test_this_machine_is_named(host):
    assert is_ours(host, ("our.example",))


@pytest.mark.parametrize("host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "x"])
def test_others_are_not(host):
    assert not is_ours(host, ("our.example",))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "10.0.0.7:8000"}, 200),
        ({}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 403),
    ],
)
def test_a_server_for_programs_answers_no_page(headers, status):
    assert answers(headers) == (status, 1008 if status == 403 else None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer the-key"}, 200),
        ({"authorization": "Bearer the-ke"}, 401),
        ({"authorization": "the-key"}, 401),
        ({}, 401),
        ({"authorization": "Bearer the-key", "origin": "http://localhost:8000"}, 403),
    ],
)
def test_a_server_with_a_key_answers_those_that_bring_it(headers, status, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    assert answers(headers) == (status, 1008 if status != 200 else None)


def answers(headers):
    """The status of the answer to a request with these headers, and the code that closes such a WebSocket."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "server": ("10.0.0.7", 8000)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(ServerGuard(app)(scope, None, send))
    asyncio.run(ServerGuard(app)({**scope, "type": "websocket"}, None, send))
    return sent[0]["status"], sent[-1].get("code")
