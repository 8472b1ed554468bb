"""The handler of sandboxes, without a connection: whatever is asked is answered, once. With one: `test_sandbox_remote.py`."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.sandbox.served import Most, ServedSandbox, Total
from agentgym.service.protocol.frames import CODES, ServiceLimits
from agentgym.service.protocol.sandbox_frames import GUEST_CALLS, OWN_CALLS
from agentgym.service.server.env_server import sandbox_spec
from agentgym.service.server.slots import Slot, make_memory, map_memory
from agentgym.service.worker.protocol_handler import CallRunner, SessionInfo
from agentgym.service.worker.sandbox_handler import SandboxHandler

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({name for takes in (GUEST_CALLS | OWN_CALLS).values() for name in takes} | {"data"}))
REQUESTS = st.fixed_dictionaries(
    {"id": st.integers(0, 3) | VALUES, "call": st.sampled_from([*GUEST_CALLS, *OWN_CALLS]) | VALUES}
)


@pytest.fixture(scope="module")
def memory():
    descriptor = make_memory(1)
    yield map_memory(descriptor)
    os.close(descriptor)


@pytest.fixture
def handler(memory):
    return new_handler(memory)


def new_handler(memory):
    """One that can start no sandbox: there is no such back end."""
    info = SessionInfo("session", "~sandbox", sandbox_spec({}), ServiceLimits())
    return SandboxHandler(ServedSandbox("none", Most()), CallRunner(Slot(memory, 0)), info)


def ask(handler, **request):
    return json.loads(handler.answer(json.dumps(request)))


@given(st.lists(st.builds(lambda base, more: {**more, **base}, REQUESTS, st.dictionaries(NAMES, VALUES)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_request_is_answered(memory, requests):
    handler = new_handler(memory)
    for request in requests:
        answer = json.loads(handler.answer(json.dumps(request)))
        assert set(answer) in ({"id", "result"}, {"id", "error"})
        if "error" in answer:
            assert answer["error"]["code"] in CODES


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_is_answered(memory, text):
    assert "error" in json.loads(new_handler(memory).answer(text))


def test_a_request_is_run_once_and_its_answer_kept(handler):
    first = ask(handler, id=1, call="start", spec={"rootfs": "/"}, run="")
    assert "no setting 'rootfs'" in first["error"]["message"]
    assert ask(handler, id=1, call="close") == first, "whatever it asks now"
    assert not handler.ended
    assert ask(handler, id=2, call="close") == {"id": 2, "result": {}}
    assert handler.ended


def test_a_sandbox_that_cannot_be_started_ends_the_session_and_names_what_is_built(handler):
    answer = ask(handler, id=1, call="start", spec={}, run="mine")
    assert (answer["error"]["code"], answer["error"]["fatal"], handler.ended) == ("SANDBOX_ERROR", True, True)
    assert "Built here: none" in answer["error"]["message"]


def test_a_server_has_a_total_for_all_sandboxes_and_a_request_beyond_it_finds_it_full():
    descriptor = make_memory(4)
    slots = map_memory(descriptor)
    total = Total(cpus=2.5, memory=3 << 30, count=3)
    info = SessionInfo("session", "~sandbox", sandbox_spec({}), ServiceLimits())

    def start(slot, **spec):
        handler = SandboxHandler(ServedSandbox("none", Most(), total), CallRunner(Slot(slots, slot)), info)
        return ask(handler, id=1, call="start", spec=spec, run="")["error"]["code"], handler.ended

    tried, full = ("SANDBOX_ERROR", True), ("CAPACITY", True)  # there is no back end "none"
    assert start(0, cpus=1.0, memory=1 << 30) == tried
    assert start(1, cpus=1.0, memory=1 << 30) == tried
    assert start(2, cpus=1.0, memory=1 << 20) == full
    assert start(2, cpus=0.5, memory=2 << 30) == full
    assert start(2, cpus=0.5, memory=1 << 30) == tried
    assert start(3, cpus=0.1, memory=1 << 20) == full
    Slot(slots, 0).clear()  # the session ended
    assert start(3, cpus=0.1, memory=1 << 20) == tried
    assert start(0, cpus=3.0) == ("BAD_REQUEST", False), "more than all together may have is never waited for"
    os.close(descriptor)


@pytest.mark.parametrize(
    "spec",
    [
        {"memory": 1.5},
        {"memory": True},
        {"pids": -1},
        {"cpus": float("nan")},
        {"env": [1]},
        {"image": 3},
        {"network": "yes"},
        {"network": True},
        {"disk": 1 << 50},
        {"start_timeout": "soon"},
    ],
)
def test_a_spec_that_cannot_be_is_refused_and_another_may_be_tried(handler, spec):
    answer = ask(handler, id=1, call="start", spec=spec, run="")
    assert (answer["error"]["code"], handler.ended) == ("BAD_REQUEST", False)
    assert next(iter(spec)) in answer["error"]["message"]


def test_an_ending_server_starts_none(handler):
    handler.draining = True
    assert ask(handler, id=1, call="start", spec={}, run="")["error"]["code"] == "DRAINING"
    assert handler.ended
