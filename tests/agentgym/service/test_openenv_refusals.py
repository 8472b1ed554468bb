"""What OpenEnv's own client raises when our server refuses it, ends its session or loses its worker, and what becomes of the slot."""

import asyncio
import json
import os
import subprocess

import pytest
from aiohttp import WSMsgType
from openenv_package import FOREIGN, clean_environment, openenv_python
from served import certificate
from service_harness import SECONDS, browsing, serving, session, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOKEN = "a-token-of-16-letters"
MCP = {"jsonrpc": "2.0", "id": 1}


@pytest.fixture(scope="module")
def python(pytestconfig):
    return openenv_python(pytestconfig.cache)


class Talking:
    """The client in a process of its own."""

    def __init__(self, python, *talks, **more):
        self.command = [str(python), str(FOREIGN / "talk.py"), json.dumps(talks)]
        self.environment = clean_environment(**more)

    async def __aenter__(self):
        pipe = subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=pipe, stderr=pipe, env=self.environment
        )
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def said(self, text):
        """Wait until it has come so far."""
        assert (await asyncio.wait_for(self.process.stdout.readline(), SECONDS)).decode().strip() == text

    async def found(self):
        out, error = await asyncio.wait_for(self.process.communicate(), 2 * SECONDS)
        assert self.process.returncode == 0, error.decode()[-3000:]
        return json.loads(out.decode().splitlines()[-1])


async def talked(python, *talks, **more):
    async with Talking(python, *talks, **more) as talking:
        return await talking.found()


def step(text):
    return ["step", {"message": text}]


RESET = ["reset", {"seed": 1}]


def raised(found):
    return found["raised"], found["message"]


def test_what_ends_a_session_is_told_with_its_code_and_the_next_reset_is_another_session(python):
    limits = {"step_seconds": 1.0, "message_bytes": 5000}

    async def play():
        async with serving(limits=limits) as server:
            told = await talked(
                python,
                {"url": server.url, "calls": [RESET, step("hang"), step("echo a"), RESET, step("echo b")]},
                {"url": server.url, "calls": [RESET, step("abort"), RESET]},
                {"url": server.url, "calls": [RESET, step("x" * 9000), RESET]},
                {"url": server.url, "calls": [RESET, step("raise it"), step("echo c")]},
            )
            await until(lambda: not server.sessions.open, "every slot was free")
            return told

    hung, aborted, large, raising = asyncio.run(play())
    assert raised(hung[1]) == (
        "RuntimeError",
        "Server error: step took longer than its limit of 1 s (DEADLINE) (code: SESSION_ERROR)",
    )
    assert hung[2]["message"].startswith("Server error: Faulty: no episode is running; call reset() before step()")
    assert "messages" in hung[4]
    assert "(WORKER_DIED) (code: SESSION_ERROR)" in aborted[1]["message"]
    assert "killed by signal 9" in aborted[1]["message"] or "SIGKILL" in aborted[1]["message"]
    assert "messages" in aborted[2]
    assert "a message has at most 5,000 bytes (TOO_LARGE) (code: SESSION_ERROR)" in large[1]["message"]
    assert "messages" in large[2]
    assert "(code: EXECUTION_ERROR)" in raising[1]["message"]
    assert "messages" in raising[2]


def test_an_environment_that_cannot_be_made_is_a_factory_error(python):
    async def play():
        async with serving(envs={"no": "service_faults:NotMade"}) as server:
            return await talked(python, {"url": server.url, "calls": [RESET]})

    [[found]] = asyncio.run(play())
    assert "making the environment failed" in found["message"]
    assert "(code: FACTORY_ERROR)" in found["message"]


def test_a_token_is_sent_as_a_header_and_without_it_the_connection_is_refused(python):
    async def play():
        async with serving(tokens={"trainer": TOKEN}) as server:
            right, wrong = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, "another-of-16-letters"))
            return await talked(
                python,
                {"url": server.url, "calls": [RESET]},
                {"url": server.url, "headers": wrong, "calls": [RESET]},
                {"url": server.url, "headers": right, "calls": [RESET, step("echo a")]},
            )

    [none], [wrong], right = asyncio.run(play())
    for found in (none, wrong):
        assert found["raised"] == "ConnectionError"
        assert "HTTP 401" in found["message"]
    assert "messages" in right[1]


def test_tls_with_a_certificate_of_ones_own(python, tmp_path):
    tls = certificate(tmp_path)

    async def play():
        async with serving(**tls) as server:
            assert server.url.startswith("https://")
            talk = {"url": server.url, "calls": [RESET, step("echo a"), ["state", None]]}
            [[refused, *_]] = await talked(python, talk)
            [found] = await talked(python, talk, SSL_CERT_FILE=tls["cert"])
            return refused, found

    refused, found = asyncio.run(play())
    assert refused["raised"] == "ConnectionError"
    assert "CERTIFICATE_VERIFY_FAILED" in refused["message"]
    assert found[2]["step_count"] == 1


def test_a_server_that_drains_lets_the_episode_end_and_begins_none(python, tmp_path):
    go_on = tmp_path / "go on"
    go_on.touch()

    async def play():
        async with serving(drain_seconds=SECONDS) as server:
            calls = [RESET, ["say", "begun"], ["await file", str(go_on)], step("echo a"), RESET]
            talks = [{"url": server.url, "calls": calls}, {"url": server.url, "calls": [RESET]}]
            async with Talking(python, *talks) as talking:
                await talking.said("begun")
                draining = asyncio.create_task(server.drain())
                await until(lambda: server.sessions.draining)
                go_on.write_text("yes")
                found = await talking.found()
                await asyncio.wait_for(draining, SECONDS)
                return found

    [first, [second]] = asyncio.run(play())
    assert "messages" in first[3]
    assert first[4]["message"].endswith("(DRAINING) (code: SESSION_ERROR)")
    assert second["message"] == "Server error: the server is ending (code: CAPACITY_REACHED)"


def test_a_client_that_gives_up_a_step_leaves_its_slot_to_the_next_before_the_step_would_end(python, tmp_path):
    never = str(tmp_path / "never")

    async def play():
        async with serving(max_sessions=1, limits={"close_seconds": 0.5, "step_seconds": 600.0}) as server:
            talking = {
                "url": server.url,
                "timeout": 0.5,
                "calls": [RESET, step(f"until {never}"), ["disconnect", None]],
            }
            [given_up] = await talked(python, talking)
            await until(lambda: not server.sessions.open, "the slot was free")
            async with browsing(server) as http, http.ws_connect("/ws") as ws:
                return given_up, await frame(ws, "reset", seed=1)

    given_up, after = asyncio.run(play())
    assert given_up[1]["raised"] == "TimeoutError"
    assert after["type"] == "observation"


# ---- sessions that are made over HTTP


async def rpc(http, method, **params):
    async with http.post("/mcp", json={**MCP, "method": method, "params": params}) as answer:
        assert answer.status == 200
        return await answer.json()


async def attached(http, session_id):
    return await http.ws_connect(f"/ws?session_id={session_id}")


async def frame(ws, type, **data):
    await ws.send_json({"type": type, "data": data} if data else {"type": type})
    return await asyncio.wait_for(ws.receive_json(), SECONDS)


def test_a_session_of_http_has_one_websocket_at_a_time_and_outlives_it():
    async def play():
        async with serving() as server, browsing(server) as http:
            name = (await rpc(http, "openenv/session/create"))["result"]["session_id"]
            first = await attached(http, name)
            await frame(first, "reset", seed=1)
            second = await asyncio.wait_for((await attached(http, name)).receive_json(), SECONDS)
            unknown = await asyncio.wait_for((await attached(http, "nobody")).receive_json(), SECONDS)
            await first.send_json({"type": "close"})
            await asyncio.wait_for(first.receive(), SECONDS)
            third = await attached(http, name)
            state = await frame(third, "state")
            closing = (await rpc(http, "openenv/session/close", session_id=name))["result"]
            refused = (await rpc(http, "tools/list", session_id=name))["error"]
            assert len(server.sessions.open) == 1
            await third.close()
            await until(lambda: not server.sessions.open, "the session ended")
            gone = (await rpc(http, "tools/list", session_id=name))["error"]
            return second, unknown, state, closing, refused, gone, name

    second, unknown, state, closing, refused, gone, name = asyncio.run(play())
    assert second["data"] == {"message": f"session {name} already has an attached WebSocket", "code": "SESSION_ERROR"}
    assert unknown["data"]["code"] == "SESSION_ERROR"
    assert state["data"]["episode_id"] is not None
    assert closing == {"session_id": name, "closed": False, "closing": True}
    assert refused["message"] == gone["message"] == f"Unknown session_id: {name}"


def test_a_session_of_http_belongs_to_the_token_that_made_it():
    tokens = {"one": TOKEN, "two": "another-of-16-letters"}

    async def play():
        async with (
            serving(tokens=tokens) as server,
            browsing(server, tokens["one"]) as mine,
            browsing(server, tokens["two"]) as other,
        ):
            name = (await rpc(mine, "openenv/session/create"))["result"]["session_id"]
            assert "Unknown session_id" in (await rpc(other, "tools/list", session_id=name))["error"]["message"]
            told = await asyncio.wait_for((await attached(other, name)).receive_json(), SECONDS)
            assert told["data"]["code"] == "SESSION_ERROR"
            assert "result" in await rpc(mine, "tools/list", session_id=name)

    asyncio.run(play())


def test_sessions_of_http_that_nobody_closes_end_and_nothing_of_them_is_kept():
    async def play():
        async with serving(max_sessions=3, limits={"idle_seconds": 0.3}) as server, browsing(server) as http:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                made = [await rpc(http, "openenv/session/create") for _ in range(3)]
                await until(lambda: not server.sessions.open, "they ended")
            late = await rpc(http, "tools/list", session_id=made[0]["result"]["session_id"])
            return late["error"], len(os.listdir("/proc/self/fd")) - before

    late, more = asyncio.run(play())
    assert "nothing was asked for 0.3 s (IDLE)" in late["message"]
    assert more < 10  # three sessions and the connections of this client, not fifteen


def test_a_full_server_says_so_over_http_too():
    async def play():
        async with serving(max_sessions=1) as server, browsing(server) as http:
            await rpc(http, "openenv/session/create")
            async with http.post("/reset", json={}) as answer:
                return await rpc(http, "openenv/session/create"), answer.status, answer.headers["Retry-After"]

    full, status, retry = asyncio.run(play())
    assert full["error"]["code"] == -32000
    assert full["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
    assert (status, retry) == (503, "1")


def test_a_websocket_of_mcp_is_a_session():
    async def play():
        async with serving(envs={"count": "openenv_envs:Counter"}) as server, browsing(server) as http:
            ws = await http.ws_connect("/mcp")
            call = {**MCP, "method": "tools/call", "params": {"name": "add", "arguments": {"number": 1}}}
            told = []
            for _ in range(2):
                await ws.send_json(call)
                told.append((await asyncio.wait_for(ws.receive_json(), SECONDS))["result"]["data"])
            await ws.send_str("{")
            broken = await asyncio.wait_for(ws.receive_json(), SECONDS)
            await ws.close()
            await until(lambda: not server.sessions.open, "the session ended")
            return told, broken

    told, broken = asyncio.run(play())
    assert told == ["1", "2"]
    assert (broken["id"], broken["error"]["code"]) == (None, -32700)


@pytest.mark.parametrize("path", ["/mcp", "/ws"])
def test_a_websocket_on_which_nothing_is_said_is_closed(path):
    async def play():
        async with serving(limits={"idle_seconds": 0.3}) as server, browsing(server) as http:
            silent = await http.ws_connect(path)
            while (await asyncio.wait_for(silent.receive(), SECONDS)).type is WSMsgType.TEXT:
                pass
            name = (await rpc(http, "openenv/session/create"))["result"]["session_id"]
            silent = await attached(http, name)
            await asyncio.wait_for(silent.receive(), SECONDS)
            await until(lambda: not server.sessions.open, "the slots were free")

    asyncio.run(play())


def test_pings_are_answered_on_an_attached_websocket_during_a_step(tmp_path):
    """By a client like OpenEnv's, which gives a connection up whose pings stay without an answer."""
    go_on = tmp_path / "go on"

    async def play():
        async with serving() as server, browsing(server) as http:
            name = (await rpc(http, "openenv/session/create"))["result"]["session_id"]
            ws = await http.ws_connect(f"/ws?session_id={name}", autoping=False)
            await frame(ws, "reset", seed=1)
            await ws.send_json({"type": "step", "data": {"message": f"until {go_on}"}})
            await ws.ping(b"are you there")
            pong = await asyncio.wait_for(ws.receive(), SECONDS)
            go_on.touch()
            return pong, await asyncio.wait_for(ws.receive_json(), SECONDS)

    pong, answer = asyncio.run(play())
    assert (pong.type, pong.data) == (WSMsgType.PONG, b"are you there")
    assert answer["type"] == "observation"


def test_a_client_that_leaves_its_attached_websocket_during_a_step_is_no_error_of_the_server(tmp_path, caplog):
    go_on = tmp_path / "go on"

    async def play():
        async with serving() as server, browsing(server) as http:
            name = (await rpc(http, "openenv/session/create"))["result"]["session_id"]
            ws = await attached(http, name)
            await frame(ws, "reset", seed=1)
            await ws.send_json({"type": "step", "data": {"message": f"until {go_on}"}})
            ws._response.connection.transport.abort()
            closing = (await rpc(http, "openenv/session/close", session_id=name))["result"]
            go_on.touch()
            await until(lambda: not server.sessions.open, "the slot was free")
            return closing

    assert asyncio.run(play())["closing"] is True
    assert not caplog.records


def test_clients_that_leave_during_a_call_over_http_take_no_slot_for_longer_than_a_step_may_take(tmp_path):
    never = str(tmp_path / "never")

    async def play():
        async with serving(limits={"step_seconds": 1.0, "close_seconds": 0.5}) as server:
            async with browsing(server) as http:
                left = asyncio.create_task(http.post("/step", json={"action": {"message": f"until {never}"}}))
                await until(lambda: server.sessions.open, "it has begun")
                left.cancel()
            await until(lambda: not server.sessions.open, "the slot was free")
            async with session(server) as client:
                assert "result" in await client.ask("reset", seed=1)

    asyncio.run(play())
