"""Calls to a guest that answers late, wrongly or not at all: every one ends, and says what failed."""

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.guest.guest_programs import REPLY_LIMIT
from agentgym.sandbox.guest.guest_sandbox import (
    LARGEST_FRAME,
    Channel,
    SocketStream,
    greet,
    guest_command,
    guest_source,
    joined,
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield SocketStream(ours), theirs
    theirs.close()
    ours.close()


def frame(header, payload=b""):
    text = json.dumps(header).encode()
    return struct.pack(">II", len(text), len(payload)) + text + payload


class TestCalls:
    def test_a_call_and_its_answer(self, ends):
        stream, guest = ends
        channel = Channel(stream, "box")
        guest.sendall(frame({"n": 1}, b"data"))
        assert channel.call({"do": "x", "a": [1]}, b"in", timeout=30) == ({"n": 1}, b"data")
        assert guest.recv(1000) == frame({"do": "x", "a": [1]}, b"in")

    def test_an_answer_in_pieces(self, ends):
        stream, guest = ends
        channel = Channel(stream, "box")

        def answer():
            for byte in frame({"n": 1}, b"data"):
                guest.sendall(bytes([byte]))

        threading.Thread(target=answer).start()
        assert channel.call({"do": "x"}, timeout=30) == ({"n": 1}, b"data")

    def test_no_answer(self, ends):
        channel = Channel(ends[0], "box")
        began = time.monotonic()
        with pytest.raises(SandboxError, match=r"sandbox box did not answer 'wait' within 0\.3 s"):
            channel.call({"do": "wait"}, timeout=0.3)
        assert time.monotonic() - began < 30
        assert not channel.alive

    def test_a_guest_that_takes_nothing(self, ends):
        channel = Channel(ends[0], "box")
        with pytest.raises(SandboxError, match="did not answer 'write'"):
            channel.call({"do": "write"}, b"x" * 50_000_000, timeout=0.5)

    def test_answers_that_drip_do_not_stretch_the_time(self, ends):
        stream, guest = ends
        channel = Channel(stream, "box")
        stop = threading.Event()

        def drip():
            for byte in frame({"text": "x" * 1000}):
                if stop.wait(0.05):
                    return
                guest.sendall(bytes([byte]))

        threading.Thread(target=drip).start()
        began = time.monotonic()
        with pytest.raises(SandboxError, match="did not answer"):
            channel.call({"do": "x"}, timeout=0.5)
        stop.set()
        assert time.monotonic() - began < 30

    def test_the_end_of_the_guest_comes_with_the_back_end_s_reason(self, ends):
        stream, guest = ends
        channel = Channel(stream, "box", reason=lambda: "killed for want of memory")
        guest.close()
        with pytest.raises(SandboxError, match=r"'x': .*; killed for want of memory"):
            channel.call({"do": "x"}, timeout=30)

    @pytest.mark.parametrize(
        "garbage",
        [
            b"\xff" * 8,
            struct.pack(">II", 5, 0) + b"{not}",
            struct.pack(">II", LARGEST_FRAME, 1),
            struct.pack(">II", 1, 0) + b"\xff",
        ],
    )
    def test_an_answer_that_is_none(self, ends, garbage):
        stream, guest = ends
        channel = Channel(stream, "box")
        guest.sendall(garbage)
        with pytest.raises(SandboxError, match="sandbox box failed in 'x'"):
            channel.call({"do": "x"}, timeout=30)
        assert not channel.alive

    def test_after_a_failure_nothing_is_asked_any_more(self, ends):
        stream, guest = ends
        channel = Channel(stream, "box")
        guest.sendall(b"\xff" * 8)
        with pytest.raises(SandboxError):
            channel.call({"do": "x"}, timeout=30)
        with pytest.raises(SandboxError, match="sandbox box is closed"):
            channel.call({"do": "y"}, timeout=30)

    def test_closed_from_another_thread(self, ends):
        channel = Channel(ends[0], "box")
        threading.Timer(0.2, channel.close).start()
        with pytest.raises(SandboxError, match="sandbox box was closed during 'x'"):
            channel.call({"do": "x"}, timeout=30)

    def test_a_descriptor_is_not_given_up_while_a_thread_waits_on_it(self):
        """The kernel looks it up again on waking: were its number another file's by then, the thread would wait for that."""
        order, woken = [], threading.Event()

        class Slow:
            def settimeout(self, timeout):
                pass

            def recv(self, size):
                woken.wait(10)
                time.sleep(0.3)
                order.append("left")
                return b""

            def shutdown(self, how):
                woken.set()

            def close(self):
                order.append("closed")

        stream = SocketStream(Slow())
        waiting = threading.Thread(target=stream.receive, args=(time.monotonic() + 20.0,))
        waiting.start()
        time.sleep(0.1)
        stream.close()
        waiting.join(10)
        assert order == ["left", "closed"]

    def test_an_interrupt_half_way_closes_it(self, ends, monkeypatch):
        stream, _ = ends
        channel = Channel(stream, "box")

        def interrupt(until):
            raise KeyboardInterrupt

        monkeypatch.setattr(stream, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.call({"do": "x"}, timeout=30)
        assert not channel.alive


class TestGreeting:
    def test_a_guest_that_does_not_come_up_is_ended(self, ends):
        ended = []
        with pytest.raises(SandboxError, match="did not answer 'hello' within 0"):
            greet(ends[0], SandboxSpec(start_timeout=0.3), "box", on_close=lambda: ended.append(1))
        assert ended == [1]


class TestGuestProgram:
    def test_it_refuses_to_be_anything_but_the_first_process(self):
        result = subprocess.run(
            guest_command(sys.executable), input=guest_source(), capture_output=True, timeout=30, check=False
        )
        assert result.returncode == 1
        assert b"must be process 1" in result.stderr

    def test_it_ends_when_it_is_told_nothing(self):
        assert subprocess.run(guest_command(sys.executable), input=b"", timeout=30, check=False).returncode == 1

    def test_its_answers_fit_into_frames(self):
        assert REPLY_LIMIT + 4 * SandboxSpec().output < LARGEST_FRAME


@given(st.text(min_size=1, max_size=60), st.integers(2, 60))
def test_what_is_left_of_a_long_text_is_its_begin_and_its_end(text, limit):
    data = text.encode("utf-8", "replace")
    text = data.decode()
    head, tail = data[: limit // 2], data[limit // 2 :][-(limit - limit // 2) :]
    left_out = len(data) - len(head) - len(tail)
    shown, cut = joined(head, tail, left_out)
    assert cut == (len(data) > limit)
    if cut:
        first, size, last = re.split(r"\n\[(\d+) bytes left out\]\n", shown)
        assert text.startswith(first)
        assert text.endswith(last)
        assert len((first + last).encode()) + int(size) == len(data)
    else:
        assert shown == text


@given(st.binary(max_size=80), st.integers(2, 40))
def test_bytes_that_are_no_text_are_shown_all_the_same(data, limit):
    head, tail = data[: limit // 2], data[limit // 2 :][-(limit - limit // 2) :]
    shown, cut = joined(head, tail, len(data) - len(head) - len(tail))
    assert cut == (len(data) > limit)
    assert isinstance(shown, str)
