"""The record: on disk before an answer leaves, whole after any cut, and an episode made of it again."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import tempfile
from pathlib import Path

import openai
import pytest
from gateway_cases import HELLO, TOOL, Agent, agent_of, lines_of, post, run, serving, shape
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyModel

from agentgym.gateway import Gateway, Limits
from agentgym.storage.durable import DurableLines, NotWritten


def test_lines_that_come_while_others_are_written_are_written_together(tmp_path, monkeypatch):
    synced = []

    def sync(file, real=os.fdatasync):
        synced.append(os.fstat(file).st_size)
        real(file)

    monkeypatch.setattr(os, "fdatasync", sync)

    async def go():
        lines = DurableLines(tmp_path / "lines")
        await asyncio.gather(*(lines.write({"n": n}) for n in range(100)))
        await lines.close()
        return len(synced)

    assert run(go()) <= 3
    lines = DurableLines(tmp_path / "lines")
    assert [line["n"] for line in lines.read()] == list(range(100))


def test_what_cannot_be_written_is_not_in_the_file_and_later_lines_are(tmp_path):
    async def go():
        lines = DurableLines(tmp_path / "lines")
        await lines.write({"n": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # a part of the next line can be written
        try:
            with pytest.raises(NotWritten, match="cannot be written: File too large"):
                await lines.write({"long": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await lines.write({"n": 2}, {"n": 3})
        await lines.close()
        return (tmp_path / "lines").read_text()

    assert run(go()) == '{"n":1}\n{"n":2}\n{"n":3}\n'


@contextlib.contextmanager
def small_disk(place, kilobytes):
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_on_a_full_disk_nothing_is_answered_that_is_not_recorded_and_once_there_is_room_it_goes_on(tmp_path):
    async def go():
        answered = []
        with small_disk(tmp_path / "disk", 32):
            async with agent_of(tmp_path / "disk") as agent:

                async def ask_on():
                    for turn in range(1000):
                        answered.append((await agent.chat([{"role": "user", "content": f"hello {turn}"}])).id)

                with pytest.raises(openai.InternalServerError, match="No space left on device") as caught:
                    await ask_on()
                assert caught.value.status_code == 507
                assert len(answered) == len(agent.calls) > 5
                turns = agent.episode.turns
                with pytest.raises(openai.APIError, match="No space left"):
                    async for _ in await agent.chat(stream=True):
                        pass
                assert agent.episode.turns == turns, "what failed does not count"
                subprocess.run(["mount", "-o", "remount,size=1m", tmp_path / "disk"], check=True)
                answered.append((await agent.chat()).id)
                key = agent.key
            async with serving(tmp_path / "disk") as again:
                assert [f"chatcmpl-{id}" for id in again.episodes["e"].by_id] == answered
                agent = Agent(again, again.episodes["e"], key)
                await agent.chat([{"role": "user", "content": "still there"}])
                await agent.close()

    run(go())


# ---- a restart


async def some_calls(agent):
    messages = list(HELLO)
    for turn in range(3):
        answer = (await agent.chat(messages, tools=[TOOL])).choices[0].message.model_dump(exclude_none=True)
        messages.append(answer)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in answer.get("tool_calls", ())
        ]
        messages += [*results, {"role": "user", "content": f"on {turn}"}]
    await agent.chat(messages, n=2)
    await agent.openai.responses.create(model="toy", input="hi", instructions="be brief")
    return messages


def test_a_gateway_started_again_knows_episodes_keys_limits_tools_and_calls(tmp_path):
    async def go():
        async with agent_of(tmp_path, limits=Limits(turns=8)) as agent:
            await some_calls(agent)
            await agent.gateway.reward("e", 0.5, {"solved": 1.0})
            before, key, told = shape(agent.episode), agent.key, agent.episode.to_json()
        async with serving(tmp_path) as again:
            episode = again.episodes["e"]
            assert shape(episode) == before
            assert episode.to_json() == told
            assert [tools[0]["function"]["name"] for tools in again.schemas.values()] == ["add"]
            agent = Agent(again, episode, key)
            await agent.chat([{"role": "user", "content": "one more"}])
            await agent.chat([{"role": "user", "content": "and one"}])
            cut = await agent.chat([{"role": "user", "content": "too many"}])
            assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "")
            await again.end("e", "done")
            await agent.close()
        async with serving(tmp_path) as again:
            assert (again.episodes["e"].ended, again.episodes["e"].complete) == ("done", True)
            again.forget("e")
        async with serving(tmp_path) as again:
            assert again.episodes == {}
        assert key not in (tmp_path / "calls.jsonl").read_text(), "keys are kept as digests"

    run(go())


def test_what_a_killed_gateway_has_left_of_its_socket_is_removed_by_the_next(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(tempfile, "tempdir", place)

        async def go():
            async with serving(tmp_path / "lives", local=True) as lives:
                left = Path(place) / "agentgym-gateway-killed"
                left.mkdir()
                with socket.socket(socket.AF_UNIX) as killed:
                    killed.bind(str(left / "socket"))
                async with serving(tmp_path / "next", local=True) as gateway:
                    assert {Path(lives.socket).parent, Path(gateway.socket).parent} == set(Path(place).iterdir())

        run(go())


def test_only_one_gateway_writes_a_record(tmp_path):
    async def go():
        async with serving(tmp_path):
            with pytest.raises(ValueError, match="is being written by another process"):
                await Gateway(ToyModel(), tmp_path).__aenter__()

    run(go())


def test_what_is_no_record_is_refused_with_its_line(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            await agent.chat()
        record = tmp_path / "calls.jsonl"
        record.write_text(record.read_text() + '{"episode": "unknown", "end": "x"}\n')
        with pytest.raises(ValueError, match=r"calls\.jsonl:4: not a line of a record: KeyError"):
            await Gateway(ToyModel(), tmp_path).__aenter__()

    run(go())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The bytes of a record of some calls, and of each of its lines the episode so far."""
    folder = tmp_path_factory.mktemp("record")

    async def go():
        async with agent_of(folder) as agent:
            await some_calls(agent)
            await agent.gateway.reward("e", 1.0)
            await agent.gateway.end("e")

    run(go())
    whole = (folder / "calls.jsonl").read_bytes()
    states = {}
    for lines in range(len(whole.splitlines()) + 1):
        part = b"".join(whole.splitlines(keepends=True)[:lines])
        states[part] = asyncio.run(state_of(folder.with_name(f"lines-{lines}"), part))
    return whole, states


async def state_of(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "calls.jsonl").write_bytes(content)
    async with Gateway(ToyModel(), folder) as gateway:
        return {id: (episode.to_json(), shape(episode)) for id, episode in gateway.episodes.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_wherever_a_record_is_cut_off_the_episode_is_that_of_its_whole_lines(recorded, tmp_path_factory, data):
    whole, states = recorded
    cut = whole[: round(data.draw(st.floats(0, 1)) * len(whole))]  # a share: times make lines longer and shorter
    lines = cut[: cut.rfind(b"\n") + 1]
    if cut + b"\n" in states:  # the line lacks only its end
        lines = cut + b"\n"
    folder = tmp_path_factory.mktemp("cut")
    assert asyncio.run(state_of(folder, cut)) == states[lines]
    assert (folder / "calls.jsonl").read_bytes() == lines


def test_a_call_is_recorded_with_all_that_a_trainer_needs(tmp_path):
    async def go():
        model = ToyModel()
        model.version = 3
        async with agent_of(tmp_path, model) as agent:
            await agent.chat(tools=[TOOL], max_tokens=30, top_p=0.5, user="me")
        opened, schemas, line, delivered = lines_of(tmp_path)
        assert opened["open"] == line["episode"] == "e"
        assert schemas["schemas"] == [TOOL]
        (call,) = line["calls"]
        assert call["tools"] == schemas["tools"]
        assert (call["new"], call["sampled"]) == model.log[0][1:]
        assert len(call["logprobs"]) == len(call["sampled"])
        assert call["versions"] == [[3, len(call["sampled"])]]
        assert call["asked"]["settings"] == {"max_tokens": 30, "top_p": 0.5}
        assert call["asked"]["used"].keys() == {"max_tokens", "top_p", "seed"}
        assert call["asked"]["messages"] == HELLO
        assert call["answer"]["usage"]["completion_tokens"] == len(call["sampled"])
        assert line["exchange"]["began"] <= line["ended"]
        assert len(delivered["delivered"]) == 1

    run(go())


def test_a_message_setting_or_tool_is_refused_that_goes_too_deep_to_be_read_from_the_record_again(tmp_path):
    def nested(levels):
        value = 1
        for _ in range(levels - 1):  # the message is the first
            value = [value]
        return {"role": "user", "content": "x", "more": value}

    async def go():
        async with agent_of(tmp_path) as agent:
            url = f"{agent.gateway.url}/v1/chat/completions"
            status, told = await post(url, {"messages": [*HELLO, nested(101)]}, agent.key)
            assert (status, agent.calls) == (400, [])
            assert told["error"]["message"] == "a message has at most 100 lists and objects inside each other"
            status, _ = await post(url, {"messages": [*HELLO, nested(100)]}, agent.key)
            assert (status, len(agent.calls)) == (200, 1)
            tool = {"type": "function", "function": {"name": "add", "parameters": nested(99)}}
            for kind, more in (("setting", {"more": nested(101)}), ("tool", {"tools": [tool]})):
                status, told = await post(url, {"messages": HELLO, **more}, agent.key)
                assert status == 400, "a failure of the engine would not be the agent's"
                assert told["error"]["message"] == f"a {kind} has at most 100 lists and objects inside each other"

    run(go())
