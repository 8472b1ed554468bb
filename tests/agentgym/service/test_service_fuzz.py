"""Over 10,000 inputs that no client should send: at the parsers themselves, and over real connections to one server beside which
a session plays on. Nothing of it ends a worker, keeps a slot, or keeps anybody waiting."""

import asyncio
import collections
import contextlib
import http.client
import itertools
import json
import random
import socket
import threading
import tracemalloc

import pytest
from chaos_envs import Chaos
from chaos_harness import SECONDS, Raw, quiet, serving_command, settled
from fuzz_inputs import BYTES, FRAMES, OPENENV_TEXTS, REQUESTS_OF_HTTP, TEXTS, frame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_harness import new_slot

import agentgym
from agentgym.core.registration import spec
from agentgym.service.openenv.handler import OpenEnvHandler
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import Refused, ServiceLimits
from agentgym.service.worker.protocol_handler import AgentgymHandler, CallRunner, SessionInfo
from agentgym.service.worker.websocket import CLOSE, PING, TEXT, Connection, Frames

LIMIT = 5000
counted = collections.Counter()  # inputs by kind


def fuzzed(examples, **strategies):
    """A property, tried with so many examples however slow the machine is."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return lambda test: settings(max_examples=examples, deadline=None, suppress_health_check=checks)(
        given(**strategies)(test)
    )


# ---- the parsers


def _read(data, cuts, take):
    """What a reader finds in bytes that come in pieces, and how it ends."""
    reader, found, held = Frames(LIMIT), [], 0
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for begin, end in itertools.pairwise(edges):
            if begin == end:
                continue
            if take:
                message = reader.take(data[begin:end])
            else:
                reader.buffer += data[begin:end]
                message = reader.next()
            while message is not None:
                found.append(message)
                message = reader.next()
            held = max(held, len(reader.buffer))
    except Refused as refused:
        return found, refused.code
    return found, "whole" if held <= LIMIT + 14 else "holds too much"


@fuzzed(800, data=BYTES, cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_bytes_are_the_same_messages_however_they_are_cut(data, cuts):
    counted["bytes at the parser"] += 1
    whole = _read(data, [], take=False)
    assert whole[1] in ("whole", "BAD_FRAME", "TOO_LARGE")
    assert _read(data, cuts, take=True) == _read(data, cuts, take=False) == whole
    assert all(opcode in (TEXT, CLOSE, PING, PING + 1) and len(payload) <= LIMIT for opcode, payload in whole[0])


@fuzzed(60, data=st.lists(FRAMES, min_size=1, max_size=4).map(b"".join), seed=st.integers(0, 1 << 32))
def test_damaged_bytes_are_the_same_messages_however_they_are_cut(data, seed):
    dice = random.Random(seed)
    for _ in range(100):
        counted["damaged bytes at the parser"] += 1
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(damaged))
            if dice.random() < 0.8:
                damaged[at] ^= 1 << dice.randrange(8)
            else:
                del damaged[at : at + dice.randint(1, len(damaged) - at)]
                damaged += bytes(dice.randrange(3) for _ in range(not damaged))
        found = _read(bytes(damaged), [], take=False)
        assert found[1] in ("whole", "BAD_FRAME", "TOO_LARGE")
        assert _read(bytes(damaged), [dice.randrange(100), dice.randrange(10_000)], take=True) == found


def test_a_message_in_ever_so_many_fragments_takes_no_more_memory_than_whole():
    """Also where they are empty, which no limit of a message's size ends."""
    for payload, count in ((b"", 12_000), (b"xy", LIMIT // 2)):
        reader = Frames(LIMIT)
        reader.buffer += frame(False, 0, TEXT, True, bytes(4), b"", 0, 0)
        assert reader.next() is None
        piece = frame(False, 0, 0, True, bytes(4), payload, 0, 0)
        tracemalloc.start()
        try:
            for _ in range(count):
                reader.buffer += piece
                assert reader.next() is None
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held < 8 * LIMIT, payload


@fuzzed(300, data=BYTES)
def test_a_connection_gives_texts_until_it_is_over_or_refused(data):
    counted["bytes at a connection"] += 1
    ours, theirs = socket.socketpair()
    with ours:
        connection = Connection(theirs, new_slot(), LIMIT)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Refused):
            while (text := connection.receive()) is not None:
                text.encode()
        connection.close()


def wired(made):
    session = SessionInfo("session", "chaos", spec("chaos_envs:Chaos"), ServiceLimits())
    return made(Chaos(), CallRunner(new_slot()), session)


@fuzzed(120, texts=st.lists(TEXTS, min_size=8, max_size=12))
def test_agentgyms_wire_answers_whatever_it_is_told(texts):
    handler = wired(AgentgymHandler)
    handler.answer('[{"id": 1, "call": "init", "task": {"id": "a"}}, {"id": 2, "call": "reset"}]')
    for text in texts:
        counted["agentgym/1 at the handler"] += 1
        answers = json.loads(handler.answer(text))
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["id"] is None or type(answer["id"]) is int
            assert "result" in answer or answer["error"]["code"] in frames.CODES
    assert not handler.ended


@fuzzed(120, texts=st.lists(OPENENV_TEXTS, min_size=8, max_size=12))
def test_openenvs_wire_answers_whatever_it_is_told(texts):
    handler = wired(OpenEnvHandler)
    for text in texts:
        counted["OpenEnv at the handler"] += 1
        assert json.loads(handler.answer(text)).keys() == {"type", "data"}
    assert not handler.ended


# ---- a server


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A server with few slots, none of which a test may keep; nobody of it dies, and its log has no traceback."""
    limits = ["--resume-timeout", "0.2", "--message-timeout", "5", "--step-timeout", "30"]
    folder = tmp_path_factory.mktemp("fuzz")
    with serving_command(
        folder, "chaos_envs:Chaos", "--max-sessions", "12", "--max-message", str(LIMIT), *limits
    ) as server:
        asyncio.run(_one(server))
        before, zygote = quiet(server), server.zygote
        yield server
        settled(server, before)
        assert server.zygote == zygote
        assert server.ended()["WORKER_DIED"] == server.ended()["DEADLINE"] == 0
        log = (folder / "log").read_text()
        assert "Traceback" not in log, log[-5000:]


async def _one(command):
    raw = await Raw.open(command.port, "/envs/Chaos/session")
    await raw.receive()
    await raw.ask({"id": 1, "call": "close"})
    await raw.close()
    raw = await Raw.open(command.port, "/ws")
    raw.send({"type": "close"})
    await raw.ended()
    await raw.close()


@pytest.fixture(scope="module")
def neighbour(command):
    """A session that plays on, and is compared with one here. Its value counts the steps."""
    over, steps, wrong = threading.Event(), collections.Counter(), []

    async def play():
        there, here = agentgym.make(f"{command.url}/Chaos"), Chaos()
        while not over.is_set():
            task = here.tasks[steps["episodes"] % 100]
            here.init(task)
            await there.init(task)
            assert await there.reset(seed=1) == here.reset(seed=1)
            for turn in range(20):
                assert await there.step(f"add {turn}") == here.step(f"add {turn}")
                steps["steps"] += 1
                await asyncio.sleep(0.02)
            steps["episodes"] += 1
        await there.close()

    def run():
        try:
            asyncio.run(play())
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield steps
    over.set()
    thread.join(SECONDS)
    assert not wrong, wrong
    assert steps["episodes"] > 0


async def _at_once(number, *tasks):
    door = asyncio.Semaphore(number)

    async def one(task):
        async with door:
            return await asyncio.wait_for(task, SECONDS)

    return await asyncio.gather(*map(one, tasks))


async def _session(command, path):
    """A session at once, or as soon as there is a slot."""
    async with asyncio.timeout(SECONDS):
        while True:
            raw = await Raw.open(command.port, path)
            if raw.status == 101:
                return raw
            await raw.close()
            await asyncio.sleep(0.05)


async def _bytes_in_session(command, path, data):
    raw = await _session(command, path)
    with contextlib.suppress(ConnectionError):
        raw.write(data)
        raw.writer.write_eof()
    with contextlib.suppress(ConnectionError, Refused):
        await raw.ended()
    raw.abort()


@fuzzed(12, many=st.lists(BYTES, min_size=25, max_size=25))
def test_bytes_over_connections(command, neighbour, many):
    counted["bytes over connections"] += len(many)
    paths = ["/envs/Chaos/session", "/ws", "/Chaos/ws"]
    tasks = [_bytes_in_session(command, paths[index % 3], data) for index, data in enumerate(many)]
    asyncio.run(_at_once(6, *tasks))


@fuzzed(12, requests=st.lists(TEXTS, min_size=60, max_size=60))
def test_requests_over_a_connection(command, neighbour, requests):
    counted["agentgym/1 over connections"] += len(requests)

    async def play():
        raw = await _session(command, "/envs/Chaos/session")
        await raw.receive()
        await raw.ask([{"id": 1, "call": "init", "task": {"id": "a"}}, {"id": 2, "call": "reset"}])
        for text in requests:
            answer = await raw.ask(text.encode(errors="replace").decode()[: LIMIT // 4])
            assert isinstance(answer, list) or not answer.get("error", {}).get("fatal"), answer
        await raw.close()

    asyncio.run(play())


@fuzzed(12, asked=st.lists(OPENENV_TEXTS, min_size=60, max_size=60))
def test_openenvs_frames_over_a_connection(command, neighbour, asked):
    counted["OpenEnv over connections"] += len(asked)

    async def play():
        raw = await _session(command, "/ws")
        for text in asked:
            answer = await raw.ask(text.encode(errors="replace").decode()[:1000])
            assert answer.keys() == {"type", "data"}
        raw.send({"type": "close"})
        await raw.close()

    asyncio.run(play())


# ---- HTTP


async def _status(command, data):
    """The status of the answer to a request that is the last of its connection; None: there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", command.port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        writer.write_eof()
        while piece := await reader.read(1 << 16):
            answer += piece
    writer.transport.abort()
    words = answer[:100].split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None


@pytest.mark.parametrize("path", ["/health", "/nowhere"])
def test_an_expectation_that_is_no_text_is_refused(command, path):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", command.port, timeout=SECONDS)) as client:
        client.putrequest("GET", path)
        client.putheader("Expect", b"\xdf")
        client.endheaders()
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (417, "EXPECTATION_FAILED")


@fuzzed(25, many=st.lists(REQUESTS_OF_HTTP, min_size=40, max_size=40))
def test_requests_of_http(command, neighbour, many):
    counted["HTTP"] += len(many)
    found = asyncio.run(_at_once(8, *(_status(command, data) for data in many)))
    bad = [(status, data) for status, data in zip(found, many, strict=True) if status in (500, 502, 504)]
    # An environment that raises over /reset or /step is an honest 500.
    assert not [pair for pair in bad if b" /reset" not in pair[1] and b" /step" not in pair[1]], bad


def _mangled(token, how, at, letter):
    if how == "cut":
        return token[: at % len(token)]
    if how == "changed":
        at %= len(token)
        return token[:at] + letter + token[at + 1 :]
    return letter.join(token.rpartition(".")) if how == "stretched" else letter


@fuzzed(
    25,
    many=st.lists(
        st.tuples(
            st.sampled_from(["cut", "changed", "stretched", "other"]),
            st.integers(0, 99),
            st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), min_size=1, max_size=30),
            st.booleans(),
        ),
        min_size=20,
        max_size=20,
    ),
)
def test_resume_tokens(command, neighbour, many):
    async def knock():
        raw = await _session(command, "/envs/Chaos/session")
        hello = await raw.receive()
        for how, at, letter, in_header in many:
            token = _mangled(hello["resume"], how, at, letter)
            if token == hello["resume"] or not token.strip():
                continue
            counted["resume tokens"] += 1
            quoted = "".join(f"%{byte:02x}" for byte in token.encode())
            header = f"X-Agentgym-Resume: {token.encode().decode('latin-1')}\r\n" if in_header else ""
            path = "/envs/Chaos/session" + ("" if in_header else f"?resume={quoted}")
            knocking = await Raw.open(command.port, path, header)
            assert knocking.status in (409, 400), (token, knocking.status)
            await knocking.close()
        assert (await raw.ask({"id": 1, "call": "tools"}))["result"] == {"tools": []}
        await raw.ask({"id": 2, "call": "close"})
        await raw.close()

    asyncio.run(knock())


def test_it_was_ten_thousand(request):
    names = {item.name for item in request.session.items if item.fspath == request.node.fspath}
    if len(names) < 12:
        pytest.skip("some were left out")
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counted.items()))
    assert counted.total() >= 10_000
