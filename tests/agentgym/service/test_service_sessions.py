"""One session of a served environment: what it answers, how it comes back, what of its faults reaches nobody else."""

import asyncio
import random

import pytest
from service_harness import UPGRADE, Client, alive, browsing, serving, session, tally, until

from agentgym.service.protocol.frames import rng_of_json, rng_to_json


def test_a_session_plays_episodes_and_ends_with_close(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_CLOSED", str(tmp_path / "closed"))

    async def play():
        async with serving() as server, session(server) as client:
            assert client.hello["protocol"] == 1
            assert client.hello["env"]["methods"] == ["expert_action", "random_action", "cut_off"]
            assert await client.ask("init", task={"id": "a"}) == {"id": 1, "result": {}}
            assert (await client.ask("reset", seed=7))["result"]["observation"] == [
                {"role": "user", "content": "task a"}
            ]
            for turn in (1, 2):
                action = "echo hi" if turn == 1 else {"role": "assistant", "content": "echo hi"}
                step = (await client.step(action))["result"]
                assert step == [[{"role": "user", "content": f"{turn}: hi"}], 0.25, False, False, {"success": False}]
            assert (await client.step("end"))["result"][2] is True
            assert (await client.step("echo"))["error"]["code"] == "ENV_ERROR"
            assert (await client.ask("reset"))["result"]["info"]["pid"]
            assert (await client.ask("expert_action"))["result"] == {"action": "echo 0"}
            assert await client.ask("close") == {"id": 9, "result": {}}
            assert await client.ended() == 1000
            await until(lambda: not server.sessions.open)
            assert tally(server).counters["steps"] == 3
            assert tally(server).counters["episodes"] == 1
            assert tally(server).ended == {"closed": 1}

    asyncio.run(play())
    assert (tmp_path / "closed").read_text().count("closed") == 2  # the call, and the worker's own


def test_reset_draws_a_task_and_tells_it():
    async def play():
        async with serving() as server, session(server) as client:
            drawn = (await client.ask("reset", seed=5))["result"]["task"]
            again = (await client.ask("reset", seed=5))["result"]
            assert again["task"] == drawn
            assert again["observation"][0]["content"] == f"task {drawn['id']}"
            bound = (await client.ask("reset", options={"task": {"id": "mine"}}))["result"]
            assert bound["observation"][0]["content"] == "task mine"

    asyncio.run(play())


def test_a_list_of_requests_is_answered_by_a_list():
    async def play():
        async with serving() as server, session(server) as client:
            steps = [{"id": n, "call": "step", "action": f"echo {n}"} for n in range(3, 30)]
            begin = [{"id": 1, "call": "init", "task": {"id": "a"}}, {"id": 2, "call": "reset"}]
            await client.ws.send_json(begin + steps)
            answers = await client.receive()
            assert [answer["id"] for answer in answers] == list(range(1, 30))
            assert answers[-1]["result"][0][0]["content"] == "27: 29"
            await client.ws.send_json(begin + steps)
            assert await client.receive() == answers  # kept, none run again

    asyncio.run(play())


def test_random_actions_are_those_of_the_same_generator_here():
    async def play():
        async with serving() as server, session(server) as client:
            await client.begin()
            rng = random.Random(3)
            answer = (await client.ask("random_action", rng=rng_to_json(rng)))["result"]
            assert answer["action"] == f"echo {rng.random()} {rng.gauss(0, 1)}"
            assert rng_of_json(answer["rng"]).getstate() == rng.getstate()

    asyncio.run(play())


def test_bad_messages_are_answered_and_the_session_goes_on():
    async def play():
        async with serving() as server, session(server) as client:
            for text, code in [
                ("nonsense", "BAD_FRAME"),
                ("[]", "BAD_REQUEST"),
                ("7", "BAD_REQUEST"),
                ('{"id": 2, "call": "step"}', "BAD_REQUEST"),
                ('{"id": 1, "call": "jump"}', "UNKNOWN_CALL"),
                ('{"id": 2, "call": "init", "task": {"name": "x"}}', "BAD_REQUEST"),
                ('{"id": 3, "call": "reset", "options": 1}', "BAD_REQUEST"),
                ('{"id": 4, "call": "step"}', "BAD_REQUEST"),
                ('{"id": 5, "call": "step", "action": "x"}', "ENV_ERROR"),
                ('{"id": 6, "call": "random_action", "rng": 1}', "BAD_REQUEST"),
            ]:
                await client.ws.send_str(text)
                error = (await client.receive())["error"]
                assert (error["code"], error["fatal"]) == (code, False), text
            client.id = 6
            await client.begin()
            for word in ("raise", "quit"):
                error = (await client.step(f"{word} it"))["error"]
                assert error["code"] == "ENV_ERROR"
                assert "it" in error["message"]
            assert (await client.step("echo still here"))["result"][0][0]["content"] == "3: still here"

    asyncio.run(play())


def test_async_environments_run_in_one_task():
    async def play():
        async with serving(envs={"later": "service_faults:Later"}) as server, session(server, "later") as client:
            await client.begin()
            assert (await client.step("echo hi"))["result"][0][0]["content"] == "1: hi"

    asyncio.run(play())


def test_a_client_comes_back_and_no_step_is_run_twice(tmp_path):
    notes, go = tmp_path / "notes", tmp_path / "go"

    async def play():
        async with serving() as server, browsing(server) as http:
            client = await (await Client(http).connect()).begin()
            await client.send("step", action=f"until {go}")
            await until(lambda: server.sessions.states()["step"] == 1)
            await client.drop()  # in the middle of a step
            first = client.hello["resume"]
            back = asyncio.create_task(client.connect(resume=first))
            await until(lambda: tally(server).resumed == 1)
            go.touch()
            await back
            assert client.hello["session"] in server.sessions.open
            await client.ws.send_json({"id": client.id, "call": "step", "action": f"until {go}"})
            assert (await client.receive())["result"][0][0]["content"].startswith("1: ")
            assert client.hello["last"] == client.id  # it was run before the hello could be said
            step = await client.step(f"note {notes}")
            await client.drop()
            await until(lambda: server.sessions.states()["detached"] == 1)
            for token in (first, "x", client.hello["session"], client.hello["resume"] + "x"):
                refused = await http.get("/envs/faulty/session", params={"resume": token}, headers=UPGRADE)
                assert (refused.status, (await refused.json())["error"]["code"]) == (409, "RESUME_REFUSED")
            await client.connect(resume=client.hello["resume"])
            await client.ws.send_json({"id": client.id, "call": "step", "action": f"note {notes}"})
            assert await client.receive() == step
            assert (await client.step("echo"))["result"][0][0]["content"] == "3: "
            assert tally(server).resumed == 2
            await client.ws.close()

    asyncio.run(play())
    assert notes.read_text() == "2\n"


@pytest.mark.parametrize(
    ("action", "how"), [("exit 7", "exit code 7"), ("exit 0", "exit code 0"), ("abort", "signal 9")]
)
def test_a_worker_that_dies_is_told_and_its_slot_returns(action, how):
    async def play():
        async with serving(max_sessions=2) as server, session(server) as other:
            await other.begin()
            async with session(server) as client:
                await client.begin()
                answer = await client.step(action)
                assert answer["error"]["code"] == "WORKER_DIED"
                assert answer["error"]["fatal"]
                assert how in answer["error"]["message"]
                assert await client.ended() == 4500
                await until(lambda: len(server.sessions.open) == 1)
                assert not alive(client.pid)
            assert (await other.step("echo hi"))["result"][0][0]["content"] == "1: hi"

    asyncio.run(play())


def test_what_is_no_exception_is_an_error_of_its_call_and_the_session_goes_on():
    async def play():
        async with serving() as server, session(server) as client:
            await client.begin()
            answer = await client.step("panic")
            assert answer["error"]["code"] == "ENV_ERROR"
            assert "Panic(<its __str__ raises ValueError>) was raised by the call" in answer["error"]["message"]
            assert (await client.step("echo hi"))["result"][0][0]["content"].endswith(": hi")

    asyncio.run(play())


def test_an_environment_that_cannot_be_made_says_why():
    async def play():
        async with serving(envs={"no": "service_faults:NotMade"}) as server, browsing(server) as http:
            client = await Client(http, "no").connect()
            assert "no such database" in client.hello["error"]["message"]
            assert client.hello["error"]["fatal"]
            await client.ws.close()
            await until(lambda: not server.sessions.open)
            assert tally(server).ended == {"ENV_ERROR": 1}

    asyncio.run(play())
