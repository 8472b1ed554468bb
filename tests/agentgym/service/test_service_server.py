"""The server: who may come in, what it tells, capacity, TLS, its end."""

import asyncio
import ssl

import aiohttp
import pytest
from served import certificate
from service_harness import UPGRADE, Client, browsing, serving, session, until

from agentgym import cli
from agentgym.core.registration import spec
from agentgym.service.server.env_server import serve
from agentgym.service.server.forks import ZygoteFailed
from agentgym.service.server.settings import ServeSettings

SESSION = "/envs/faulty/session"


async def refused(http, path, **kw):
    async with http.get(path, **kw) as answer:
        return answer.status, (await answer.json())["error"]["code"]


def test_environments_and_tasks_are_listed_by_page():
    async def look():
        async with serving() as server, browsing(server) as http:
            [about] = (await (await http.get("/envs")).json())["envs"]
            assert about["id"] == "faulty"
            assert {name: split["size"] for name, split in about["splits"].items()} == {"train": 2500, "test": 2500}
            page = await (await http.get("/envs/faulty/tasks?split=test&start=10&stop=12")).json()
            assert [task["id"] for task in page["tasks"]] == ["test-10", "test-11"]
            page = await (await http.get("/envs/faulty/tasks?start=2000")).json()
            assert (page["size"], len(page["tasks"]), page["stop"]) == (2500, 500, 2500)
            page = await (await http.get("/envs/faulty/tasks")).json()
            assert (len(page["tasks"]), page["stop"]) == (1000, 1000)
            page = await (await http.get("/envs/faulty/tasks?start=9999")).json()
            assert page["tasks"] == []
            for path in ("/envs/faulty/tasks?split=no", "/envs/no/tasks", "/envs/no/session", "/nowhere"):
                assert (await refused(http, path))[0] == 404, path
            assert await refused(http, "/envs/faulty/tasks?start=-1") == (400, "BAD_REQUEST")
            assert (await http.get("/health")).status == (await http.get("/ready")).status == 200

    asyncio.run(look())


def test_one_environment_that_fails_does_not_hide_the_others():
    names = ("Faulty", "NotMade", "Leaving", "Toolless", "OpenedByInit")

    async def look():
        async with serving(envs={name: f"service_faults:{name}" for name in names}) as server, browsing(server) as http:
            return {env["id"]: env for env in (await (await http.get("/envs")).json())["envs"]}

    told = asyncio.run(look())
    assert told["NotMade"]["error"] == "OSError: there is no such database"
    assert told["Leaving"]["error"] == "SystemExit: it needs a licence"
    assert told["Toolless"]["error"] == "LookupError: there is no list of tools"
    assert told["OpenedByInit"]["tools"] == told["Faulty"]["tools"] == []


def test_only_a_websocket_handshake_opens_a_session():
    async def knock():
        async with serving() as server, browsing(server) as http:
            assert await refused(http, SESSION) == (426, "UPGRADE_REQUIRED")
            for name, value in [("Sec-WebSocket-Version", "8"), ("Sec-WebSocket-Key", "x"), ("Upgrade", "h2c")]:
                assert await refused(http, SESSION, headers={**UPGRADE, name: value}) == (426, "UPGRADE_REQUIRED")
            other = {**UPGRADE, "Origin": "https://elsewhere.example"}
            assert await refused(http, SESSION, headers=other) == (403, "FORBIDDEN")
            assert not server.sessions.open

    asyncio.run(knock())


def test_a_token_is_wanted_everywhere_but_for_health():
    tokens = {"ann": "a" * 20, "bob": "b" * 20}

    async def knock():
        async with serving(tokens=tokens, max_sessions_per_token=1) as server:
            async with browsing(server) as http:
                for path in (
                    SESSION,
                    "/nowhere",
                ):  # test_service_chaos_refusals.py has all others, and all wrong tokens
                    assert await refused(http, path) == (401, "UNAUTHORIZED")
                assert (await http.get("/health")).status == 200
            async with session(server, token="a" * 20) as client:
                async with browsing(server, "a" * 20) as http:
                    assert (await http.get("/metrics")).status == 200
                    assert await refused(http, SESSION, headers=UPGRADE) == (429, "TOO_MANY")
                async with browsing(server, "b" * 20) as http:  # bob may have one of his own, and not ann's
                    stolen = await refused(http, SESSION, headers=UPGRADE, params={"resume": client.hello["resume"]})
                    assert stolen == (409, "RESUME_REFUSED")
                    bob = await Client(http).connect()
                    await bob.ws.close()

    asyncio.run(knock())


def test_at_capacity_it_says_when_to_come_again():
    async def knock():
        async with serving(max_sessions=1) as server, session(server) as client:
            await client.begin()
            await until(lambda: server.sessions.states()["waiting"] == 1)
            async with browsing(server) as http:
                async with http.get(SESSION, headers=UPGRADE) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "CAPACITY")
                    assert int(answer.headers["Retry-After"]) > 0
                text = await (await http.get("/metrics")).text()
            await client.ask("close")
            await until(lambda: not server.sessions.open)
            async with session(server) as again:
                await again.begin()
            assert "agentgym_sessions 1\n" in text
            assert 'agentgym_refused_total{reason="CAPACITY"} 1\n' in text
            assert 'agentgym_worker_states{state="waiting"} 1\n' in text

    asyncio.run(knock())


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"))


def test_over_tls_it_is_the_same(tls):
    async def play():
        async with serving(**tls, limits={"step_seconds": 1.0}) as server:
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=tls["cert"]))
            async with aiohttp.ClientSession(server.url, connector=connector) as http:
                client = await (await Client(http).connect()).begin()
                text = "x" * 3_000_000
                assert (await client.step(f"echo {text}"))["result"][0][0]["content"] == f"1: {text}"
                await client.drop()
                await until(lambda: server.sessions.states()["detached"] == 1)
                await client.connect(resume=client.hello["resume"])
                assert (await client.step("hang"))["error"]["code"] == "DEADLINE"
                assert await client.ended() == 4408
                await client.ws.close()

    asyncio.run(play())


def test_connections_that_shake_no_hands_make_room_too(tls):
    async def knock():
        async with serving(**tls, tokens={"ann": "a" * 20}, max_sessions=1) as server:
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=tls["cert"]))
            most, silent = server.connections.most, []
            async with aiohttp.ClientSession(server.url, connector=connector) as http:
                for _ in range(most + 20):
                    silent.append(await asyncio.open_connection("127.0.0.1", server.port))
                await until(lambda: server.connections.cut["capacity"] >= 20)
                assert (await http.get("/health")).status == 200
                assert len(server.connections) <= most
            for _, writer in silent:
                writer.transport.abort()
            await until(lambda: not len(server.connections))

    asyncio.run(knock())


def test_it_does_not_listen_to_other_machines_without_a_token():
    with pytest.raises(ValueError, match="token"):
        ServeSettings(envs={"faulty": spec("service_faults:Faulty")}, host="0.0.0.0")


def test_what_cannot_be_imported_cannot_be_served():
    async def start():
        await serve(ServeSettings(envs={"no": spec("service_faults:Nothing")}, port=0))

    with pytest.raises(ZygoteFailed, match="Nothing"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--host", "0.0.0.0"], "--token-file"),
        (["--port", "70000"], "--port"),
        (["--step-timeout", "0"], "--step-timeout"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--workers", "-1"], "--workers"),
        (["--max-message", "0"], "--max-message"),
        (["frozen_lake", "--kwargs", '{"frozen_lake": {"view": "nowhere"}}'], "view must be one of map, near"),
        (["--tls-cert", "nowhere.pem"], "--tls-cert nowhere.pem"),
        (["--tls-cert", __file__, "--port", "0"], "--tls-key"),
        (["--tls-key", "k"], "--tls-cert"),
        (["--allow-host", "http://our.example"], "--allow-host"),
        (["--token-file", "nowhere"], "nowhere"),
        (["service_faults:Faulty"], "twice"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, wrong, capsys):
    assert cli.main(["serve", "service_faults:Faulty", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert wrong in said
    assert "\n" not in said
