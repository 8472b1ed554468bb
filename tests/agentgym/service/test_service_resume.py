"""Coming back: a token is spent when the client speaks on the connection that it opened, and not before."""

import asyncio

import pytest
from service_harness import UPGRADE, Client, browsing, new_slot, serving, until

from agentgym.service.server import slots
from agentgym.service.server.session import ServedSession


@pytest.fixture
def session():
    return ServedSession("id", "env", "agentgym/1", "", 0, new_slot(), resumable=True)


def serve_connection(session, messages=0):
    """What the worker writes as it serves one more connection."""
    words = session.words.words
    words[slots.REQUESTS_THEN] = words[slots.REQUESTS]
    words[slots.CONNECTION] += 1
    words[slots.REQUESTS] += messages


def secret_of(session):
    return session.new_token().partition(".")[2]


def test_a_token_is_good_until_the_client_speaks_on_its_connection(session):
    first = secret_of(session)
    serve_connection(session, messages=3)
    assert session.claim(first)
    assert session.claim(first)  # the handshake failed: no connection was opened
    second = secret_of(session)
    assert session.claim(first)  # opened, and the worker has not come to it
    third = secret_of(session)
    serve_connection(session)
    serve_connection(session)
    assert not session.claim(second)  # its hello was lost, and newer ones were given out
    assert session.claim(first)  # opened and served, but nothing was heard
    fourth = secret_of(session)
    serve_connection(session, messages=1)
    assert not any(session.claim(used) for used in (first, second, third, "", "x"))
    assert session.claim(fourth)


def test_a_token_of_a_session_that_ends_is_refused(session):
    token = secret_of(session)
    session.ending = ("IDLE", "why")
    assert not session.claim(token)


def test_a_hello_that_is_lost_does_not_lose_the_session(tmp_path):
    notes = tmp_path / "notes"

    async def play():
        async with serving() as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            step = await client.step(f"note {notes}")
            token = client.hello["resume"]
            await client.drop()
            for _ in range(3):  # each time the connection breaks before the client has read a word
                client.ws = await http.ws_connect(client.path, headers={"X-Agentgym-Resume": token})
                await client.drop()
            await client.connect(resume=token)
            newest = client.hello["resume"]
            await client.ws.send_json({"id": client.id, "call": "step", "action": f"note {notes}"})
            assert await client.receive() == step
            for used in (token, client.hello["session"]):
                refused = await http.get(client.path, params={"resume": used}, headers=UPGRADE)
                assert (refused.status, (await refused.json())["error"]["code"]) == (409, "RESUME_REFUSED")
            await client.drop()
            await until(lambda: server.sessions.states()["detached"] == 1)
            await client.connect(resume=newest)
            assert (await client.step("echo"))["result"][0][0]["content"] == "2: "
            await client.ws.close()

    asyncio.run(play())
    assert notes.read_text() == "1\n"
