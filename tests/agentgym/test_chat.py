"""The chat policy. The server is a fault double: a real HTTP server on this machine that fails in the way a test asks for."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentgym.core.messages import user
from agentgym.policies import endpoints
from agentgym.policies.base import EndEpisode, EndpointError
from agentgym.policies.chat import ChatPolicy, url_of

HELLO = [user("hello")]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.02)


def completion(**message):
    return {
        "choices": [{"message": {"role": "assistant", "content": "hi", **message}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "details": {"x": 1}},
    }


def event(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def end(reason="stop"):
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


class Server:
    """Answers request i with the i-th fault, and every later one with a good completion."""

    def __init__(self, *faults, **message):
        self.faults = list(faults)
        self.message = message
        self.requests = []

    async def answer(self, request):
        self.requests.append((time.monotonic(), request.headers.copy(), await request.json()))
        fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            return web.json_response(completion(**self.message))
        if isinstance(fault, list):
            return await self.stream(request, fault)
        if isinstance(fault, dict):
            return web.json_response(fault)
        if fault == "hang":
            await asyncio.sleep(5)
        if fault == "garbage":
            return web.Response(text="<html>not JSON</html>")
        if fault == "no choices":
            return web.json_response({"choices": []})
        if fault == "cut":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            request.transport.close()
            return response
        if fault == "drop":
            request.transport.close()
            return web.Response()
        status, headers, text = fault
        return web.Response(status=status, headers=headers, text=text)

    async def stream(self, request, events):
        """Server-sent events; a text is written as it is, a number is seconds of silence, "drop" breaks the connection."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in events:
            if each == "drop":
                request.transport.close()
                return response
            if isinstance(each, float):
                await asyncio.sleep(each)
            elif isinstance(each, bytes):
                await response.write(each)
            else:
                await response.write(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode())
        await response.write_eof()
        return response

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def ask(server, tools=(), messages=HELLO, **settings):
    return asked(server, tools, messages, **settings)[0]


def asked(server, tools=(), messages=HELLO, **settings):
    """The reply, and what the policy counted."""

    async def go():
        async with server.running() as url:
            policy = ChatPolicy("m", url, **{"timeout": 0.5, **settings})
            return await policy.act(messages, tools), policy.calls

    return asyncio.run(go())


def test_it_asks_for_a_completion_and_returns_the_message():
    server = Server()
    reply = ask(server, temperature=0.5, max_tokens=9, seed=4, extra={"top_p": 0.9}, api_key="k")
    assert reply.message == {"role": "assistant", "content": "hi"}
    assert reply.usage == {"prompt_tokens": 3, "completion_tokens": 1}
    assert reply.tokens is None
    [(_, headers, body)] = server.requests
    assert body == {"model": "m", "messages": HELLO, "temperature": 0.5, "max_tokens": 9, "seed": 4, "top_p": 0.9}
    assert headers["Authorization"] == "Bearer k"


def test_each_answer_of_a_conversation_has_its_own_seed():
    server = Server()
    later = [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO]
    ask(server, messages=later, seed=4)
    ask(server, messages=later, seed=4, extra={"seed": 9})
    assert [body["seed"] for _, _, body in server.requests] == [5, 9]


def test_tool_calls_and_reasoning_are_kept_and_tools_are_sent():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    server = Server(content=None, tool_calls=[call], reasoning_content="because", refusal=None)
    reply = ask(server, tools=tools)
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "because"}
    assert server.requests[0][2]["tools"] == tools


def test_the_key_comes_from_the_environment_unless_given(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from env")
    server = Server()
    ask(server)
    assert server.requests[0][1]["Authorization"] == "Bearer from env"
    server = Server()
    ask(server, api_key="")
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize(
    "fault",
    [(500, {}, "oops"), (503, {}, ""), (408, {}, ""), (409, {}, ""), "cut", "drop", "garbage", "no choices", "hang"],
)
def test_passing_failures_are_retried(fault):
    server = Server(fault)
    assert ask(server, retries=1).message["content"] == "hi"
    assert len(server.requests) == 2


def test_retry_after_is_honoured():
    server = Server((429, {"Retry-After": "0.7"}, "slow down"))
    ask(server, timeout=2)
    first, second = (when for when, _, _ in server.requests)
    assert 0.7 <= second - first < 1.5


def test_a_retry_after_beyond_patience_is_an_error():
    with pytest.raises(EndpointError, match=r"slow down; it asks to wait 3600 s"):
        ask(Server((429, {"Retry-After": "3600"}, "slow down")))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((500, {}, "oops"), r"answered 500: oops \(2 tries\)"),
        ("hang", r"no answer within 0.2 s \(2 tries\)"),
        ("garbage", r"no chat completion .*not JSON"),
        ("cut", r"\(2 tries\)"),
    ],
)
def test_what_does_not_pass_is_an_error_that_names_it(fault, words):
    with pytest.raises(EndpointError, match=words):
        ask(Server(*[fault] * 2), retries=1, timeout=0.2)


def test_a_refused_connection_is_an_error_that_names_the_endpoint():
    async def go():
        await ChatPolicy("m", "http://127.0.0.1:9/v1", retries=0).act(HELLO, [])

    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1/chat/completions"):
        asyncio.run(go())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_other_refusals_are_not_retried_and_carry_the_servers_words(status):
    server = Server((status, {}, "no model called m"))
    with pytest.raises(EndpointError, match=f"answered {status}: no model called m"):
        ask(server)
    assert len(server.requests) == 1


def test_a_model_that_knows_max_completion_tokens_alone_gets_that_from_then_on():
    text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    server = Server((400, {}, json.dumps({"error": {"message": text, "code": "unsupported_parameter"}})))

    async def go():
        async with server.running() as url:
            policy = ChatPolicy("m", url, max_tokens=7, retries=0)
            return [await policy.act(HELLO, []) for _ in range(2)]

    assert [reply.message["content"] for reply in asyncio.run(go())] == ["hi", "hi"]
    limits = [{name: body[name] for name in body if name.startswith("max")} for _, _, body in server.requests]
    assert limits == [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_completion_tokens": 7}]


def test_a_refusal_of_max_completion_tokens_itself_is_an_error():
    text = "Unsupported parameter. Use 'max_completion_tokens' instead."
    server = Server(*[(400, {}, text)] * 3)
    with pytest.raises(EndpointError, match="answered 400: Unsupported"):
        ask(server, max_tokens=7)
    assert len(server.requests) == 2


def test_a_conversation_that_is_too_long_ends_the_episode():
    text = json.dumps({"error": {"code": "context_length_exceeded"}})
    with pytest.raises(EndEpisode, match="context"):
        ask(Server((400, {}, text)))


def test_requests_of_one_loop_share_connections_and_the_loop_closes_them(recwarn):
    peers = set()

    class Watching(Server):
        async def answer(self, request):
            peers.add(request.transport.get_extra_info("peername"))
            return await super().answer(request)

    async def go():
        async with Watching().running() as url:
            for i in range(5):
                await ChatPolicy(f"m{i}", url).act(HELLO, [])

    asyncio.run(go())
    asyncio.run(go())
    assert len(peers) == 2, "one connection for each loop"
    assert not [w for w in recwarn if "Unclosed" in str(w.message)]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://x/v1", "http://x/v1/chat/completions"),
        ("http://x/v1/", "http://x/v1/chat/completions"),
        ("https://x:8/v1/chat/completions/", "https://x:8/v1/chat/completions"),
        ("http://x/deployment?api-version=3", "http://x/deployment/chat/completions?api-version=3"),
    ],
)
def test_a_base_url_may_be_written_in_many_ways(given, url):
    assert url_of(given) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("localhost:8000/v1", r"must begin with http:// .* did you mean http://localhost:8000/v1\?"),
        ("", "must begin with http"),
        ("http:///v1", "no host"),
        ("http://x:port/v1", "no host and port"),
        ("http://me:hidden@x/v1", "password or key in it: put the key in OPENAI_API_KEY"),
        ("http://x/v1?api_key=hidden", "password or key in it"),
    ],
)
def test_a_base_url_that_cannot_be_is_refused(given, words):
    with pytest.raises(ValueError, match=words) as refused:
        ChatPolicy("m", given)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("fault", [(401, {}, "no such key: sk-hidden"), (500, {}, "sk-hidden"), {"error": "sk-hidden"}])
def test_the_key_is_in_no_error(fault):
    with pytest.raises(EndpointError) as failed:
        ask(Server(fault), api_key="sk-hidden", retries=0)
    assert "sk-hidden" not in str(failed.value)
    assert "[the key]" in str(failed.value)


def test_a_key_is_stripped_and_must_fit_into_a_header():
    server = Server()
    ask(server, api_key=" k\n")
    assert server.requests[0][1]["Authorization"] == "Bearer k"
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as refused:
        ChatPolicy("m", "http://x", "hid\nden")
    assert "hid" not in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((401, {}, "who"), "no key was sent"),
        ((307, {"Location": "https://elsewhere/v1"}, ""), "moved to https://elsewhere/v1"),
    ],
)
def test_refusals_say_what_to_do(fault, words, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(EndpointError, match=words):
        ask(Server(fault))


# ---- counts


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ((500, {}, ""), "500"),
        ((429, {"Retry-After": "0.1"}, ""), "429"),
        ("hang", "timeout"),
        ("drop", "connection"),
        ("cut", "cut"),
        ("garbage", "garbage"),
        ({"error": {"code": 429, "message": "behind the router"}}, "429"),
        ({"error": {"message": "what"}}, "garbage"),
        (completion(tool_calls=[{"function": {}}]), "garbage"),
        ([event(content="h"), "drop"], "cut"),
        ([event(content="h")], "cut"),
        ([event(content="h"), "{no JSON"], "garbage"),
        ([event(content="h"), {"error": {"code": 503}}], "503"),
        (["[DONE]"], "garbage"),
        ([event(content="h"), 2.0, end()], "timeout"),
    ],
)
def test_each_cause_of_a_retry_is_counted(fault, cause):
    reply, calls = asked(Server(fault, fault), timeout=0.3, stream=isinstance(fault, list))
    assert reply.message["content"] == "hi"
    assert (calls.requests, calls.retries) == (3, {cause: 2})
    assert calls.usage == {"prompt_tokens": 3, "completion_tokens": 1}
    assert calls.waited > 0.01


def test_usage_has_one_form_whatever_the_endpoint_tells():
    told = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": None},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    expected = {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 4, "reasoning_tokens": 2}
    assert ask(Server({**completion(), "usage": told})).usage == expected
    assert ask(Server({**completion(), "usage": {"prompt_tokens": 3, "prompt_cache_hit_tokens": 2}})).usage == {
        "prompt_tokens": 3,
        "cached_tokens": 2,
    }
    assert ask(Server({**completion(), "usage": None})).usage == {}


def test_what_episodes_of_one_policy_wait_at_the_same_time_adds_up(monkeypatch):
    async def enter(self, again=False):
        await asyncio.sleep(0.01)
        return 1.0

    monkeypatch.setattr(endpoints.ConcurrencyLimiter, "enter", enter)

    async def go():
        async with Server().running() as url:
            policy = ChatPolicy("m", url)
            await asyncio.gather(*(policy.act(HELLO, []) for _ in range(5)))
            return policy.calls.waited

    assert asyncio.run(go()) == 5.0


def test_reasoning_counts_as_written_also_where_the_endpoint_counts_it_apart():
    """As xAI tells it, and fronts of Gemini."""
    told = {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135}
    apart = {**told, "completion_tokens_details": {"reasoning_tokens": 94}}
    assert ask(Server({**completion(), "usage": apart})).usage == {
        "prompt_tokens": 32,
        "completion_tokens": 103,
        "reasoning_tokens": 94,
    }
    assert ask(Server({**completion(), "usage": told})).usage == {"prompt_tokens": 32, "completion_tokens": 103}


def test_an_answer_that_was_cut_at_its_longest_says_so():
    cut = completion()
    cut["choices"][0]["finish_reason"] = "length"
    assert ask(Server(cut)).finish_reason == "length"
    assert ask(Server()).finish_reason == "stop"


class Busy(Server):
    """Takes so many requests at a time and refuses all beyond; every answer takes 10 ms."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.refused = self.busy = 0

    async def answer(self, request):
        self.busy += 1
        try:
            if self.busy > self.places:
                self.refused += 1
                return web.Response(status=429)
            await asyncio.sleep(0.01)
            return await super().answer(request)
        finally:
            self.busy -= 1


def test_an_endpoint_that_is_only_busy_answers_all_in_the_end_however_many_ask():
    server = Busy(2)

    async def go():
        async with server.running() as url:
            policies = [ChatPolicy("m", url, timeout=20, retries=1) for _ in range(60)]
            await asyncio.gather(*(policy.act(HELLO, []) for policy in policies))
            return [policy.calls for policy in policies]

    calls = asyncio.run(go())
    assert len(server.requests) == 60
    assert sum(each.retries.get("429", 0) for each in calls) == server.refused > 60
    assert sum(each.requests for each in calls) == 60 + server.refused
    assert max(each.requests for each in calls) > 2, "more than the retries alone allow"


def test_an_endpoint_that_is_too_busy_for_anybody_is_an_error():
    with pytest.raises(EndpointError, match=r"answered 429: .*\(3 tries\)"):
        ask(Busy(0), retries=2)


def test_one_that_is_refused_for_ever_while_others_are_answered_gives_up_after_ten_times_its_retries():
    class Choosy(Server):
        async def answer(self, request):
            if (await request.json())["model"] == "unloved":
                return web.Response(status=429, text="not you")
            return await super().answer(request)

    async def go():
        async with Choosy().running() as url:
            loved, unloved = ChatPolicy("m", url), ChatPolicy("unloved", url, retries=1)

            async def goes_on():
                while True:
                    await loved.act(HELLO, [])

            others = [asyncio.create_task(goes_on()) for _ in range(4)]
            with pytest.raises(EndpointError, match=r"not you \(\d+ tries\)"):
                await unloved.act(HELLO, [])
            for task in others:
                task.cancel()
            return unloved.calls.requests

    assert 3 <= asyncio.run(asyncio.wait_for(go(), 60)) <= 11


# ---- reasoning, streams


def test_reasoning_is_kept_but_not_sent_back_unless_asked_for():
    said = {"role": "assistant", "content": "a", "reasoning_content": "because", "reasoning": "so"}
    silent = {"role": "assistant", "content": None}
    server = Server()
    ask(server, messages=[*HELLO, said, silent])
    assert server.requests[0][2]["messages"] == [
        *HELLO,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": ""},
    ]
    server = Server()
    ask(server, messages=[*HELLO, said], send_reasoning=True)
    assert server.requests[0][2]["messages"] == [*HELLO, said]


def test_a_stream_is_put_together():
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    first = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    server = Server(
        [
            b": a comment keeps the line open\n\n",
            event(role="assistant", content=""),
            event(reasoning_content="be"),
            event(reasoning_content="cause"),
            event(content="h\u00e9"),
            event(content="llo"),
            event(tool_calls=[first]),
            event(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
            event(tool_calls=[{"index": 1, "id": "2", "function": {"name": "g", "arguments": "{}"}}]),
            event(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
            end("tool_calls"),
            usage,
            "[DONE]",
        ]
    )
    reply, calls = asked(server, stream=True)
    assert reply.message == {
        "role": "assistant",
        "content": "h\u00e9llo",
        "reasoning_content": "because",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert (reply.finish_reason, calls.usage) == ("tool_calls", {"prompt_tokens": 3, "completion_tokens": 2})
    body = server.requests[0][2]
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_a_stream_may_be_cut_into_any_pieces_and_end_without_a_mark():
    whole = "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in (event(content="h\u00e9"), end())).encode()
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    assert ask(Server(pieces), stream=True, timeout=5).message["content"] == "h\u00e9"


def test_a_long_stream_outlives_the_timeout_as_long_as_it_is_not_silent():
    slow = [each for i in range(6) for each in (event(content=str(i)), 0.15)]
    reply, calls = asked(Server([*slow, end(), "[DONE]"]), stream=True, timeout=0.4)
    assert (reply.message["content"], calls.requests) == ("012345", 1)


def test_an_endpoint_that_does_not_stream_is_read_as_it_is():
    assert ask(Server(), stream=True).message["content"] == "hi"
