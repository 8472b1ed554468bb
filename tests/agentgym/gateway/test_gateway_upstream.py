"""A gateway in front of an endpoint: a real vLLM server, whose tokens are exact, and doubles of others and of their faults."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest
from aiohttp import web
from gateway_cases import HELLO, agent_of, lines_of, post, run, serving

from agentgym.cli import main as agentgym
from agentgym.evaluate.serving import serve_model
from agentgym.gateway import Passed, Upstream
from agentgym.policies import endpoints
from agentgym.policies.base import EndpointError

THOUGHT = {"role": "assistant", "content": "it is 4", "reasoning": "2 and 2"}


def event(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


class Endpoint:
    """A double of an endpoint that tells no tokens: `answers` in turn, a dict as JSON, a list as a stream, a number as a status."""

    def __init__(self, *answers, owner="someone", models=("big",)):
        self.answers, self.owner, self.models, self.asked = list(answers), owner, models, []
        self.paths = []  # with queries

    async def answer(self, request):
        self.paths.append(str(request.rel_url))
        if request.method == "GET":
            return web.json_response({"data": [{"id": id, "owned_by": self.owner} for id in self.models]})
        self.asked.append((request.path, await request.json()))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "too bad"}}, status=answer)
        if isinstance(answer, dict):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in answer:
            if each == "cut":
                request.transport.abort()
                return response
            await response.write(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode())
        return response

    @asynccontextmanager
    async def engine(self, model=None):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        engine = Upstream(self.url, model, timeout=5)
        try:
            await engine.start()
            yield engine
        finally:
            await runner.cleanup()


def completion(message, reason="stop", **more):
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason, **more}], "usage": usage}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.02)


def test_a_model_whose_tokens_are_not_told_is_recorded_by_its_messages(tmp_path):
    endpoint = Endpoint(completion(THOUGHT), completion({"role": "assistant", "content": "5"}))

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            answer = await agent.openai.chat.completions.create(model="big", messages=HELLO, top_p=0.5, user="me")
            said = answer.choices[0].message.model_dump(exclude_none=True)
            assert said["reasoning_content"] == "2 and 2"
            await agent.openai.chat.completions.create(
                model="gpt-5", messages=[*HELLO, said, {"role": "user", "content": "and 1"}]
            )
            first, second = agent.calls
            assert (first.tokens(), first.sampled, second.after) == (None, 4, first)
            assert agent.episode.share()["lost"] == {"no token ids": 8}
            assert agent.episode.changed == {"model": 1}

    run(go())
    (path, first), (_, second) = endpoint.asked
    assert path == "/v1/chat/completions"
    assert (first["model"], first["top_p"], "user" in first) == ("big", 0.5, False)
    assert "reasoning_content" not in second["messages"][1], "most endpoints do not take thoughts back"
    assert "return_token_ids" not in first


def test_the_query_of_an_endpoint_s_address_is_part_of_every_request(tmp_path):
    endpoint = Endpoint(completion(THOUGHT), completion(THOUGHT), {"count": 7}, owner="vllm")

    async def go():
        async with endpoint.engine():
            url = f"{endpoint.url}?api-version=1"
            engine, judge = Upstream(url), Passed(url, "its key")
            endpoint.paths.clear()
            await engine.start()
            async with agent_of(tmp_path, engine, passed={"judge": judge}) as agent:
                await agent.openai.chat.completions.create(model="judge", messages=HELLO)
                await agent.chat()
                await agent.anthropic.messages.count_tokens(model="big", messages=HELLO)

    run(go())
    chat = "/v1/chat/completions?api-version=1"
    assert endpoint.paths == ["/v1/models?api-version=1", chat, chat, "/tokenize?api-version=1"]


def test_streams_are_passed_on_as_they_come_with_thoughts_and_tool_calls(tmp_path):
    part = {"index": 0, "function": {"arguments": '{"n"'}}
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    words = [event(reasoning="hm"), event(content="I "), event(content="add"), event(tool_calls=[begun])]
    endpoint = Endpoint([*words, event(tool_calls=[part]), event(tool_calls=[rest]), end, usage, "[DONE]"])

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            tool = {"name": "add", "input_schema": {"type": "object"}}
            asked = {"model": "big", "max_tokens": 50, "messages": HELLO, "tools": [tool]}
            async with agent.anthropic.messages.stream(**asked) as stream:
                kinds = [e.delta.type for e in [e async for e in stream] if e.type == "content_block_delta"]
                answer = await stream.get_final_message()
            assert kinds == ["thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta"]
            assert answer.content[-1].input == {"n": 1}
            assert answer.usage.input_tokens == 9
            assert agent.calls[0].answer.message["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'

    run(go())


def test_a_thought_by_both_its_names_is_told_once(tmp_path):
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    words = [event(reasoning=word, reasoning_content=word) for word in ("2 and", " 2")]
    endpoint = Endpoint([*words, event(content="it is 4"), end, "[DONE]"])

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            ask = agent.openai.chat.completions.create
            deltas = [c.choices[0].delta async for c in await ask(model="big", messages=HELLO, stream=True)]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "2 and 2"
            assert dict(agent.calls[0].answer.parts()) == {"reasoning": "2 and 2", "text": "it is 4"}

    run(go())


def test_a_message_with_tool_calls_asks_for_them_whatever_the_engine_calls_its_end(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    endpoint = Endpoint(completion({"role": "assistant", "content": None, "tool_calls": [call]}, "stop"))

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            tool = {"name": "add", "input_schema": {"type": "object"}}
            ask = agent.anthropic.messages.create
            answer = await ask(model="big", max_tokens=50, messages=HELLO, tools=[tool])
            assert (answer.stop_reason, answer.content[0].type) == ("tool_use", "tool_use")

    run(go())


def test_an_answer_passed_on_that_breaks_off_is_cut_for_the_client_too(tmp_path):
    endpoint = Endpoint([event(content="I "), "cut"])

    async def go():
        async with endpoint.engine() as _, agent_of(tmp_path, passed={"judge": Passed(endpoint.url)}) as agent:
            body = {"model": "judge", "messages": HELLO, "stream": True}
            async with (
                aiohttp.ClientSession(headers={"x-api-key": agent.key}) as session,
                session.post(f"{agent.gateway.url}/v1/chat/completions", json=body) as response,
            ):
                first = await response.content.readuntil(b"\n\n")
                assert first.startswith(b'data: {"choices"')
                with pytest.raises(aiohttp.ClientPayloadError):  # and no second answer in the first
                    await response.content.read()
        assert [line["status"] for line in lines_of(tmp_path) if "passed" in line] == [200]

    run(go())


def test_tool_calls_without_ids_get_some_and_are_read_from_the_record(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    endpoint = Endpoint(completion({"role": "assistant", "content": None, "tool_calls": [call, call]}, "tool_calls"))

    async def go():
        async with endpoint.engine() as engine:
            async with agent_of(tmp_path, engine) as agent:
                answer = await agent.chat()
                ids = [each.id for each in answer.choices[0].message.tool_calls]
                assert len({*ids}) == 2
                assert all(id.startswith("call_") for id in ids)
            async with serving(tmp_path, engine) as again:
                (read,) = again.episodes["e"].tree.calls.values()
                assert [each["id"] for each in read.answer.message["tool_calls"]] == ids

    run(go())


def test_a_client_that_wants_no_logprobs_costs_none(tmp_path):
    tokens = {"token_ids": [5], "logprobs": {"content": [{"token": "4", "logprob": -0.5}]}}
    told = {**completion({"role": "assistant", "content": "4"}, **tokens), "prompt_token_ids": [1, 2]}
    endpoint = Endpoint(told, owner="vllm")

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            answer = await agent.chat(logprobs=False)
            assert answer.choices[0].logprobs is None
            assert agent.calls[0].tokens().completion_ids == [5]

    run(go())
    assert endpoint.asked[0][1]["logprobs"] is True


def test_an_engine_that_cannot_count_is_told_in_the_protocol_s_form(tmp_path):
    endpoint = Endpoint(500, owner="vllm")

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            url = f"{agent.gateway.url}/v1/messages/count_tokens"
            status, answer = await post(url, {"model": "big", "messages": HELLO}, agent.key)
            assert (status, answer["type"]) == (502, "error")
            assert "does not count" in answer["error"]["message"]

    run(go())


def test_faults_of_the_engine_are_tried_again_or_told_with_the_right_status(tmp_path):
    good = completion({"role": "assistant", "content": "yes"})
    cut = [event(content="ye"), "cut"]
    endpoint = Endpoint(503, good, 400, *[500] * 6, 403, cut, cut, good)

    async def go():
        async with endpoint.engine() as engine, agent_of(tmp_path, engine) as agent:
            ask = agent.openai.chat.completions.create
            assert (await ask(model="big", messages=HELLO)).choices[0].message.content == "yes"
            with pytest.raises(openai.BadRequestError, match="too bad"):
                await ask(model="big", messages=HELLO)
            for _ in range(2):  # failed for long; and a key that the engine refuses is not the agent's fault
                with pytest.raises(openai.InternalServerError) as caught:
                    await ask(model="big", messages=HELLO)
                assert caught.value.status_code == 502
                assert endpoint.url not in str(caught.value), "agents are not told where the engine is"
            with pytest.raises(openai.APIError, match="the answer was cut"):
                async for _ in await ask(model="big", messages=HELLO, stream=True):
                    pass
            assert len(agent.calls) == agent.episode.turns == 1

    run(go())


def test_an_engine_that_does_not_serve_the_model_is_refused_at_the_start(tmp_path, capsys):
    async def go():
        endpoint = Endpoint(models=("small", "big"))
        async with endpoint.engine("big") as engine:
            assert engine.models == ["big"]
        with pytest.raises(EndpointError, match="serves no model 'huge'; there are small, big"):
            async with endpoint.engine("huge"):
                pass

    run(go())
    assert agentgym(["gateway", "--engine", "http://127.0.0.1:1/v1", "--out", str(tmp_path)]) == 2
    assert (
        "agentgym gateway: http://127.0.0.1:1/v1/models: no list of models: Cannot connect" in capsys.readouterr().err
    )
    assert agentgym(["gateway", "--engine", "http://x/v1", "--max-turns", "0"]) == 2
    assert "the limit of turns is a positive number, not 0" in capsys.readouterr().err
    for temperature in ("-1", "nan", "inf"):
        assert agentgym(["gateway", "--engine", "http://x/v1", "--temperature", temperature]) == 2
        assert "a temperature is a number of at least 0, not " in capsys.readouterr().err
    assert agentgym(["gateway", "--engine", "http://x/v1", "--pass", "judge=http://y/v1,NO_SUCH_KEY"]) == 2
    assert "the variable NO_SUCH_KEY is not set" in capsys.readouterr().err
    assert agentgym(["gateway", "--engine", "http://x/v1", "--max-cost", "1"]) == 2
    assert "--max-cost needs --prices" in capsys.readouterr().err


def test_a_limit_of_cost_needs_the_price_of_the_engine_s_model(tmp_path):
    (tmp_path / "prices.yaml").write_text("other: {input: 1, output: 2}")

    async def go():
        endpoint = Endpoint()
        async with endpoint.engine():
            words = ["--engine", endpoint.url, "--out", tmp_path / "out", "--prices", tmp_path / "prices.yaml"]
            command = [sys.executable, "-m", "agentgym.cli", "gateway", *words, "--max-cost", "1", "--one-key"]
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
            return (await process.communicate())[1].decode(), process.returncode

    said, code = run(go(), 60)
    assert code == 2
    assert said == f"agentgym gateway: --max-cost needs a price of 'big', and {tmp_path}/prices.yaml has none\n"


def test_the_command_tells_the_admin_key_that_it_made(tmp_path, monkeypatch):
    """An empty variable, as a missing value of a compose file leaves it, names none."""
    monkeypatch.setenv("AGENTGYM_GATEWAY_KEY", "")

    async def go():
        endpoint = Endpoint()
        async with endpoint.engine():
            words = ["-m", "agentgym.cli", "gateway", "--engine", endpoint.url, "--out", tmp_path, "--port"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, "0", "--json", stdout=subprocess.PIPE
            )
            told = json.loads(await process.stdout.readuntil(b"\n}\n"))
            status, _ = await post(f"{told['url']}/v1/episodes", {}, told["admin_key"])
            process.send_signal(signal.SIGINT)
            refused = await asyncio.create_subprocess_exec(sys.executable, *words, "70000", stderr=subprocess.PIPE)
            return status, await process.wait(), (await refused.communicate())[1].decode(), refused.returncode

    status, code, said, refused = run(go(), 60)
    assert (status, code, refused) == (200, 0, 2)
    assert said.startswith("agentgym gateway: the gateway cannot start: ")


# ---- the real thing


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """URL and name of a tiny model with random weights behind vLLM."""
    from agent_train.config.schema import TinyConfig
    from agent_train.learner.tiny import build_tiny, texts_of_env

    folder = tmp_path_factory.mktemp("models")
    build_tiny(
        folder / "tiny", texts_of_env("frozen_lake", n=8), TinyConfig(hidden=64, layers=1, heads=2), 1024, seed=0
    )
    with serve_model(folder / "tiny", log=folder / "serve.log", timeout=600) as served:
        yield *served, folder / "tiny"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server_tells_exact_tokens_by_every_protocol_streamed_or_not(vllm, tmp_path):
    from agent_train.rollout.renderer import Renderer

    url, name, folder = vllm
    renderer = Renderer.of_folder(folder)

    async def go():
        engine = Upstream(url)
        await engine.start()
        assert (engine.models, engine.exact) == ([name], True)
        async with agent_of(tmp_path, engine) as agent:
            asked = {"model": name, "max_tokens": 8, "temperature": 1.0}
            messages = [{"role": "user", "content": "Reach G."}]
            texts = []
            for stream in (False, True):
                answer = await agent.openai.chat.completions.create(messages=messages, stream=stream, **asked)
                if stream:
                    texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in answer]))
                else:
                    texts.append(answer.choices[0].message.content)
                whole = [*messages, {"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "On."}]
                await agent.openai.chat.completions.create(messages=whole, **asked)
            response = await agent.openai.responses.create(model=name, input="Reach G.", max_output_tokens=8)
            async with agent.anthropic.messages.stream(model=name, max_tokens=8, messages=messages) as answer:
                message = await answer.get_final_message()
            completed = await agent.openai.completions.create(prompt=renderer.encode("Reach G."), logprobs=0, **asked)
            texts += [response.output_text, message.content[0].text, completed.choices[0].text]
            assert completed.choices[0].logprobs.token_logprobs == agent.calls[-1].logprobs.tolist()
            counted = await agent.anthropic.messages.count_tokens(model=name, messages=messages)
            assert counted.input_tokens == len(agent.calls[0].tokens().prompt_ids)
            said = [agent.calls[n] for n in (0, 2, 4, 5, 6)]
            for call, text in zip(said, texts, strict=True):
                tokens = call.tokens()
                stops = renderer.stop_token_ids
                ids = tokens.completion_ids[:-1] if tokens.completion_ids[-1] in stops else tokens.completion_ids
                whole = renderer.tokenizer.decode(ids, skip_special_tokens=True)
                # vLLM holds back the bytes of a letter that is not whole at the end.
                assert whole.rstrip("\ufffd") == text.rstrip("\ufffd")
                assert all(logprob <= 0 for logprob in tokens.logprobs)
            assert agent.calls[0].tokens().prompt_ids == renderer.prompt(messages).ids
            assert agent.episode.share()["lost"] == {}
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.openai.chat.completions.create(messages=[{"role": "user", "content": "x " * 3000}], **asked)
            assert caught.value.code == "context_length_exceeded"

    run(go(), 120)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_serves_a_person_an_agent_at_once(vllm, tmp_path):
    url, name, _ = vllm
    command = [sys.executable, "-m", "agentgym.cli", "gateway", "--engine", url, "--port", "0", "--one-key"]
    process = subprocess.Popen([*command, "--out", tmp_path, "--max-turns", "2"], stdout=subprocess.PIPE, text=True)
    try:
        lines = [process.stdout.readline() for _ in range(6)]
        told = dict(line.strip().removeprefix("export ").split("=", 1) for line in lines[1:])
        assert lines[0].startswith(f"{name} at http://127.0.0.1:")
        client = openai.OpenAI(base_url=told["OPENAI_BASE_URL"], api_key=told["OPENAI_API_KEY"])
        assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=4).usage.completion_tokens == 4
        admin = told["AGENTGYM_GATEWAY_KEY"]
        status, opened = asyncio.run(post(f"{told['ANTHROPIC_BASE_URL']}/v1/episodes", {}, admin))
        assert (status, opened["limits"]) == (200, {"turns": 2})
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert (tmp_path / "calls.jsonl").read_text().count('"exchange"') == 1
    assert os.path.exists(tmp_path / "lock")
