"""A server that has no file descriptors left: it refuses, and is as before when it has some again."""

import contextlib
import socket
import time

from chaos_harness import quiet, serving_command, until

UPGRADE = (
    b"GET /envs/Chaos/session HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def _connected(port):
    sock = socket.create_connection(("127.0.0.1", port), timeout=1)
    sock.settimeout(1)
    return sock


def _session(port):
    """A session's connection once its hello is there, or what the server said, and else None."""
    sock = _connected(port)
    sock.sendall(UPGRADE)
    said, end = b"", time.monotonic() + 3
    with contextlib.suppress(OSError):
        while b'"protocol"' not in said and time.monotonic() < end:
            piece = sock.recv(1 << 16)
            if not piece:
                break
            said += piece
    if b'"protocol"' in said:
        return sock
    sock.close()
    return None


def test_a_server_without_files_gets_all_its_slots_back(tmp_path):
    words = ["chaos_envs:Chaos", "--max-sessions", "6", "--resume-timeout", "0.2", "--message-timeout", "30"]
    # As much as the command asks for, which strangers with no session then use up.
    with serving_command(tmp_path, *words, files=6 * 6 + 256) as command:
        before = quiet(command)
        strangers, held = [], []
        with contextlib.ExitStack() as open_ones:
            while len(strangers) < 330:  # some wait in the listener's queue
                strangers.append(open_ones.enter_context(_connected(command.port)))
            # Each one that leaves makes room for one that wants a session, and for nothing that a session needs beside.
            for round in range(12):
                strangers.pop(0).close()
                held.append(_session(command.port))
        for sock in held:
            if sock is not None:
                sock.close()
        until(lambda: command.metrics()["sessions"] == 0, command.metrics)
        until(lambda: quiet(command) == before, lambda: (before, quiet(command)))
        again = [_session(command.port) for _ in range(6)]
        assert None not in again
        # Limits are still kept.
        for sock in again:
            sock.close()
        until(lambda: command.metrics()["sessions"] == 0, command.metrics)
