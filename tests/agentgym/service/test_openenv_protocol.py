"""OpenEnv's frames, answered by our side of the protocol: each kind, each error, and whatever else may come."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openenv_envs import AsyncSum, Counter, Sum
from service_harness import new_slot

from agentgym.core.messages import user
from agentgym.service.openenv.handler import OpenEnvHandler
from agentgym.service.openenv.routes import Line
from agentgym.service.protocol.frames import Refused
from agentgym.service.server import slots
from agentgym.service.worker.protocol_handler import CallRunner


def handler(env):
    return OpenEnvHandler(env, CallRunner(new_slot()), SimpleNamespace(id="s-1"))


def ask(session, kind, *data, **more):
    answer = session.answer(json.dumps({"type": kind, **({"data": data[0]} if data else {}), **more}))
    return None if answer is None else json.loads(answer)


def rpc(session, method, **params):
    frame = ask(session, "mcp", {"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
    assert frame["type"] == "mcp"
    assert frame["data"]["id"] == 7
    return frame["data"]


def error_of(frame):
    assert frame["type"] == "error"
    return frame["data"]["code"]


@pytest.mark.parametrize("kind", [Sum, AsyncSum])
def test_an_episode_goes_as_it_goes_here(kind):
    local = Sum()
    local.init(Sum.default_tasks()[3])
    opening, info = local.reset(seed=11)
    session = handler(kind())
    begun = ask(session, "reset", {"seed": 11, "episode_id": "e-1", "split": "train", "index": 3, "unknown": 1})
    metadata = {"task_id": "train-3", "info": info}
    assert begun == {
        "type": "observation",
        "data": {
            "observation": {"messages": opening, "metadata": metadata},
            "reward": None,
            "done": False,
            "metadata": metadata,
        },
    }
    for reply in ("1", "6"):
        messages, reward, terminated, _, info = local.step(reply)
        data = ask(session, "step", {"message": reply})["data"]
        assert data["observation"]["messages"] == messages
        assert (data["reward"], data["done"], data["metadata"]) == (reward, terminated, {"info": info})
    assert ask(session, "state")["data"] == {
        "episode_id": "e-1",
        "step_count": 2,
        "task_id": "train-3",
        "reward": 1.0,
        "done": True,
    }
    assert ask(session, "close") is None
    assert session.ended


def test_a_reset_draws_the_task_that_a_reset_here_draws():
    local, session = Sum(), handler(Sum())
    for seed in range(8):
        local.reset(seed=seed)
        assert ask(session, "reset", {"seed": seed})["data"]["metadata"]["task_id"] == local.task.id


@pytest.mark.parametrize("seed", ["7", 7.0, " 7.0 ", "+7", "07"])
def test_a_seed_is_whatever_openenv_takes_for_a_whole_number(seed):
    session = handler(Sum())
    plain = ask(session, "reset", {"seed": 7})["data"]["metadata"]["task_id"]
    assert ask(session, "reset", {"seed": seed})["data"]["metadata"]["task_id"] == plain
    drawn = ask(session, "reset", {"seed": True})["data"]["metadata"]["task_id"]
    assert ask(session, "reset", {"seed": 1})["data"]["metadata"]["task_id"] == drawn


def test_tasks_are_read_within_the_time_of_a_reset():
    slot, states = new_slot(), []

    class Looking(Sum):
        @classmethod
        def default_tasks(cls, split="train"):
            states.append(slot.look()[0])
            return super().default_tasks(split)

    session = OpenEnvHandler(Looking(), CallRunner(slot), SimpleNamespace(id="s-1"))
    for data in ({"seed": 1}, {"split": "test", "index": 0}):
        assert ask(session, "reset", data)["type"] == "observation"
    assert states == [slots.RESET] * 2


def test_an_episode_id_has_at_most_255_characters():
    session = handler(Sum())
    assert ask(session, "reset", {"episode_id": "e" * 255})["type"] == "observation"
    refused = ask(session, "reset", {"episode_id": "f" * 256})["data"]
    assert [error["msg"] for error in refused["errors"]] == ["String should have at most 255 characters"]
    assert ask(session, "state")["data"]["episode_id"] == "e" * 255


def test_a_task_may_be_given_whole():
    session = handler(Sum())
    task = {"id": "mine", "messages": [user("1 + 2?")], "answer": "3"}
    assert ask(session, "reset", {"task": task})["data"]["observation"]["messages"] == task["messages"]
    assert ask(session, "step", {"message": {"role": "assistant", "content": "3"}})["data"]["reward"] == 1.0


def test_turns_that_are_used_up_are_told_as_truncated():
    session = handler(Sum())
    ask(session, "reset")
    *_, last = [ask(session, "step", {"message": "x"})["data"] for _ in range(3)]
    assert last["done"]
    assert last["metadata"]["truncated"] is True


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[1]", "VALIDATION_ERROR"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "state", "id": 1}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 7.5}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "7.5"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "-7"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": [7]}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1e30}}', "VALIDATION_ERROR"),
        (f'{{"type": "reset", "data": {{"episode_id": "{"e" * 256}"}}}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"index": 99}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"split": "none"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task": {"no": "id"}}}', "VALIDATION_ERROR"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": 3}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": {"role": "user", "content": ""}}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "a", "more": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"type": "call_tool"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "raise"}}', "EXECUTION_ERROR"),
    ],
)
def test_what_is_wrong_is_told_and_the_session_goes_on(text, code):
    session = handler(Sum())
    ask(session, "reset", {"split": "train", "index": 0})
    told = json.loads(session.answer(text))
    assert error_of(told) == code
    if code == "VALIDATION_ERROR":
        [problem] = told["data"]["errors"]
        assert set(problem) == {"type", "loc", "msg", "input"}
    assert ask(session, "step", {"message": "0"})["data"]["reward"] == 1.0


def test_a_step_before_a_reset_and_after_the_end_is_an_error():
    session = handler(Sum())
    assert error_of(ask(session, "step", {"message": "1"})) == "EXECUTION_ERROR"
    ask(session, "reset", {"index": 0})
    ask(session, "step", {"message": "0"})
    assert error_of(ask(session, "step", {"message": "0"})) == "EXECUTION_ERROR"


def test_what_json_has_no_number_for_is_null():
    session = handler(Sum())
    ask(session, "reset")
    assert ask(session, "step", {"message": "nan"})["data"]["reward"] is None


def test_half_a_surrogate_pair_goes_there_and_back():
    session = handler(Sum())
    ask(session, "reset")
    answer = session.answer('{"type": "step", "data": {"message": "\\ud83d"}}')
    answer.encode("ascii")
    assert json.loads(answer)["data"]["observation"]["messages"] == [user("not \ud83d")]


# ---- tools


def test_tools_are_called_by_steps():
    session = handler(Counter())
    metadata = ask(session, "reset", {"index": 0})["data"]["metadata"]
    assert metadata["tools"] == Counter().tools
    listed = ask(session, "step", {"type": "list_tools"})["data"]
    assert [tool["name"] for tool in listed["observation"]["tools"]] == ["add", "total_of"]
    assert (listed["reward"], listed["done"]) == (None, False)
    call = {"type": "call_tool", "tool_name": "add", "arguments": {"number": 3}, "metadata": {}}
    data = ask(session, "step", call)["data"]
    assert data["observation"]["result"]["data"] == "3"
    assert data["observation"]["error"] is None
    assert (data["reward"], data["done"]) == (1.0, True)
    assert ask(session, "state")["data"]["step_count"] == 1


def test_a_tool_that_is_not_there_takes_a_step_and_is_told():
    session = handler(Counter())
    ask(session, "reset", {"index": 0})
    observation = ask(session, "step", {"type": "call_tool", "tool_name": "nope"})["data"]["observation"]
    assert observation["error"]["error_type"] == "tool_not_found"
    assert observation["result"] is None


def test_the_methods_of_mcp():
    session = handler(Counter())
    tools = rpc(session, "tools/list")["result"]["tools"]
    assert tools[0]["inputSchema"]["required"] == ["number"]
    result = rpc(session, "tools/call", name="add", arguments={"number": 1})["result"]  # which begins an episode
    assert (result["data"], result["is_error"]) == ("1", False)
    assert result["meta"]["done"] is False
    assert rpc(session, "tools/call", name="add", arguments={"number": "x"})["result"]["is_error"]
    assert rpc(session, "tools/call", name="nope")["error"]["code"] == -32602
    assert rpc(session, "tools/call")["error"]["code"] == -32602
    assert rpc(session, "initialize")["error"]["code"] == -32601
    assert rpc(session, "openenv/session/create")["result"] == {"session_id": "s-1"}
    assert rpc(session, "openenv/session/close", session_id="s-1")["error"]["code"] == -32600
    assert ask(session, "mcp", {"method": "tools/list"})["data"]["error"]["code"] == -32600


def test_a_key_error_of_an_environment_is_its_own():
    class Broken(Counter):
        def step(self, action):
            raise KeyError("wait")

    error = rpc(handler(Broken()), "tools/call", name="add", arguments={"number": 1})["error"]
    assert (error["code"], "wait" in error["message"]) == (-32603, True)


def test_a_line_that_is_closed_while_an_answer_is_awaited_wakes_who_awaits_it():
    async def closed():
        ours, theirs = socket.socketpair()
        line = Line(ours, "s-1", "")
        with theirs:
            asking = asyncio.create_task(line.ask("{}"))
            await asyncio.sleep(0.05)
            line.close()
            with pytest.raises(Refused, match="ended"):
                await asyncio.wait_for(asking, 10)
        return ours.fileno()

    assert asyncio.run(closed()) == -1, "its descriptor is free"


def test_an_environment_without_tools_has_none():
    assert rpc(handler(Sum()), "tools/list")["result"] == {"tools": []}


def test_a_server_that_ends_begins_no_episode():
    session = handler(Sum())
    ask(session, "reset")
    session.draining = True
    assert ask(session, "step", {"message": "x"})["type"] == "observation"
    assert error_of(ask(session, "reset")) == "SESSION_ERROR"
    assert session.ended
    by_tool = handler(Counter())
    by_tool.draining = True
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"by": 1}}}
    assert "DRAINING" in ask(by_tool, "mcp", call)["data"]["error"]["message"]
    assert by_tool.ended


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["type", "data", "message", "seed", "index", "split", "task", "tool_name", "arguments", "method"]
)
kinds = st.sampled_from(["reset", "step", "state", "mcp", "call_tool", "list_tools", "tools/call"])
bodies = st.dictionaries(names, values | kinds | st.dictionaries(names, values | kinds, max_size=4), max_size=5)
frames = st.fixed_dictionaries({"type": kinds}, optional={"data": bodies | values}) | bodies | values


@settings(max_examples=200, deadline=None)
@given(st.lists(frames.map(json.dumps) | st.text(max_size=40), max_size=5))
def test_whatever_comes_is_answered_by_one_frame(texts):
    for env in (Sum(), Counter()):
        session = handler(env)
        for text in texts:
            answer = json.loads(session.answer(text))
            assert answer["type"] in ("observation", "state", "mcp", "error")
            assert answer.keys() == {"type", "data"}
        assert ask(session, "reset", {"seed": 1})["type"] == "observation"
