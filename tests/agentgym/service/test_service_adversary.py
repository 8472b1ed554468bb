"""What an attacker would try next, and what an environment could reach that it has no business with."""

import asyncio
import json
import math

import pytest
from chaos_harness import SECONDS, Raw
from service_harness import browsing, handshake, serving, session, until

from agentgym.service.server import slots
from agentgym.service.server.forks import Fork
from agentgym.service.server.settings import ServeSettings
from agentgym.service.worker.websocket import TEXT, encoded

ENVS = {"nosy": "adversary_envs:Nosy"}
SESSION = "/envs/nosy/session"
TOKEN = "ann-" + "a" * 28


def run(scenario, **settings):
    async def serve():
        async with serving(envs=ENVS, **settings) as server:
            await scenario(server)

    asyncio.run(serve())


@pytest.mark.parametrize("origin", ["http://evil.example:8000", "http://[", "null", "http://"])
def test_a_page_may_not_ask_even_where_its_name_leads_here(origin):
    """Its owner can make any name mean this machine, and then Origin and Host are the same."""

    async def knock(server):
        raw = await Raw.open(server.port, SESSION, f"Origin: {origin}\r\n")
        assert raw.status == 403
        await raw.close()
        async with browsing(server) as http:
            headers = {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}
            async with http.post("/reset", json={}, headers=headers) as answer:
                assert answer.status == 403
            headers = {"Origin": server.url}
            async with http.post("/reset", json={}, headers=headers) as answer:
                assert answer.status == 200

    run(knock)


def test_with_a_token_a_page_of_the_servers_own_name_may_ask():
    async def knock(server):
        headers = {"Origin": "https://envs.example", "Host": "envs.example"}
        async with browsing(server, TOKEN) as http, http.post("/reset", json={}, headers=headers) as answer:
            assert answer.status == 200

    run(knock, tokens={"ann": TOKEN})


def test_what_comes_right_behind_a_handshake_is_not_lost_without_a_word():
    async def knock(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(handshake(SESSION) + encoded(TEXT, b'{"id": 1, "call": "tools"}', masked=True))
        answer = await asyncio.wait_for(reader.read(), SECONDS)  # to the end: it closes
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert answer.count(b"HTTP/1.1") == 1  # the frame was not read as another request
        writer.close()
        assert not server.sessions.open

    run(knock)


def test_a_body_is_utf8_whatever_its_header_says(caplog):
    """Python decodes punycode in a time that grows with the square: a message of the largest size took the server hours."""

    async def ask(server):
        async with browsing(server) as http:
            for charset in ("punycode", "bogus", "rot13", "utf-8"):
                headers = {"Content-Type": f"application/json; charset={charset}"}
                for path, refused in (("/reset", 422), ("/nosy/num_tasks", 422), ("/mcp", 200)):
                    async with http.post(path, data=b"\xff" + b"a" * 100, headers=headers) as answer:
                        assert answer.status == refused, (path, charset)
                    async with http.post(path, data=b'{"split": "train"}', headers=headers) as answer:
                        assert answer.status == 200, (path, charset)
            flood = b"a" * (4 << 20) + b"-" + b"b" * (3 << 20)
            headers = {"Content-Type": "application/json; charset=punycode"}
            async with http.post("/reset", data=flood, headers=headers) as answer:
                assert answer.status == 422

    run(ask)
    assert not caplog.records


def test_no_depth_of_nesting_is_an_error_of_the_server(caplog):
    """There are depths that can just be read, and not be written any more."""

    async def ask(server):
        raw = await Raw.open(server.port, "/nosy/ws")
        async with browsing(server) as http:
            for depth in range(880, 1000):
                deep = f'{{"seed": {"[" * depth + "]" * depth}}}'
                raw.send(f'{{"type": "reset", "data": {deep}}}')
                _, said = await raw.frame()  # which may be too deep to be read here
                assert b'"INVALID_JSON"' in said or b'"VALIDATION_ERROR"' in said, depth
                async with http.post("/nosy/num_tasks", data=deep) as answer:
                    assert answer.status in (400, 422), depth
        await raw.close()

    run(ask)
    assert not caplog.records


def test_a_resume_token_opens_no_session_through_another_door():
    async def knock(server):
        async with session(server, "nosy") as client:
            raw = await Raw.open(server.port, f"/nosy/ws?resume={client.hello['resume']}")
            texts, _ = await raw.ended()
            assert "resume token is wrong" in texts[0]
            await raw.close()
            assert "result" in await client.ask("tools")

    run(knock)


def test_what_an_environment_starts_inherits_no_connection():
    async def look(server):
        async with session(server, "nosy") as client:
            await client.ask("init", task={"id": "a"})
            await client.ask("reset")
            assert (await client.step("open"))["result"][0][-1]["content"] == ""
            await client.drop()
            await until(lambda: server.sessions.states()["detached"] == 1)
            await client.connect(resume=client.hello["resume"])  # which comes to the process in another way
            assert (await client.step("open"))["result"][0][-1]["content"] == ""

    run(look)


def test_words_that_an_environment_wrote_over_cost_no_slot_and_no_metrics():
    """Every process of a session can write to the memory that all share; a stray pointer may."""

    async def look(server):
        async with session(server, "nosy") as client, browsing(server) as http:
            [one] = server.sessions.open.values()
            one.words.words[slots._STATE] = one.words.words[slots.WHY] = 2**60
            async with http.get("/metrics") as answer:
                assert answer.status == 200
            await client.ask("close")
            await until(lambda: not server.sessions.open)

    run(look)


def test_odd_values_and_seeds_arrive_as_they_are():
    async def play(server):
        async with session(server, "nosy") as client:
            await client.ask("init", task={"id": "ä/../\u2028\x00"})
            answer = await client.ask("reset", seed=2**63 + 5)
            assert answer["result"]["info"] == {"seed": 2**63 + 5}
            for seed in (-1, 1.5, "x", float("inf")):
                assert (await client.ask("reset", seed=seed))["error"]["fatal"] is False
            _, reward, terminated, truncated, info = (await client.step("odd"))["result"]
            assert math.isnan(reward)
            assert (terminated, truncated) == (False, False)
            told = {"inf": math.inf, "few": [0, 1, 2], "one": 0.5, "bytes": str(b"\xff"), "big": 2**70}
            assert told.items() <= info.items()

    run(play)


def test_tokens_are_not_in_what_is_printed_of_the_settings():
    assert TOKEN not in repr(ServeSettings({"nosy": None}, tokens={"ann": TOKEN}))


def test_the_zygote_is_told_of_ten_thousand_processes_that_died():
    """More than a packet of any other message holds."""

    async def look(server):
        server.forks.forks.update({f"gone {pid}": Fork(pid) for pid in range(4_000_000, 4_010_000)})
        assert len(json.dumps(list(server.forks.pids()[1].values()))) > 1 << 16
        first = server.forks.pids()[0]
        server.forks.process.terminate()
        await until(lambda: server.forks.pids()[0] != first and server.forks.ready)
        async with session(server, "nosy") as client:
            assert "result" in await client.ask("tools")

    run(look)
