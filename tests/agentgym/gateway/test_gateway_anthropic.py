"""Anthropic's messages by Anthropic's own client."""

import anthropic
import pytest
from gateway_cases import agent_of, exact, run
from toy_model import ToyModel

TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]


async def whole(agent, **asked):
    return await agent.anthropic.messages.create(model="toy", max_tokens=60, **asked)


async def streamed(agent, **asked):
    async with agent.anthropic.messages.stream(model="toy", max_tokens=60, **asked) as stream:
        events = [event.type async for event in stream]
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        return await stream.get_final_message()


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_conversation_with_tools_and_thoughts_is_one_sequence_of_exact_tokens(tmp_path, ask):
    async def go():
        async with agent_of(tmp_path) as agent:
            messages, kinds = [{"role": "user", "content": "hello"}], set()
            for _ in range(7):
                answer = await ask(agent, messages=messages, system="be brief", tools=TOOLS)
                kinds |= {block.type for block in answer.content}
                messages.append(
                    {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]}
                )
                used = [block for block in answer.content if block.type == "tool_use"]
                assert answer.stop_reason == ("tool_use" if used else "end_turn")
                results = [{"type": "tool_result", "tool_use_id": block.id, "content": "fine"} for block in used]
                messages.append({"role": "user", "content": results or "go on"})
                assert answer.usage.output_tokens == agent.calls[-1].sampled
            assert kinds == {"thinking", "text", "tool_use"}
            exact(agent)
            # The protocol carries the arguments of a tool as a value: they go on as they were sampled all the same.
            assert agent.episode.share()["forks"] == {}
            assert [call.parent and call.parent.number for call in agent.calls] == [None, 0, 1, 2, 3, 4, 5]

    run(go())


def test_arguments_that_the_client_changed_are_another_sequence(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            for turn in range(30):
                messages = [{"role": "user", "content": f"hello {turn}"}]
                answer = await whole(agent, messages=messages, tools=TOOLS)
                used = [block for block in answer.content if block.type == "tool_use"]
                if used:
                    break
            said = [b.model_dump(exclude_none=True) for b in answer.content]
            said[-1]["input"] = {"n": 1000}
            result = [{"type": "tool_result", "tool_use_id": used[0].id, "content": "fine"}]
            await whole(
                agent,
                messages=[*messages, {"role": "assistant", "content": said}, {"role": "user", "content": result}],
                tools=TOOLS,
            )
            assert agent.calls[-1].parent is None
            assert agent.episode.share()["forks"]["tool call rewritten"] == 1

    run(go())


def test_a_stop_sequence_and_too_few_tokens_are_told(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            short = await agent.anthropic.messages.create(
                model="toy", max_tokens=1, messages=[{"role": "user", "content": "hello"}]
            )
            assert short.stop_reason == "max_tokens"
            reasons = set()
            for turn in range(30):
                messages = [{"role": "user", "content": f"hello {turn}"}]
                answer = await whole(agent, messages=messages, stop_sequences=["an", "e"])
                reasons.add((answer.stop_reason, answer.stop_sequence))
            assert {("stop_sequence", "e"), ("end_turn", None)} <= reasons

    run(go())


def test_a_schema_of_the_answer_is_asked_of_the_engine_as_openai_s_clients_ask_it(tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}

    async def go():
        async with agent_of(tmp_path) as agent:
            wanted = {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
            await whole(agent, messages=[{"role": "user", "content": "hello"}], **wanted)
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            assert agent.calls[0].asked.settings["response_format"] == form
            assert agent.calls[0].asked.used["reasoning_effort"] == "low"
            assert agent.episode.to_json()["changed"] == {"response_format": 1}, "this engine does not know it"

    run(go())


def test_an_answer_that_the_client_begins_is_counted_as_not_honoured(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "{"}]
            await whole(agent, messages=begun)
            assert agent.episode.to_json()["changed"] == {"prefill": 1}

    run(go())


def test_a_prompt_is_counted_and_models_are_listed(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            messages = [{"role": "user", "content": "hello"}]
            counted = await agent.anthropic.messages.count_tokens(model="toy", messages=messages, system="be brief")
            answer = await whole(agent, messages=messages, system="be brief")
            assert counted.input_tokens == answer.usage.input_tokens > 0
            assert [model.id for model in (await agent.anthropic.models.list()).data] == ["toy"]

    run(go())


def test_errors_are_the_protocols_own(tmp_path):
    async def go():
        async with agent_of(tmp_path, ToyModel(context=10)) as agent:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await whole(agent, messages=[{"role": "user", "content": "hello, is it me"}])
            with pytest.raises(anthropic.BadRequestError, match="n is 1 in this protocol, not 2"):
                await whole(agent, messages=[{"role": "user", "content": "hello"}], extra_body={"n": 2})
            with pytest.raises(anthropic.BadRequestError, match="'document' is not known"):
                await whole(agent, messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}])
            agent.anthropic.api_key = "wrong"
            with pytest.raises(anthropic.AuthenticationError, match="no episode has this key") as caught:
                await whole(agent, messages=[{"role": "user", "content": "hello"}])
            assert caught.value.body["error"]["type"] == "authentication_error"

    run(go())
