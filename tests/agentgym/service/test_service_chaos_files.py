"""A server that has no file descriptors left: it refuses, and is as before when it has some again."""

import contextlib
import itertools
import json
import os
import resource
import socket
import time

from chaos_harness import SECONDS, files_of, quiet, serving_command, settled, until
from service_harness import handshake

from agentgym.service.worker.websocket import TEXT, encoded

UPGRADE = handshake("/envs/Chaos/session")


def _connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def _session(port, seconds=SECONDS):
    """A session's connection once its hello is there; None: it was refused, or has not come in time."""
    sock = _connected(port)
    sock.settimeout(seconds)
    sock.sendall(UPGRADE)
    said = b""
    with contextlib.suppress(OSError):
        while b'"protocol"' not in said:
            piece = sock.recv(1 << 16)
            if not piece:
                break
            said += piece
    if b'"protocol"' in said:
        return sock
    sock.close()
    return None


WORDS = ["chaos_envs:Chaos", "--max-sessions", "6", "--resume-timeout", "0.2", "--step-timeout", "1"]


def _all_slots_work(command):
    """Every slot has its session, and limits are kept."""
    before = command.ended()["DEADLINE"]
    again = [_session(command.port) for _ in range(6)]
    assert None not in again
    for sock in again:
        requests = [{"id": 1, "call": "reset"}, {"id": 2, "call": "step", "action": "fault hang"}]
        sock.sendall(encoded(TEXT, json.dumps(requests).encode(), masked=True))
    until(lambda: command.metrics()["sessions"] == 0, command.metrics)
    assert command.ended()["DEADLINE"] == before + 6
    for sock in again:
        sock.close()


def test_a_server_without_files_gets_all_its_slots_back(tmp_path):
    with serving_command(tmp_path, *WORDS) as command:
        before = quiet(command)
        soft, hard = resource.prlimit(command.pid, resource.RLIMIT_NOFILE)
        # Files for the connection, but not for all that a session takes beside it; then a few more and a few more.
        for room in range(1, 9):
            resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (_highest(command.pid) + room, hard))
            first, second = _session(command.port, 2), _session(command.port, 2)
            for sock in (first, second):
                if sock is not None:
                    sock.close()
            resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (soft, hard))
            settled(command, before)
        _all_slots_work(command)
        settled(command, before)


def _highest(pid):
    return max(_held(pid)) + 1


def _held(pid, after=0.0):
    time.sleep(after)
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def test_strangers_cannot_take_all_files_of_a_server(tmp_path):
    """Connections that make no session, more of them than the server may open files."""
    with serving_command(tmp_path, *WORDS, files=304) as command:
        before, strangers = quiet(command), []
        for _ in range(350):
            with contextlib.suppress(OSError):
                strangers.append(_connected(command.port))
        until(lambda: files_of(command.pid).total() > 100, lambda: files_of(command.pid))
        for sock in strangers:
            sock.close()
        until(lambda: files_of(command.pid).total() < 100, lambda: files_of(command.pid))  # it resets who comes before
        settled(command, before)
        _all_slots_work(command)
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_very_first_session_is_refused_in_order_where_no_file_is_left(tmp_path):
    with serving_command(tmp_path, *WORDS) as command:
        before = quiet(command)
        until(lambda: _held(command.pid) == _held(command.pid, after=0.2), lambda: files_of(command.pid))
        soft, hard = resource.prlimit(command.pid, resource.RLIMIT_NOFILE)
        held = _held(command.pid)
        lowest = next(fd for fd in itertools.count() if fd not in held)
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (lowest + 1, hard))  # one, for the connection
        with _connected(command.port) as sock:
            sock.sendall(UPGRADE)
            head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert head.startswith(b"HTTP/1.1 503 "), head
        assert b"\r\nRetry-After: " in head
        assert json.loads(body)["error"]["code"] == "CAPACITY"
        assert command.metrics()['refused_total{reason="CAPACITY"}'] == 1
        settled(command, before)
        assert "Error handling request" not in (tmp_path / "log").read_text()
