"""What a server logs of sessions that end badly, of environments' errors and of refused tokens; and what it measures of itself."""

import asyncio
import json
import logging

import pytest
from service_harness import SECONDS, Client, browsing, serving, session, until

from agentgym import __version__
from agentgym.service.server.events import EnvErrors

TOKEN = "t" * 20


def logged(caplog, event):
    """The events of a kind that the server has logged."""
    lines = [record.getMessage() for record in caplog.records if record.name == "agentgym.service"]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [one for one in found if one["event"] == event]


def written(capfd, event):
    """The events of a kind that workers have written."""
    found = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    return [one for one in found if one["event"] == event]


class TestEnds:
    @pytest.mark.parametrize(
        ("action", "cause", "more"),
        [
            ("hang", "deadline", {"code": "DEADLINE", "message": "step took longer than its limit of 0.5 s"}),
            ("abort", "signal", {"code": "WORKER_DIED", "signal": "SIGKILL"}),
            ("exit 3", "exit", {"code": "WORKER_DIED", "exit_code": 3}),
            ("eat 400", "memory", {"code": "OUT_OF_MEMORY"}),
        ],
    )
    def test_a_session_that_ends_badly_is_logged_in_one_line(self, action, cause, more, caplog):
        from agentgym.service.server.bounds import Bounds

        async def play():
            limits = {"step_seconds": 0.5 if action == "hang" else 60.0}
            settings = {"tokens": {"ann": TOKEN}, "limits": limits, "bounds": Bounds(200 << 20)}
            async with serving(**settings) as server, session(server, token=TOKEN) as client:
                await client.begin()
                await client.step(action)
                await until(lambda: not server.sessions.open)
                return client.hello["session"], client.pid

        id, pid = asyncio.run(play())
        [said] = logged(caplog, "session_ended")
        told = {"env": "faulty", "session": id, "token": "ann", "pid": pid, "cause": cause, **more}
        assert {key: said[key] for key in told} == told
        assert said["seconds"] > 0
        assert said["time"].startswith("20")

    def test_an_environment_that_cannot_be_made_is_logged_with_its_traceback(self, caplog, capfd):
        async def play():
            envs = {"faulty": "service_faults:NotMade"}
            async with serving(envs=envs) as server, browsing(server) as http:
                ws = await http.ws_connect("/envs/faulty/session")
                await asyncio.wait_for(ws.receive(), SECONDS)
                await until(lambda: not server.sessions.open)
                await ws.close()

        asyncio.run(play())
        [said] = logged(caplog, "session_ended")
        assert (said["cause"], said["code"]) == ("exception", "ENV_ERROR")
        [error] = written(capfd, "env_error")
        assert (error["call"], error["error"]) == ("init", "OSError: there is no such database")
        assert 'raise OSError("there is no such database")' in error["traceback"]

    def test_one_that_ends_well_is_not(self, caplog):
        async def play():
            async with serving() as server:
                async with session(server) as client:
                    await client.begin()
                    await client.ask("close")
                await until(lambda: not server.sessions.open)

        asyncio.run(play())
        assert not logged(caplog, "session_ended")


class TestEnvErrors:
    def test_what_an_environment_raises_is_logged_and_the_session_goes_on(self, capfd):
        async def play():
            async with serving(tokens={"ann": TOKEN}) as server, session(server, token=TOKEN) as client:
                await client.begin()
                assert (await client.step("raise the roof"))["error"]["code"] == "ENV_ERROR"
                assert (await client.step("echo on"))["result"]
                return client.hello["session"], client.pid

        id, pid = asyncio.run(play())
        [said] = written(capfd, "env_error")
        told = {"env": "faulty", "session": id, "token": "ann", "pid": pid, "call": "step", "left_out": 0}
        assert {key: said[key] for key in told} == told
        assert said["error"] == "KeyError: 'the roof'"
        assert "service_faults.py" in said["traceback"]
        assert "raise KeyError(rest)" in said["traceback"]

    def test_of_many_ten_a_minute_are_logged(self, capfd):
        errors = EnvErrors("faulty", "s", "")
        for number in range(25):
            errors.log("step", ValueError(number))
        first = written(capfd, "env_error")
        errors.since -= 60.0  # a minute later
        errors.log("step", ValueError("later"))
        assert [one["error"] for one in first] == [f"ValueError: {number}" for number in range(10)]
        assert [one["left_out"] for one in written(capfd, "env_error")] == [15]

    def test_a_line_goes_into_a_pipe_as_a_whole(self, capfd):
        def deep(left):
            return deep(left - 1) if left else 1 / 0

        with pytest.raises(ZeroDivisionError) as caught:
            deep(200)
        EnvErrors("faulty", "s", "").log("step", caught.value)
        text = capfd.readouterr().err
        assert len(text.encode()) <= 4096
        assert json.loads(text)["traceback"].endswith("ZeroDivisionError: division by zero\n")


def test_refused_tokens_are_counted_and_logged_now_and_then(caplog):
    async def knock():
        async with serving(tokens={"ann": TOKEN}) as server, browsing(server) as http, browsing(server, TOKEN) as ann:
            for number in range(20):
                headers = {"Authorization": f"Bearer {'x' * 20}"} if number else {}
                assert (await http.get("/envs", headers=headers)).status == 401
            assert len(logged(caplog, "unauthorized")) == 1
            text = await (await ann.get("/metrics")).text()
            assert "agentgym_unauthorized_total 20\n" in text

    asyncio.run(knock())
    first, last = logged(caplog, "unauthorized")
    assert (first["requests"], first["peer"], first["path"], first["why"]) == (1, "127.0.0.1", "/envs", "no token")
    assert (last["requests"], last["why"]) == (19, "wrong token"), "what was left is said at the end"
    assert "x" * 20 not in caplog.text


def test_a_server_measures_itself():
    async def play():
        async with serving(workers=1) as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            await client.ask("reset")
            found = {}
            for line in (await (await http.get("/metrics")).text()).splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name.removeprefix("agentgym_")] = float(value)
            await client.ws.close()
            return found

    found = asyncio.run(play())
    [build] = [name for name in found if name.startswith("build_info")]
    assert f'version="{__version__}"' in build
    assert found['open_seconds_count{env="faulty"}'] == 1
    assert 0 < found['open_seconds_sum{env="faulty"}'] < SECONDS
    assert found['reset_seconds_count{env="faulty"}'] == 2
    assert found['reset_seconds_bucket{env="faulty",le="+Inf"}'] == 2
    assert found["event_loop_lag_seconds_count"] == found['event_loop_lag_seconds_bucket{le="+Inf"}'] > 0
    assert found['memory_bytes{of="server"}'] > 10 << 20
    assert found['memory_bytes{of="sessions",env="faulty"}'] > 1 << 19
    assert found['connections{state="busy"}'] == 1
    assert found["connections_limit"] > 512


@pytest.fixture(autouse=True)
def all_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="agentgym.service")
