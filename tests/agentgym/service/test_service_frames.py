"""What goes over the wire: WebSocket frames, and the requests in them."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_harness import new_slot

from agentgym.core.registration import spec
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import (
    Refused,
    ServiceLimits,
    check_request,
    json_of_text,
    rng_of_json,
    rng_to_json,
)
from agentgym.service.worker.protocol_handler import AgentgymHandler, CallRunner, SessionInfo
from agentgym.service.worker.websocket import CLOSE, PING, TEXT, Frames, close_frame, contains_close, encoded, unmasked


def masked(opcode, payload, mask=b"\x01\x02\x03\x04", fin=True):
    frame = bytearray(encoded(opcode, payload, masked=True))
    if not fin:
        frame[0] &= 127
    start = len(frame) - len(payload)
    frame[start - 4 : start] = mask
    frame[start:] = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
    return bytes(frame)


def messages_of(data, limit=1 << 20, chunk=None):
    reader, found = Frames(limit), []
    for begin in range(0, len(data), chunk or len(data) or 1):
        reader.buffer += data[begin : begin + (chunk or len(data))]
        while (message := reader.next()) is not None:
            found.append(message)
    return found


@given(st.lists(st.binary(max_size=300), max_size=5), st.binary(min_size=4, max_size=4), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_messages_come_out_as_they_went_in_however_they_are_cut(payloads, mask, chunk):
    data = b"".join(masked(TEXT, payload, mask) for payload in payloads)
    assert messages_of(data, chunk=chunk) == [(TEXT, payload) for payload in payloads]


@given(
    st.lists(st.tuples(st.sampled_from([TEXT, PING]), st.binary(max_size=120) | st.just(bytes(70_000))), max_size=4),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_a_close_frame_is_found_behind_others_and_nowhere_else(before, data):
    whole = b"".join(masked(opcode, payload) for opcode, payload in before)
    assert contains_close(whole + masked(CLOSE, b"\x03\xe8"))
    assert not contains_close(whole[: data.draw(st.integers(0, len(whole)))])


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536, 100_000])
def test_every_length_of_a_frame_is_read(size):
    payload = random.Random(size).randbytes(size)
    assert messages_of(masked(TEXT, payload)) == [(TEXT, payload)]
    server = Frames(1 << 20, masked=False)
    server.buffer += encoded(TEXT, payload)
    assert server.next() == (TEXT, payload)


def test_fragments_are_joined_and_control_frames_may_come_between():
    data = masked(TEXT, b"one ", fin=False) + masked(PING, b"?") + masked(0, b"two ", fin=False) + masked(0, b"three")
    assert messages_of(data) == [(PING, b"?"), (TEXT, b"one two three")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(TEXT, b"x"), "masked"),
        (masked(0, b"x"), "continuation"),
        (masked(TEXT, b"x", fin=False) + masked(TEXT, b"y"), "within"),
        (masked(2, b"x"), "text"),
        (b"\xc1" + masked(TEXT, b"x")[1:], "extensions"),
        (masked(PING, b"x" * 126), "control"),
        (masked(PING, b"x", fin=False), "control"),
    ],
)
def test_what_is_no_frame_ends_the_session(data, why):
    with pytest.raises(Refused, match=why) as refused:
        messages_of(data)
    assert refused.value.fatal
    assert refused.value.code == frames.BAD_FRAME


@pytest.mark.parametrize(
    "data",
    [masked(TEXT, b"x" * 11), masked(TEXT, b"x" * 6, fin=False) + masked(0, b"x" * 6), masked(TEXT, bytes(11))[:2]],
)
def test_a_message_over_the_limit_is_refused_by_its_length_alone(data):
    big = masked(TEXT, b"x" * 200)[:4] if len(data) == 2 else data
    with pytest.raises(Refused) as refused:
        messages_of(big, limit=10)
    assert refused.value.code == frames.TOO_LARGE


def test_a_mask_twice_is_none():
    data = random.Random(0).randbytes(1001)
    assert unmasked(unmasked(data, b"abcd"), b"abcd") == data
    assert messages_of(masked(CLOSE, close_frame(4408)[2:]))[0][1] == (4408).to_bytes(2, "big")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ([], "BAD_REQUEST"),
        ({"call": "step"}, "BAD_REQUEST"),
        ({"id": True, "call": "step"}, "BAD_REQUEST"),
        ({"id": 3, "call": "step"}, "BAD_REQUEST"),
        ({"id": 1}, "UNKNOWN_CALL"),
        ({"id": 1, "call": ["step"]}, "UNKNOWN_CALL"),
        ({"id": 1, "call": "steps"}, "UNKNOWN_CALL"),
        ({"id": 1, "call": "step", "actoin": ""}, "BAD_REQUEST"),
    ],
)
def test_a_bad_request_says_what_is_wrong(request_, code):
    with pytest.raises(Refused) as refused:
        check_request(request_, 1)
    assert (refused.value.code, refused.value.fatal) == (code, False)
    assert code in frames.CODES


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, "nul"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(Refused, match="not JSON"):
        json_of_text(text)


def test_a_generator_goes_over_the_wire_and_back():
    rng = random.Random(7)
    rng.gauss(0, 1)
    there = rng_of_json(json_of_text(frames.text_of_json(rng_to_json(rng))))
    assert [there.random(), there.gauss(0, 1)] == [rng.random(), rng.gauss(0, 1)]


@pytest.mark.parametrize("state", [None, [], [3, [1], None], [3, ["x"] * 625, None], [3, [-1] * 625, None], "abc"])
def test_a_bad_generator_is_refused(state):
    with pytest.raises(Refused):
        rng_of_json(state)


def test_text_with_half_a_surrogate_pair_is_carried():
    assert json_of_text(frames.text_of_json({"a": "\ud800"})) == {"a": "\ud800"}
    frames.text_of_json({"a": "\ud800"}).encode()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(-1, 9) | _JSON,
        "call": st.sampled_from([*frames.CALLS, "other"]) | _JSON,
        "task": st.fixed_dictionaries({"id": st.just("a")}, optional={"messages": _JSON, "x": _JSON}) | _JSON,
        "seed": _JSON,
        "options": st.fixed_dictionaries({}, optional={"task": _JSON}) | _JSON,
        "action": st.sampled_from(["echo", "raise", "end", "quit"]) | _JSON,
        "rng": _JSON,
    },
)


class Wired:
    """The handler and its environment, without a process around them."""

    def __init__(self):
        self.slot = new_slot()
        made = spec("service_faults:Faulty")
        session = SessionInfo("session", "faulty", made, ServiceLimits())
        self.handler = AgentgymHandler(made.make(), CallRunner(self.slot), session)


@given(st.lists(st.text(max_size=30) | st.lists(_REQUESTS | _JSON, max_size=3) | _REQUESTS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_text_is_answered_and_no_request_is_run_twice(messages):
    wired = Wired()
    answered = {}
    for message in messages:
        if wired.handler.ended:
            break
        text = message if isinstance(message, str) else json.dumps(message)
        answers = json.loads(wired.handler.answer(text))
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["id"] is None or type(answer["id"]) is int
            if "error" in answer:
                assert answer["error"]["code"] in frames.CODES
            else:
                assert json.dumps(answered.setdefault(answer["id"], answer)) == json.dumps(answer)
    assert wired.slot.counters["steps"] <= len(answered)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_limits_are_positive(seconds):
    with pytest.raises(ValueError, match="step_seconds must be positive"):
        ServiceLimits(step_seconds=seconds)


def test_a_hello_tells_a_limit_without_end_as_null():
    limits = ServiceLimits(step_seconds=math.inf, message_bytes=9)
    told = json.loads(json.dumps(limits.told(), allow_nan=False))
    assert (told["step_seconds"], told["message_bytes"]) == (None, 9)
    assert ServiceLimits.of_hello(told) == limits


@pytest.mark.parametrize("told", [None, {}, {"step_seconds": "no", "reset_seconds": -1, "other": 3}])
def test_limits_that_a_hello_lacks_are_the_defaults(told):
    assert ServiceLimits.of_hello(told) == ServiceLimits()
