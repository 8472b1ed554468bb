"""What a server tells of itself: /metrics as Prometheus reads it, /schema as what is really said, /ready and /health."""

import asyncio
import json
import random

import pytest
from service_harness import UPGRADE, Client, browsing, serving, session, tally, until

from agentgym.service.protocol import schemas
from agentgym.service.protocol.frames import CODES, rng_to_json
from agentgym.service.server.slots import TIME_BOUNDS, Slot, make_memory, map_memory

jsonschema = pytest.importorskip("jsonschema")
parser = pytest.importorskip("prometheus_client.parser")


async def metrics_of(http):
    """Samples by name and labels."""
    answer = await http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = list(parser.text_string_to_metric_families(await answer.text()))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metrics_are_counted_for_each_environment():
    envs = {"a": "service_faults:Faulty", 'quo"te': "service_faults:Faulty"}

    async def play():
        limits = {"step_seconds": 1.0, "resume_seconds": 30.0}
        async with serving(envs=envs, limits=limits, max_sessions=2) as server, browsing(server) as http:
            client = await (await Client(http, "a").connect()).begin()
            other = await (await Client(http, 'quo"te').connect()).begin()
            assert (await http.get("/envs/a/session", headers=UPGRADE)).status == 503
            assert (await client.step("echo"))["result"]
            assert (await client.step("sleep 0.3"))["result"]
            assert (await client.step("raise it"))["error"]
            await client.ask("jump")
            client.id -= 1  # it did not count
            await client.drop()
            await client.connect(resume=client.hello["resume"])
            client.id = client.hello["last"]
            assert (await client.step("end"))["result"][2]
            assert (await other.step("hang"))["error"]["code"] == "DEADLINE"
            await client.ws.close()
            await other.ws.close()
            await until(lambda: not server.sessions.open)
            found = await metrics_of(http)

            def of(name, env="a", **labels):
                return found[f"agentgym_{name}", *sorted({"env": env, **labels}.items())]

            assert of("sessions_opened_total") == of("sessions_opened_total", 'quo"te') == 1
            assert of("sessions_resumed_total") == 1
            assert of("sessions_ended_total", reason="closed") == 1
            assert of("sessions_ended_total", 'quo"te', reason="DEADLINE") == 1
            assert of("errors_total", 'quo"te', code="DEADLINE") == 1
            assert of("errors_total", code="ENV_ERROR") == of("errors_total", code="UNKNOWN_CALL") == 1
            assert (of("steps_total"), of("episodes_total"), of("env_sessions")) == (3, 1, 0)
            assert of("step_seconds_count") == of("step_seconds_bucket", le="+Inf") == 3
            assert of("step_seconds_bucket", le="0.25") == 2
            assert of("step_seconds_sum") >= 0.3
            assert found["agentgym_refused_total", ("reason", "CAPACITY")] == 1
            assert found["agentgym_sessions",] == 0
            assert found["agentgym_slot_return_seconds_count",] == 1

    asyncio.run(play())


@pytest.mark.parametrize("bound", TIME_BOUNDS)
def test_a_step_is_counted_below_its_bound(bound):
    slot = Slot(map_memory(make_memory(1)), 0)
    slot.count_time("step", bound * 1000)
    slot.count_time("step", bound * 1000 + 1)
    place = TIME_BOUNDS.index(bound)
    assert [place for place, count in enumerate(slot.times("step")[1]) if count] == [place, place + 1]


def test_a_slot_has_room_for_every_code():
    slots = map_memory(make_memory(2))
    for code in CODES:
        Slot(slots, 0).count_error(code)
    assert Slot(slots, 0).errors == dict.fromkeys(CODES, 1)
    assert sum(Slot(slots, 0).times("step")[1]) == sum(Slot(slots, 1).errors.values()) == 0


def checker(document, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator({"$defs": document["$defs"], **schema})


def test_all_frames_fit_the_schema():
    async def play():
        async with serving() as server, browsing(server) as http:
            document = await (await http.get("/schema")).json()
            jsonschema.Draft202012Validator.check_schema(document)
            told, said = document["session"], []
            client = await Client(http).connect()
            checker(document, told["hello"]).validate(client.hello)
            asks, answers = checker(document, told["client"]), checker(document, told["server"])
            for call, fields in [
                ("init", {"task": {"id": "a", "messages": [{"role": "user", "content": "x"}]}}),
                ("reset", {"seed": 1}),
                ("step", {"action": "echo hi"}),
                ("step", {"action": {"role": "assistant", "content": "echo hi"}}),
                ("reset", {}),
                ("tools", {}),
                ("expert_action", {}),
                ("random_action", {"rng": rng_to_json(random.Random(1))}),
                ("step", {"action": "raise it"}),
            ]:
                client.id += 1
                request = {"id": client.id, "call": call, **fields}
                asks.validate(request)
                await client.ws.send_json(request)
                said.append(await client.receive())
                answers.validate(said[-1])
            await client.ws.send_json([{"id": client.id + 1, "call": "tools"}, {"id": client.id + 2, "call": "jump"}])
            said.append(await client.receive())
            answers.validate(said[-1])
            for wrong in ({}, {"id": 0, "call": "tools"}, {"id": 1, "call": "step"}, {"id": 1, "call": "jump"}, []):
                assert not asks.is_valid(wrong)
            for wrong in ({"id": 1}, {"id": 1, "result": [1, 2]}, {"id": 1, "error": {"code": "WHAT"}}):
                assert not answers.is_valid(wrong)
            assert document["codes"]["DEADLINE"]["close"] == 4408
            await client.ws.close()

    asyncio.run(play())


def test_http_answers_fit_the_schema():
    async def look():
        async with serving() as server, browsing(server) as http:
            document = await (await http.get("/schema")).json()
            assert {"action", "observation", "state"} <= document.keys()  # OpenEnv's, of the first environment
            for path, status in [
                ("/health", "200"),
                ("/ready", "200"),
                ("/envs", "200"),
                ("/envs/{id}", "200"),
                ("/envs/{id}/schema", "200"),
                ("/envs/{id}/tasks", "200"),
            ]:
                answer = await http.get(path.replace("{id}", "faulty"))
                assert answer.status == int(status)
                checker(document, document["http"][path][status]).validate(await answer.json())
            for path in ("/envs/no", "/envs/no/schema", "/envs/faulty/tasks?split=no", "/nowhere"):
                answer = await http.get(path)
                assert answer.status == 404
                checker(document, document["http"]["refusals"]).validate(await answer.json())
            server.sessions.draining = True
            answer = await http.get("/ready")
            assert answer.status == 503
            checker(document, document["http"]["/ready"]["503"]).validate(told := await answer.json())
            assert told == {"ready": False, "draining": True, "sessions": 0, "max_sessions": 256}

    asyncio.run(look())


def test_an_environment_tells_its_actions_and_tools():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    schema = schemas.of_env({"id": "a", "description": "b", "tools": [tool], "methods": [], "max_turns": 3})
    action = checker(schema, schema["action"])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for good in ("text", {"role": "assistant", "content": None, "tool_calls": [call]}):
        action.validate(good)
    other = {**call, "function": {"name": "jump", "arguments": "{}"}}
    for bad in (1, {"role": "user"}, {"role": "assistant", "tool_calls": [other]}):
        assert not action.is_valid(bad)

    async def look():
        async with serving() as server, browsing(server) as http:
            told = await (await http.get("/envs/faulty/schema")).json()
            assert told["title"] == "faulty"
            assert told["methods"] == ["expert_action", "random_action", "cut_off"]
            checker(told, told["action"]).validate("echo")

    asyncio.run(look())


def test_a_session_of_another_environment_is_not_come_back_to():
    async def play():
        envs = {"a": "service_faults:Faulty", "b": "service_faults:Faulty"}
        async with serving(envs=envs) as server, session(server, "a") as client, browsing(server) as http:
            path = f"/envs/b/session?resume={client.hello['resume']}"
            answer = await http.get(path, headers=UPGRADE)
            assert (answer.status, json.loads(await answer.text())["error"]["code"]) == (409, "RESUME_REFUSED")

    asyncio.run(play())


def test_errors_told_to_clients_of_openenv_are_counted():
    async def play():
        async with serving() as server, browsing(server) as http:
            client = Client(http)
            client.ws = await http.ws_connect("/faulty/ws")
            for text in ("nonsense", '{"type": "jump"}', '{"type": "reset", "more": 1}'):
                await client.ws.send_str(text)
                assert (await client.receive())["type"] == "error"
            await client.ws.close()
            await until(lambda: not server.sessions.open)
            assert tally(server).errors == {"BAD_FRAME": 1, "UNKNOWN_CALL": 1, "BAD_REQUEST": 1}

    asyncio.run(play())
