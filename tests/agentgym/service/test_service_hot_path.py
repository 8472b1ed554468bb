"""What every step goes through."""

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
from agentgym.service.protocol.frames import KEPT_ANSWERS, ServiceLimits, text_of_json
from agentgym.service.server import slots
from agentgym.service.worker.protocol_handler import AgentgymHandler, CallRunner, SessionInfo
from agentgym.service.worker.websocket import PING, TEXT, Connection, encoded

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
            client.sendall(encoded(TEXT, b"x" * size, masked=True))
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
        ping = encoded(PING, b"hello", masked=True)
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
def test_a_step_of_openenv_is_answered_in_json_that_any_client_reads(said, told, reward, terminated, truncated, info):
    handler = handler_of(OpenEnvHandler, Reply())
    handler.play.env.outcome_ = [{"role": "user", "content": told}], reward, terminated, truncated, info
    handler.answer('{"type": "reset"}')
    answer = handler.answer(json.dumps({"type": "step", "data": {"message": said}}))
    assert answer.isascii()
    found = json.loads(answer, parse_constant=pytest.fail)["data"]
    assert found["reward"] == (float(reward) if math.isfinite(reward) else None)
    assert found["observation"]["messages"][0]["content"] == told


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
