"""What every step goes through is short, and says the same as the long way."""

import json
import math
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from service_harness import new_slot

from agentgym import Env
from agentgym.core.registration import EnvSpec
from agentgym.service.openenv.handler import OpenEnvHandler
from agentgym.service.protocol.frames import KEPT_ANSWERS, Refused, ServiceLimits, decoded, text_of_json
from agentgym.service.server import slots
from agentgym.service.worker.protocol_handler import AgentgymHandler, CallRunner, SessionInfo
from agentgym.service.worker.websocket import CLOSE, PING, TEXT, Connection, Frames, unmasked

WAIT = 20.0
LIMIT = 70_000
any_text = st.text(st.characters())  # surrogates too


class Reply(Env):
    """Answers with whatever was put into `outcome_`."""

    max_turns = 1000

    def reset(self, *, seed=None, options=None):
        self.turn, self.running = 0, True
        return [{"role": "user", "content": "?"}], {}

    def step(self, action):
        self.read(action)
        return self.outcome_


def handler_of(kind, env):
    return kind(env, CallRunner(new_slot()), SessionInfo("s", "reply", EnvSpec("reply", Reply), ServiceLimits()))


def client_frame(opcode, payload, mask, fin=True):
    size = len(payload)
    head = bytes((128 * fin | opcode,))
    if size < 126:
        head += bytes((128 | size,))
    elif size < 1 << 16:
        head += bytes((254,)) + size.to_bytes(2, "big")
    else:
        head += bytes((255,)) + size.to_bytes(8, "big")
    return head + mask + unmasked(payload, mask)


sizes = st.sampled_from([0, 5, 9, 10, 11, 124, 125, 126, 127, 130, 131, 65535, 65536])
whole = st.tuples(
    st.sampled_from([TEXT] * 4 + [PING, CLOSE, 0, 2]), sizes.map(bytes), st.sampled_from([True] * 3 + [False])
)
inner = client_frame(TEXT, b"inner", b"abcd")
halves = [
    client_frame(TEXT, b"." + inner, bytes(4))[:7],
    inner,
]  # the rest of a message is what looks like a message itself


@settings(max_examples=200, deadline=None)
@given(
    st.lists(whole, max_size=4),
    st.binary(min_size=4, max_size=4),
    st.none() | st.lists(st.integers(1, 200), max_size=4),
)
def test_bytes_in_any_pieces_are_the_same_messages(frames, mask, cuts):
    raw = [client_frame(opcode, payload, mask, fin) for opcode, payload, fin in frames]
    for limit in (10, 130, LIMIT):
        check_pieces(raw if cuts is None else cut(b"".join(raw), cuts), limit)


@pytest.mark.parametrize(
    "pieces", [halves, [inner + inner], [client_frame(TEXT, b"a", b"abcd", fin=False), inner], [b"", b"\x81"]]
)
def test_what_only_looks_like_one_whole_message_is_read_closely(pieces):
    check_pieces([piece for piece in pieces if piece], LIMIT)


def check_pieces(pieces, limit):
    def taken(reader, feed):
        found = []
        try:
            for piece in pieces:
                message = feed(reader, piece)
                while message is not None:
                    found.append(message)
                    message = reader.next()
        except Refused as refused:
            found.append(str(refused))
        return found

    def slowly(reader, piece):
        reader.buffer += piece
        return reader.next()

    assert taken(Frames(limit), Frames.take) == taken(Frames(limit), slowly)


def cut(data, sizes):
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in (*pieces, data) if piece]


class Counted(socket.socket):
    """Counts what it is asked for."""

    def __init__(self, sock):
        super().__init__(fileno=sock.detach())
        self.calls = []

    def recv(self, *args):
        self.calls.append("recv")
        return super().recv(*args)

    def sendall(self, *args):
        self.calls.append("send")
        return super().sendall(*args)


def test_a_step_is_one_read_and_one_write():
    client, server = socket.socketpair()
    with client, Counted(server) as counted:
        connection = Connection(counted, new_slot(), LIMIT)
        for size in (10, 125, 126, 40_000):
            client.sendall(client_frame(TEXT, b"x" * size, b"abcd"))
            assert connection.receive() == "x" * size
            connection.send("y" * size)
        assert counted.calls == ["recv", "send"] * 4


def test_a_ping_that_comes_in_pieces_is_no_message_that_takes_too_long():
    client, server = socket.socketpair()
    words = new_slot()
    with client, server:
        connection = Connection(server, words, LIMIT)
        reader = threading.Thread(target=connection.receive, daemon=True)
        reader.start()
        ping = client_frame(PING, b"hello", b"abcd")
        client.sendall(ping[:3])
        wait_for(words, slots.READING)
        client.sendall(ping[3:])
        client.settimeout(WAIT)
        assert client.recv(100)[2:] == b"hello"
        wait_for(words, slots.WAITING)
        client.close()
        reader.join(WAIT)
        assert not reader.is_alive()


def wait_for(words, state):
    end = time.monotonic() + WAIT
    while words.look()[0] != state:
        assert time.monotonic() < end, words.look()
        time.sleep(0.001)


@settings(max_examples=60, deadline=None)
@given(
    any_text,
    any_text,
    st.floats() | st.integers(-5, 5) | st.booleans(),
    st.booleans(),
    st.booleans(),
    st.dictionaries(any_text, st.integers() | any_text | st.floats(), max_size=2),
)
@example("", "", math.nan, False, False, {})
@example("", "", -math.inf, True, False, {})
def test_a_plain_step_of_openenv_is_answered_as_one_with_metadata_is(said, told, reward, terminated, truncated, info):
    plain, careful = handler_of(OpenEnvHandler, Reply()), handler_of(OpenEnvHandler, Reply())
    for handler in (plain, careful):
        handler.play.env.outcome_ = [{"role": "user", "content": told}], reward, terminated, truncated, info
        handler.answer('{"type": "reset"}')
    answer = plain.answer(json.dumps({"type": "step", "data": {"message": said}}))
    assert answer == careful.answer(json.dumps({"type": "step", "data": {"message": said, "metadata": {}}}))
    assert answer.isascii()
    wrong = json.loads(plain.answer(json.dumps({"type": "step", "data": {"message": said, "more": 1}})))
    assert wrong["data"]["code"] == "VALIDATION_ERROR"
    found = json.loads(answer, parse_constant=pytest.fail)["data"]
    assert found["reward"] == (float(reward) if math.isfinite(reward) else None)
    assert found["observation"]["messages"][0]["content"] == told


@pytest.mark.parametrize("text", ["[1, 2]", ' {"a": 1}\n', "1 2", "", "nul", "\ufeff1", '{"a": NaN}', "[" * 9, "1.5e3"])
def test_json_is_what_the_standard_library_takes(text):
    try:
        wanted = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            decoded(text)
    else:
        assert repr(decoded(text)) == repr(wanted)


def test_a_value_within_itself_is_no_answer():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="Circular"):
        text_of_json(value)


def test_the_last_answers_are_kept_also_after_a_long_list():
    env = Reply()
    env.outcome_ = [], 0.0, False, False, {}
    handler = handler_of(AgentgymHandler, env)
    handler.answer('{"id": 1, "call": "reset"}')
    long = 3 * KEPT_ANSWERS
    many = [{"id": id, "call": "step", "action": ""} for id in range(2, 2 + long)]
    first = json.loads(handler.answer(json.dumps(many)))
    assert json.loads(handler.answer(json.dumps(many))) == first  # all of them are kept while it may be asked for again
    handler.answer(json.dumps({"id": 2 + long, "call": "step", "action": ""}))
    again = [json.loads(handler.answer(json.dumps({"id": id, "call": "step"}))) for id in range(1, 3 + long)]
    assert [answer["id"] for answer in again if "result" in answer] == list(range(3 + long - KEPT_ANSWERS, 3 + long))


SERVER = """
import argparse, sys
from agentgym.cli import serve
parser = argparse.ArgumentParser()
serve.add_serve(parser.add_subparsers())
from agentgym.cli.serve import settings_of
settings = settings_of(parser.parse_args(["serve", "frozen_lake", "--kwargs", '{"view": "near"}', "--port", "0"]))
import agentgym.service.openenv.routes, agentgym.service.server.env_server
from agentgym.service.worker.protocol_handler import HANDLERS, handler_class
for name in HANDLERS:
    handler_class(name)
assert settings.envs["frozen_lake"].kwargs["view"] == "near"
print(sorted({"numpy", "gymnasium", "agentgym_envs"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_the_front_holds_no_environment_in_memory():
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
