"""OpenAI's protocols by OpenAI's own client: chat completions, completions, Responses."""

import asyncio

import openai
import pytest
from gateway_cases import HELLO, TOOL, agent_of, exact, run
from toy_model import ToyModel, decode, encode

FLAT_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def talk(agent, turns, stream, **settings):
    """A conversation in which the agent sends back what it was answered, tools are answered, and the user asks on."""
    messages = list(HELLO)
    for turn in range(turns):
        answer = in_order(await (streamed if stream else whole)(agent, messages, tools=[TOOL], **settings))
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"})
        if not answer.get("tool_calls"):
            messages.append({"role": "user", "content": f"go on {turn}"})
    return messages


def in_order(message):
    """A message with its fields in one order: a request's seed is of its bytes."""
    calls = [
        {"id": call["id"], "type": "function", "function": dict(sorted(call["function"].items()))}
        for call in message.get("tool_calls", ())
    ]
    return dict(sorted(message.items())) | ({"tool_calls": calls} if calls else {})


async def whole(agent, messages, **settings):
    answer = await agent.chat(messages, **settings)
    return answer.choices[0].message.model_dump(exclude_none=True)


async def streamed(agent, messages, **settings):
    message = {"role": "assistant", "content": ""}
    async for chunk in await agent.chat(messages, stream=True, **settings):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        if thought := getattr(delta, "reasoning_content", None):
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        for call in delta.tool_calls or ():
            message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return message


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_sequence_of_exact_tokens(tmp_path, stream):
    async def go():
        async with agent_of(tmp_path) as agent:
            said = await talk(agent, 6, stream)
            exact(agent)
            assert [call.parent and call.parent.number for call in agent.calls] == [None, 0, 1, 2, 3, 4]
            share = agent.episode.share()
            assert share["sampled"] == share["trainable"] == sum(len(ids) for _, _, ids in agent.gateway.backend.log)
            assert share["forks"] == {}
            assert any("tool_calls" in message for message in said)
            assert any("reasoning_content" in message for message in said)
            return said

    assert run(go()) == run(go_again(tmp_path, stream)), "streamed or not, the same seeds say the same"


async def go_again(folder, stream):
    async with agent_of(folder / "again") as agent:
        return await talk(agent, 6, not stream)


def test_text_is_streamed_while_it_is_sampled_and_the_end_comes_after_the_call_is_on_disk(tmp_path):
    async def go():
        model = ToyModel(pause=0.02)
        async with agent_of(tmp_path, model) as agent:
            on_disk = []
            async for chunk in await agent.chat(stream=True, stream_options={"include_usage": True}):
                reason = chunk.choices[0].finish_reason if chunk.choices else "usage"
                on_disk.append((reason, "sampled" in (tmp_path / "calls.jsonl").read_text()))
            assert (None, False) in on_disk
            assert all(written for reason, written in on_disk if reason is not None)
            assert on_disk[-1][0] == "usage"

    run(go())


def test_several_answers_are_branches_of_one_prompt(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            answer = await agent.chat(n=3)
            said = [choice.message.content for choice in answer.choices]
            assert len(set(said)) == 3
            assert [call.tokens().prompt_ids for call in agent.calls] == [encode(agent_prompt())] * 3
            assert answer.usage.prompt_tokens == len(encode(agent_prompt()))
            again = dict.fromkeys(range(3), "")
            async for chunk in await agent.chat(n=3, stream=True, extra_headers={"Idempotency-Key": "another"}):
                again[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert set(again.values()).isdisjoint(said), "asked anew, it is sampled anew"
            assert len(agent.calls) == 6

    run(go())


def agent_prompt():
    return ToyModel().text(HELLO)


def test_a_stop_string_ends_the_text_and_its_ids_are_kept(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            for place in range(40):
                answer = await agent.chat([{"role": "user", "content": f"question {place}"}], stop=" the")
                if " the" in decode(agent.calls[-1].tokens().completion_ids):
                    break
            assert " the" not in answer.choices[0].message.content
            assert decode(agent.calls[-1].tokens().completion_ids).endswith(" the")
            assert agent.calls[-1].answer.stop == " the"

    run(go())


def test_completions_go_on_from_text_and_from_ids(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            ids = encode("a lake north")
            answer = await agent.openai.completions.create(model="toy", prompt=["the lake", ids[:3]], n=2, max_tokens=9)
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            assert [call.tokens().prompt_ids for call in agent.calls] == [encode("the lake")] * 2 + [ids[:3]] * 2
            assert answer.usage.prompt_tokens == len(encode("the lake")) + 3
            first = agent.calls[0].tokens()
            grown = first.prompt_ids + first.completion_ids + encode(" north")
            text = ""
            async for chunk in await agent.openai.completions.create(model="toy", prompt=grown, stream=True):
                text += chunk.choices[0].text
            assert agent.calls[-1].parent is agent.calls[0]
            assert text == agent.calls[-1].answer.message["content"]

    run(go())


# ---- Responses


def test_responses_with_tools_and_thoughts_go_on_by_items(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            items = [{"role": "user", "content": "hello"}]
            kinds = []
            for turn in range(6):
                answer = await agent.openai.responses.create(
                    model="toy", instructions="be brief", input=items, tools=[FLAT_TOOL]
                )
                assert answer.status == "completed"
                kinds += [item.type for item in answer.output]
                items += [item.model_dump(exclude_none=True) for item in answer.output]
                called = [item for item in answer.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"} for c in called]
                if not called:
                    items.append({"role": "user", "content": [{"type": "input_text", "text": f"more {turn}"}]})
            assert {"reasoning", "message", "function_call"} <= set(kinds)
            exact(agent)
            assert agent.episode.share()["forks"] == {}
            assert [call.parent and call.parent.number for call in agent.calls] == [None, 0, 1, 2, 3, 4]

    run(go())


def test_responses_stream_in_the_protocols_own_events(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            seen = set()
            for turn in range(8):
                order = []
                async with agent.openai.responses.stream(model="toy", input=f"hi {turn}", tools=[FLAT_TOOL]) as stream:
                    async for event in stream:
                        assert event.sequence_number == len(order)
                        order.append(event.type)
                    answer = await stream.get_final_response()
                assert order[:2] == ["response.created", "response.in_progress"]
                assert order[-1] == "response.completed"
                seen |= set(order)
                assert answer.output_text == agent.calls[-1].answer.message["content"]
            parts = ("output_text.delta", "output_text.done", "reasoning_text.delta", "function_call_arguments.done")
            assert {f"response.{part}" for part in parts} <= seen

    run(go())


def test_a_response_goes_on_from_an_earlier_one_by_its_id_also_after_a_restart(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            first = await agent.openai.responses.create(model="toy", input="hello", instructions="be brief")
            key = agent.key
        async with serving_again(tmp_path, key) as agent:
            more = {"previous_response_id": first.id, "instructions": "be brief"}
            await agent.openai.responses.create(model="toy", input="and now?", **more)
            assert agent.calls[1].parent is agent.calls[0]
            with pytest.raises(openai.BadRequestError, match="no response"):
                await agent.openai.responses.create(model="toy", input="x", previous_response_id="resp_1")

    run(go())


def serving_again(folder, key):
    from contextlib import asynccontextmanager

    from gateway_cases import Agent, serving

    @asynccontextmanager
    async def made():
        async with serving(folder) as gateway:
            agent = Agent(gateway, gateway.episodes["e"], key)
            yield agent
            await agent.close()

    return made()


def test_thoughts_survive_as_encrypted_content(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            for turn in range(30):
                items = [{"role": "user", "content": f"hello {turn}"}]
                asked = {"model": "toy", "include": ["reasoning.encrypted_content"], "store": False}
                answer = await agent.openai.responses.create(input=items, **asked)
                if answer.output[0].type == "reasoning":
                    break
            said = [
                item.model_dump(exclude_none=True, exclude={"content"} if item.type == "reasoning" else None)
                for item in answer.output
            ]
            await agent.openai.responses.create(input=[*items, *said, {"role": "user", "content": "on"}], **asked)
            assert agent.calls[-1].parent is agent.calls[-2]

    run(go())


def test_a_custom_tool_gets_its_input_and_the_conversation_goes_on(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            custom = {"type": "custom", "name": "patch", "description": "takes text"}
            for turn in range(20):
                items = [{"role": "user", "content": f"hello {turn}"}]
                answer = await agent.openai.responses.create(
                    model="toy", input=items, tools=[custom, {"type": "web_search"}]
                )
                called = [item for item in answer.output if item.type == "custom_tool_call"]
                if called:
                    break
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items.append({"type": "custom_tool_call_output", "call_id": called[0].call_id, "output": "done"})
            await agent.openai.responses.create(model="toy", input=items, tools=[custom, {"type": "web_search"}])
            assert agent.calls[-1].parent is agent.calls[-2]
            assert agent.episode.changed["tool web_search"] == len(agent.calls)

    run(go())


def test_tools_in_a_namespace_are_called_by_both_names_and_the_conversation_goes_on(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            count = {"type": "function", "name": "count", "parameters": {"type": "object", "properties": {}}}
            tools = [{"type": "namespace", "name": "mcp__env", "description": "of an env", "tools": [count]}]
            for turn in range(20):
                items = [{"role": "user", "content": f"hello {turn}"}]
                answer = await agent.openai.responses.create(model="toy", input=items, tools=tools)
                called = [item for item in answer.output if item.type == "function_call"]
                if called:
                    break
            assert (called[0].namespace, called[0].name) == ("mcp__env", "count")
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items.append({"type": "function_call_output", "call_id": called[0].call_id, "output": "done"})
            await agent.openai.responses.create(model="toy", input=items, tools=tools)
            assert agent.calls[-1].parent is agent.calls[-2]
            assert not agent.episode.changed

    run(go())


# ---- errors and models


def test_errors_are_the_protocols_own(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            assert [model.id for model in (await agent.openai.models.list()).data] == ["toy"]
            with pytest.raises(openai.BadRequestError, match="content must be text"):
                await agent.chat([{"role": "user", "content": 3}])
            with pytest.raises(openai.BadRequestError, match="max_tokens is a whole number"):
                await agent.chat(max_tokens=0)
            with pytest.raises(openai.BadRequestError, match="stop is a text or a list of texts, not \\[1\\]"):
                await agent.chat(stop=[1])
            with pytest.raises(openai.BadRequestError, match="seed is a whole number, not 'x'"):
                await agent.chat(seed="x")
            with pytest.raises(openai.BadRequestError, match="stream_options is an object, not 'x'"):
                await agent.chat(stream=True, stream_options="x")
            with pytest.raises(openai.BadRequestError, match="n is 1 in this protocol, not 2"):
                await agent.openai.responses.create(model="toy", input="x", extra_body={"n": 2})
            with pytest.raises(openai.BadRequestError, match="type 'custom' are known to the Responses API alone"):
                await agent.chat(tools=[{"type": "custom", "custom": {"name": "shell"}}])
            with pytest.raises(openai.NotFoundError):
                await agent.openai.embeddings.create(model="toy", input="x")
            with pytest.raises(openai.BadRequestError, match="items of the type 'computer_call'"):
                await agent.openai.responses.create(model="toy", input=[{"type": "computer_call"}])
            assert agent.calls == []
        async with agent_of(tmp_path / "small", ToyModel(context=10)) as agent:
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.chat()
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError):  # before the stream begins, an error has its own status
                await agent.chat(stream=True)

    run(go())


def test_an_engine_that_fails_in_mid_stream_says_so_in_the_stream(tmp_path):
    class Failing(ToyModel):
        """A double of a fault."""

        async def answer(self, call, episode, told):
            told("text", "the la")
            await asyncio.sleep(0.05)
            raise RuntimeError("out of memory")

    async def go():
        async with agent_of(tmp_path, Failing()) as agent:
            with pytest.raises(openai.APIError, match="out of memory"):
                async for _ in await agent.chat(stream=True):
                    pass
            async with agent.openai.responses.stream(model="toy", input="x") as stream:
                last = [event async for event in stream][-1]
            assert last.type == "response.failed"
            assert agent.calls == []

    run(go())
