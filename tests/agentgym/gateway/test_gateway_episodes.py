"""Episodes: their keys keep agents apart, limits end them politely, and settings that spoil tokens are dealt with by policy."""

import asyncio
import json
import time
from urllib.parse import quote

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from gateway_cases import HELLO, TOOL, Agent, agent_of, lines_of, post, run, serving
from toy_model import ToyModel

from agentgym.gateway import Limits, Passed, Settings

# ---- keys


def test_a_key_as_any_header_or_in_the_address_is_the_episodes(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            body = {"model": "toy", "messages": HELLO}
            path = f"{agent.gateway.url}/v1/chat/completions"
            for header in ({"Authorization": f"Bearer {agent.key}"}, {"x-api-key": agent.key}, {"api-key": agent.key}):
                status, _ = await post(path, body, headers={"Authorization": "", **header})
                assert status == 200
            keyed = f"{agent.gateway.url}/episodes/{agent.key}/v1"
            client = openai.AsyncOpenAI(base_url=keyed, api_key="whatever", max_retries=0)
            await client.chat.completions.create(**body)
            await client.close()
            assert len(agent.calls) == 4

    run(go())


@pytest.mark.parametrize(
    "path", ["chat/completions", "completions", "responses", "messages", "models", "messages/count_tokens"]
)
@pytest.mark.parametrize("key", ["", "wrong", "the admin key", "expired"])
def test_without_an_episodes_key_nothing_is_answered(tmp_path, path, key):
    async def go():
        async with serving(tmp_path, admin_key="the admin key") as gateway:
            _, expired = await gateway.open("e", seconds=-1)
            given = expired if key == "expired" else key
            method = "GET" if path == "models" else "POST"
            status, told = await post(f"{gateway.url}/v1/{path}", {"messages": HELLO}, given, method=method)
            assert status == 401
            assert "no episode has this key" in told["error"]["message"]
            assert ("type" in told) == path.startswith("messages"), "in the protocol's own form"
            status, _ = await post(f"{gateway.url}/episodes/{given}/v1/{path}", {}, method=method)
            assert status == 401

    run(go())


def test_an_episode_cannot_read_or_extend_another(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            other = Agent(agent.gateway, *await agent.gateway.open("other", seed=1))
            first = await agent.openai.responses.create(model="toy", input="a secret")
            with pytest.raises(openai.BadRequestError, match="no response"):
                await other.openai.responses.create(model="toy", input="go on", previous_response_id=first.id)
            one, two = await agent.chat(), await other.chat(extra_headers={"x-stainless-retry-count": "2"})
            assert one.id != two.id, "an equal request of another episode is no retry"
            assert [len(agent.calls), len(other.calls)] == [2, 1]
            for path in ("e", "e/reward", "e/end", ""):
                method = "GET" if path == "e" else "POST"
                status, _ = await post(
                    f"{agent.gateway.url}/v1/episodes/{path}", {"reward": 1}, other.key, method=method
                )
                assert status == 401, "the run's own routes take its own key"
            await other.close()

    run(go())


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/files", "/metrics", "/../calls.jsonl", "/v1/chat/completions/"])
def test_nothing_else_is_reachable(tmp_path, path):
    async def go():
        async with agent_of(tmp_path) as agent:
            for method in ("GET", "POST"):
                status, _ = await post(f"{agent.gateway.url}{path}", {}, agent.key, method=method)
                assert status == 404

    run(go())


# ---- the run's own routes


def test_a_run_opens_grades_and_ends_episodes_over_http(tmp_path):
    async def go():
        async with serving(tmp_path, admin_key="the admin key") as gateway:
            url = f"{gateway.url}/v1/episodes"
            status, opened = await post(url, {"id": "x", "limits": {"turns": 3}, "seed": 1}, "the admin key")
            assert (status, opened["id"], opened["limits"]) == (200, "x", {"turns": 3})
            client = openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"], max_retries=0)
            await client.chat.completions.create(model="toy", messages=HELLO)
            status, told = await post(f"{url}/x/reward", {"reward": 0.25, "metrics": {"tests": 3}}, "the admin key")
            assert (status, told["reward"], told["metrics"], told["used"]["turns"]) == (200, 0.25, {"tests": 3}, 1)
            status, told = await post(f"{url}/x/end", {"reason": "crashed", "complete": False}, "the admin key")
            assert (told["ended"], told["share"]["trainable"]) == ("crashed", 0)
            assert told["share"]["lost"] == {"incomplete episode": told["share"]["sampled"]}
            with pytest.raises(openai.PermissionDeniedError, match="the episode has ended: crashed"):
                await client.chat.completions.create(model="toy", messages=HELLO)
            await client.close()
            for path, body, expected in [
                ("", {"id": "x"}, 400),
                ("", {"id": 5}, 400),
                ("", {"limits": {"turns": 0}}, 400),
                ("", {"limits": {"steps": 3}}, 400),
                ("", {"limits": {"cost": 3}}, 400),
                ("", {"expires_seconds": 0}, 400),
                ("", {"expires_seconds": float("nan")}, 400),
                ("/x/reward", {"reward": "much"}, 400),
                ("/x/reward", {"reward": 10**400}, 400),
                ("/x/reward", {"reward": 1, "metrics": {"tests": float("nan")}}, 400),
                ("/x/reward", {"reward": 1, "metrics": {"tests": "all"}}, 400),
                ("/x/reward", {"reward": 1, "metrics": [1]}, 400),
                ("/y/reward", {"reward": 1}, 404),
                ("/x/other", {}, 404),
            ]:
                status, _ = await post(url + path, body, "the admin key")
                assert status == expected, path

    run(go())


@pytest.mark.parametrize("id", ["task-7/0", "owner/repo/reward", "a task: 100%"])
def test_any_text_is_an_episode_s_id(tmp_path, id):
    async def go():
        async with serving(tmp_path, admin_key="the admin key") as gateway:
            url = f"{gateway.url}/v1/episodes"
            await post(url, {"id": id}, "the admin key")
            for name in (quote(id), quote(id, safe="")):
                status, told = await post(f"{url}/{name}/reward", {"reward": 0.5}, "the admin key")
                assert (status, told["id"]) == (200, id)
            status, told = await post(f"{url}/{quote(id)}", None, "the admin key", method="GET")
            assert (status, told["reward"]) == (200, 0.5)
            status, told = await post(f"{url}/{quote(id)}/end", {}, "the admin key")
            assert (status, told["ended"]) == (200, "ended")

    run(go())


def test_a_body_that_cannot_be_unpacked_is_the_client_s_fault(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            headers = {"x-api-key": agent.key, "Content-Encoding": "gzip"}
            url = f"{agent.gateway.url}/v1/chat/completions"
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, data=b"garbage", headers=headers) as answer,
            ):
                assert answer.status == 400
                assert "the body cannot be read" in (await answer.json())["error"]["message"]
            assert agent.calls == []

    run(go())


def test_a_deleted_episode_takes_no_memory_and_stays_in_the_record(tmp_path):
    async def go():
        async with serving(tmp_path, admin_key="the admin key") as gateway:
            url = f"{gateway.url}/v1/episodes"
            _, opened = await post(url, {"id": "x"}, "the admin key")
            async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"], max_retries=0) as client:
                await client.chat.completions.create(model="toy", messages=HELLO)
                status, told = await post(f"{url}/x", {}, "the admin key", method="DELETE")
                assert (status, told["ended"], told["used"]["turns"]) == (200, "ended", 1)
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="toy", messages=HELLO)
            assert gateway.episodes == {}
            status, _ = await post(f"{url}/x", {}, "the admin key", method="DELETE")
            assert status == 404
            gateway.record.note({"episode": "x", "delivered": ["late"]})
            await post(url, {"id": "y"}, "the admin key")
        assert sum("sampled" in json.dumps(line) for line in lines_of(tmp_path)) == 1
        async with serving(tmp_path, admin_key="the admin key") as gateway:
            assert list(gateway.episodes) == ["y"]

    run(go())


# ---- limits


@pytest.mark.parametrize("limit", ["turns", "tokens", "cost", "seconds"])
def test_at_a_limit_an_episode_gets_an_empty_answer_and_then_errors_that_are_not_retried(tmp_path, limit):
    value = {"turns": 3, "tokens": 150, "cost": 0.3, "seconds": 0.5}[limit]

    async def go():
        options = {"limits": Limits(**{limit: value}), "cost_of": lambda model, usage: 0.1 if usage else 0.0}
        async with agent_of(tmp_path, retries=3, **options) as agent:
            for turn in range(1000):
                answer = (await agent.chat([{"role": "user", "content": f"hello {turn}"}])).choices[0]
                if answer.finish_reason == "length" and not answer.message.content:
                    break
                await asyncio.sleep(0.02)
            used = agent.episode.to_json()["used"]
            if limit == "seconds":
                assert time.time() - agent.episode.opened > value
            else:
                assert used[limit] == pytest.approx(value, abs=40 if limit == "tokens" else 0.001)
            before = len(agent.gateway.backend.log)
            began = time.monotonic()
            with pytest.raises(openai.PermissionDeniedError, match=f"has reached its limit of {limit}"):
                await agent.chat()
            assert time.monotonic() - began < 5
            assert len(agent.gateway.backend.log) == before

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_the_polite_end_is_each_protocols_own(tmp_path, stream):
    async def go():
        async with serving(tmp_path) as gateway:

            async def agent(name):
                agent = Agent(gateway, *await gateway.open(name, Limits(turns=1)))
                await agent.chat()
                return agent

            agent_ = await agent("chat")
            answer = await agent_.chat([{"role": "user", "content": "x"}], stream=stream)
            last = [chunk async for chunk in answer][-1] if stream else answer
            assert last.choices[0].finish_reason == "length"
            await agent_.close()
            agent_ = await agent("responses")
            answer = await agent_.openai.responses.create(model="toy", input="x", stream=stream)
            last = [event async for event in answer][-1].response if stream else answer
            assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert last.output_text == ""
            await agent_.close()
            agent_ = await agent("messages")
            asked = {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
            if stream:
                async with agent_.anthropic.messages.stream(**asked) as answer:
                    last = await answer.get_final_message()
            else:
                last = await agent_.anthropic.messages.create(**asked)
            assert last.stop_reason == "max_tokens"
            with pytest.raises(anthropic.PermissionDeniedError):
                await agent_.anthropic.messages.create(**asked)
            await agent_.close()

    run(go())


def test_max_tokens_is_cut_to_what_the_episode_has_left(tmp_path):
    async def go():
        async with agent_of(tmp_path, limits=Limits(tokens=100)) as agent:
            await agent.chat(max_tokens=1000)
            first = agent.calls[0]
            assert first.asked.used["max_tokens"] == 100
            said = first.answer.message
            await agent.chat([*HELLO, said, {"role": "user", "content": "on"}])
            assert agent.calls[1].asked.used["max_tokens"] == 100 - 2 * first.depth, "what is read again counts"

    run(go())


def test_answers_of_one_request_share_what_the_episode_has_left(tmp_path):
    async def go():
        async with agent_of(tmp_path, limits=Limits(tokens=200)) as agent:
            await agent.chat(n=4)
            assert [call.asked.used["max_tokens"] for call in agent.calls] == [50] * 4

    run(go())


def test_a_limit_of_cost_needs_a_price(tmp_path):
    async def go():
        async with serving(tmp_path, cost_of=lambda model, usage: None) as gateway:
            with pytest.raises(ValueError, match="a limit of cost needs the price of the model"):
                await gateway.open("e", Limits(cost=1.0))

    run(go())


# ---- settings

ODD = {"top_p": 0.5, "frequency_penalty": 0.5, "temperature": 0.2, "logit_bias": {"5": 1}}
EVEN = {"top_p": 1, "frequency_penalty": 0, "temperature": 1.0, "tool_choice": "auto", "tools": [TOOL], "user": "me"}


def test_settings_that_say_nothing_are_used_as_they_are(tmp_path):
    async def go():
        async with agent_of(tmp_path, settings=Settings("strict", 1.0)) as agent:
            with pytest.raises(openai.BadRequestError, match="frequency_penalty=0 cannot be honoured: the engine"):
                await agent.chat(**EVEN)
            asked = {name: value for name, value in EVEN.items() if name != "frequency_penalty"}
            await agent.chat(**asked, max_tokens=20, stop=["x"], extra_body={"reasoning_effort": "low"})
            assert agent.episode.changed == {}
            assert agent.calls[0].asked.unusable == []

    run(go())


@pytest.mark.parametrize("name", ODD)
def test_strict_refuses_what_tokens_cannot_be_trained_with_and_names_it(tmp_path, name):
    async def go():
        async with agent_of(tmp_path, settings=Settings("strict", 1.0)) as agent:
            with pytest.raises(openai.BadRequestError, match=f"{name}=.* cannot be honoured"):
                await agent.chat(**{name: ODD[name]})
            with pytest.raises(openai.BadRequestError, match='model="gpt-5" cannot be honoured'):
                await agent.openai.chat.completions.create(model="gpt-5", messages=HELLO)
            assert agent.calls == []

    run(go())


def test_override_uses_the_runs_own_and_counts_what_it_changed(tmp_path):
    async def go():
        async with agent_of(tmp_path, settings=Settings("override", 1.0, max_tokens=50)) as agent:
            for _ in range(2):
                answer = await agent.openai.chat.completions.create(model="gpt-5", messages=HELLO, max_tokens=99, **ODD)
                assert answer.model == "gpt-5"
            seed = agent.calls[0].asked.used.pop("seed")
            assert agent.calls[0].asked.used == {"temperature": 1.0, "max_tokens": 50}
            assert agent.calls[0].asked.settings == {**ODD, "max_tokens": 99}
            assert agent.episode.changed == dict.fromkeys([*ODD, "model"], 2)
            assert agent.episode.share()["lost"] == {}
            await agent.chat(seed=seed)
            assert agent.calls[-1].asked.used["seed"] != seed, "a group's episodes would all be the same"

    run(go())


def test_mask_honours_what_the_engine_knows_and_marks_the_tokens(tmp_path):
    async def go():
        async with agent_of(tmp_path, settings=Settings("mask", 1.0)) as agent:
            await agent.chat(**ODD)
            await agent.chat([{"role": "user", "content": "again"}])
            first = agent.calls[0].asked
            assert {name: first.used.get(name) for name in ODD} == {
                "top_p": 0.5,
                "temperature": 0.2,
                "frequency_penalty": None,
                "logit_bias": None,
            }
            assert agent.episode.changed == {"frequency_penalty": 1, "logit_bias": 1}, "this engine knows neither"
            share = agent.episode.share()
            assert sum(share["lost"].values()) == agent.calls[0].sampled
            assert share["lost"].keys() <= {"top_p", "temperature"}
            assert share["trainable"] == agent.calls[1].sampled

    run(go())


def test_each_of_n_answers_has_a_seed_of_its_own(tmp_path):
    seeds = []

    class Seen(ToyModel):
        async def answer(self, call, episode, told):
            seeds.append(call.used.get("seed"))
            return await super().answer(call, episode, told)

    async def go():
        async with agent_of(tmp_path, Seen(), seed=None) as agent:
            await agent.chat(n=3, seed=7)

    run(go())
    assert sorted(seeds) == [7, 8, 9]


def test_without_training_all_settings_are_honoured(tmp_path):
    async def go():
        model = ToyModel()
        model.honours = None
        async with agent_of(tmp_path, model) as agent:
            await agent.chat(**ODD, extra_body={"chat_template_kwargs": {"thinking": True}, "min_p": 0.1})
            used = agent.calls[0].asked.used
            assert {name: used[name] for name in ODD} == ODD
            assert used["min_p"] == 0.1
            assert agent.episode.share()["lost"] == {}

    run(go())


# ---- other models


def test_a_model_that_is_not_ours_is_passed_on_as_it_is_and_not_recorded(tmp_path):
    """The judge is a double: an endpoint that says back what it was asked."""
    asked = []

    async def answer(request):
        asked.append((request.path, request.headers["Authorization"], await request.json()))
        return web.json_response({"data": [{"embedding": [1.0]}], "object": "list", "choices": [], "model": "judge"})

    async def go():
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        judge = Passed(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", "its key")
        async with agent_of(tmp_path, passed={"judge": judge}, settings=Settings("strict", 1.0)) as agent:
            embedded = await agent.openai.embeddings.create(model="judge", input="x", encoding_format="float")
            assert embedded.data[0].embedding == [1.0]
            await agent.openai.chat.completions.create(model="judge", messages=HELLO, top_p=0.1)
            assert [model.id for model in (await agent.openai.models.list()).data] == ["toy", "judge"]
            assert (agent.calls, agent.episode.turns) == ([], 0)
            await agent.gateway.end("e")
            with pytest.raises(openai.PermissionDeniedError, match="the episode has ended"):
                await agent.openai.chat.completions.create(model="judge", messages=HELLO)
        await runner.cleanup()
        assert [(path, key) for path, key, _ in asked] == [
            ("/v1/embeddings", "Bearer its key"),
            ("/v1/chat/completions", "Bearer its key"),
        ]
        assert asked[1][2]["top_p"] == 0.1
        passed = [line for line in lines_of(tmp_path) if "passed" in line]
        assert [(line["passed"], line["status"]) for line in passed] == [("judge", 200), ("judge", 200)]

    run(go())
