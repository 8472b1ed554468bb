"""Which request is a retry: it joins the one in flight, or is answered from the record; all others are sampled anew."""

import asyncio
import json
import socket
import struct

import aiohttp
import pytest
from gateway_cases import HELLO, Agent, agent_of, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from toy_model import ToyModel

from agentgym.gateway.calls import ModelAnswer, ModelCall
from agentgym.gateway.episodes import MOST_READ, Episode, Limits

BODY = {"model": "toy", "messages": HELLO}
AGAIN = {"x-stainless-retry-count": "1"}


async def until(said, seconds=5):
    for _ in range(int(seconds / 0.01)):
        if said():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


class Raw:
    """A client whose connection a test can cut where it likes."""

    def __init__(self, agent):
        self.url, self.session = f"{agent.gateway.url}/v1/chat/completions", None
        self.headers = {"Authorization": f"Bearer {agent.key}"}

    async def __aenter__(self):
        self.session = aiohttp.ClientSession(headers=self.headers, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def ask(self, body=BODY, **headers):
        async with self.session.post(self.url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def begin(self, **headers):
        """A stream of which the first text has come."""
        response = await self.session.post(self.url, json={**BODY, "stream": True}, headers=headers)
        await response.content.readuntil(b"\n\n")
        return response

    async def whole(self, response):
        return (await response.read()).decode()


def bytes_of(agent, body, *headers):
    """A request as it goes over the wire."""
    about = [f"Authorization: Bearer {agent.key}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: x", *about, "", ""]).encode() + body


async def lost(agent, times=1):
    """Ask, and be gone with a reset before any of the answer is read, although it was sent."""
    for _ in range(times):
        before = len(agent.calls)
        body = b'{"model": "toy", "messages": [{"role": "user", "content": "hello the lake"}]}'
        _, writer = await asyncio.open_connection("127.0.0.1", agent.gateway.port)
        writer.write(bytes_of(agent, body))
        await until(lambda before=before: len(agent.calls) > before)
        await asyncio.sleep(0.05)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    await asyncio.sleep(0.05)
    return body


def test_a_request_that_was_answered_is_sampled_anew_unless_its_client_says_that_it_tries_again(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent, Raw(agent) as client:
            first, second = await client.ask(), await client.ask()
            assert first["id"] != second["id"], "an agent may ask twice on purpose"
            assert first["choices"] != second["choices"]
            assert await client.ask(**AGAIN) == second
            assert len(agent.calls) == 2

    run(go())


def test_a_retry_joins_the_call_in_flight_with_the_text_so_far_and_the_rest(tmp_path):
    async def go():
        async with agent_of(tmp_path, ToyModel(pause=0.05)) as agent, Raw(agent) as client:
            first = await client.begin()
            await asyncio.sleep(0.2)
            streamed, whole = await asyncio.gather(client.begin(**AGAIN), client.ask(**AGAIN))
            text = await client.whole(first)
            assert await client.whole(streamed) == text
            assert whole["id"] in text
            assert len(agent.calls) == 1

    run(go())


def test_equal_requests_at_a_time_are_calls_of_their_own(tmp_path):
    async def go():
        async with agent_of(tmp_path, ToyModel(pause=0.01)) as agent, Raw(agent) as client:
            answers = await asyncio.gather(*(client.ask() for _ in range(5)))
            assert len({answer["id"] for answer in answers}) == len(agent.calls) == 5
            assert len({call.used["seed"] for call in (c.asked for c in agent.calls)}) == 5

    run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_does_not_stop_the_call_and_an_equal_request_gets_it(tmp_path, stream):
    async def go():
        async with agent_of(tmp_path, ToyModel(pause=0.03)) as agent, Raw(agent) as client:
            if stream:
                (await client.begin()).close()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.ask(), 0.05)
            await asyncio.sleep(0.02)
            joined = await client.ask()  # says nothing of being a retry
            assert len(agent.calls) == 1
            assert agent.episode.share()["lost"] == {}
            assert joined["choices"][0]["message"]["content"] == agent.calls[0].answer.message["content"]

    run(go())


@pytest.mark.parametrize("is_read", ["before its retry", "after its retry", "in two parts"])
def test_a_request_whose_client_has_gone_before_it_is_read_is_not_sampled_beside_its_retry(tmp_path, is_read):
    async def go():
        async with agent_of(tmp_path, ToyModel(pause=0.01)) as agent:
            request, address = bytes_of(agent, json.dumps(BODY).encode()), ("127.0.0.1", agent.gateway.port)
            sent = len(request) - 10 if is_read == "in two parts" else 0
            with socket.create_connection(address) as retry, socket.create_connection(address) as known:
                known.sendall(request[:sent])
                await asyncio.sleep(0.05)
                # The gateway does not run until all of it is there. It reads a new connection after those it knows.
                with socket.create_connection(address) as new:
                    gone = new if is_read == "after its retry" else known
                    gone.sendall(request[sent:])
                    gone.close()
                    retry.sendall(request)
                    retry.setblocking(False)
                    answer = await asyncio.get_running_loop().sock_recv(retry, 1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert len(agent.episode.by_id) == len(agent.calls) == 1
            assert agent.episode.share()["lost"] == {}

    run(go())


def test_an_episode_s_requests_are_read_a_few_at_a_time_and_the_others_stay_with_their_clients(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent:
            other = Agent(agent.gateway, *await agent.gateway.open("other"))
            address, body = ("127.0.0.1", agent.gateway.port), json.dumps(BODY).encode()
            begun = [(await asyncio.open_connection(*address))[1] for _ in range(MOST_READ)]
            for writer in begun:
                writer.write(bytes_of(agent, body)[:-1])
            await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection(*address)
            writer.write(bytes_of(agent, body + b" " * (24 << 20)))
            await asyncio.sleep(0.2)
            assert writer.transport.get_write_buffer_size() > 0
            await other.chat()
            assert agent.calls == []
            begun[0].write(bytes_of(agent, body)[-1:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert len(agent.calls) == 2
            for each in (*begun, writer):
                each.close()
            await other.close()

    run(go())


def test_a_call_that_nobody_comes_back_for_is_undelivered(tmp_path):
    async def go():
        async with agent_of(tmp_path, ToyModel(pause=0.01)) as agent, Raw(agent) as client:
            (await client.begin()).close()
            await until(lambda: agent.calls)
            share = agent.episode.share()
            assert share["lost"] == {"undelivered": agent.calls[0].sampled}
            assert share["trainable"] == 0

    run(go())


def test_answers_that_were_sent_and_not_read_wait_each_for_one_retry(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent, Raw(agent) as client:
            body = await lost(agent)
            assert agent.episode.share()["lost"] == {"undelivered": agent.calls[0].sampled}

            async def again():
                kind = {"Content-Type": "application/json", **client.headers}
                async with client.session.post(client.url, data=body, headers=kind) as response:
                    return await response.json()

            assert (await again())["choices"][0]["message"]["content"] == agent.calls[0].answer.message["content"]
            assert len(agent.calls) == 1
            assert agent.episode.share()["lost"] == {}
            await again()
            assert len(agent.calls) == 2

    run(go())


def test_an_idempotency_key_alone_says_which_request_is_which(tmp_path):
    async def go():
        async with agent_of(tmp_path) as agent, Raw(agent) as client:
            one = await client.ask(**{"Idempotency-Key": "one"})
            two = await client.ask(**{"Idempotency-Key": "two"})
            assert one["choices"] != two["choices"]
            assert await client.ask(**{"Idempotency-Key": "one"}) == one
            assert await client.ask(**{"Idempotency-Key": "two"}) == two
            assert len(agent.calls) == 2

    run(go())


class Failing(ToyModel):
    """A double of a fault that passes: the engine fails at one try."""

    def __init__(self, at):
        super().__init__()
        self.at, self.tries = at, 0

    async def answer(self, call, episode, told):
        self.tries += 1
        if self.tries == self.at:
            raise RuntimeError("a fault that passes")
        return await super().answer(call, episode, told)


def test_the_sdks_own_retries_after_an_error_are_one_call(tmp_path):
    async def go():
        async with agent_of(tmp_path, Failing(at=1), retries=2) as agent:
            assert (await agent.chat()).choices
            assert len(agent.calls) == agent.episode.turns == 1

    run(go())


def test_a_retry_after_an_error_does_not_get_the_answer_of_an_equal_request(tmp_path):
    async def go():
        async with agent_of(tmp_path, Failing(at=2), retries=2) as agent:
            first, second = await agent.chat(), await agent.chat()
            assert first.id != second.id
            assert len(agent.calls) == agent.episode.turns == 2

    run(go())


# ---- the rules, by any order of events


class Retries(RuleBasedStateMachine):
    """Clients ask, leave, are answered, and lose what they were sent, in any order. Beside it a list of what must be so."""

    @initialize()
    def begin(self):
        self.episode = Episode("e", "", Limits(), 0.0, 1e12, seed=1)
        self.open = {}  # client: its exchange
        self.exchanges = []
        self.free = set()  # exchanges that nobody waits for and nobody has
        self.clients = 0

    @rule(digest=st.sampled_from("ab"), again=st.booleans(), key=st.sampled_from([None, None, "k1", "k2"]))
    def ask(self, digest, again, key):
        found = self.episode.find(digest, again, key)
        same = [each for each in self.exchanges if each.digest == digest]
        if key is not None:
            assert found is next((each for each in same if each.key == key), None)
        elif waiting := [each for each in same if each in self.free]:
            assert found is waiting[0]
        else:
            assert found is (same[-1] if again and same else None)
        if found is None:
            found = self.episode.begin(digest, key, [ModelCall("m")], False)
            assert found.asked[0].used["seed"] not in {each.seed for each in self.exchanges}
            found.seed = found.asked[0].used["seed"]
            self.exchanges.append(found)
        self.clients += 1
        found.clients[self.clients] = False
        self.open[self.clients] = found
        self.free.discard(found)

    @precondition(lambda self: any(not each.done for each in self.exchanges))
    @rule(data=st.data())
    def answer(self, data):
        exchange = data.draw(st.sampled_from([each for each in self.exchanges if not each.done]))
        made = self.episode.tree.grown(
            exchange.number, ModelCall("m"), ModelAnswer({"role": "assistant", "content": ""}), ""
        )
        self.episode.answered(exchange, [made], 0.0)
        for client in exchange.clients:
            exchange.clients[client] = True

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lost=st.booleans())
    def leave(self, data, lost):
        client = data.draw(st.sampled_from(sorted(self.open)))
        exchange = self.open.pop(client)
        has_it = exchange.clients[client] and not lost
        self.episode.left(exchange, client, lost)
        if has_it:
            exchange.had = True
        if not getattr(exchange, "had", False) and exchange not in self.open.values():
            self.free.add(exchange)
        assert exchange.delivered is getattr(exchange, "had", False)


Retries.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRetries = Retries.TestCase
