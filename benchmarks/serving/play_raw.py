"""A load that costs little: `play_raw.py URL SESSIONS` speaks just enough WebSocket, in blocking processes, to ask for steps.

It sends the same bytes again and looks at no more of an answer than that it is whole, so that what is measured is the server.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from load import MESSAGE, cpu_seconds, tell

HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def framed(value: Any) -> bytes:
    """A text message of a client, with a mask."""
    payload, mask = json.dumps(value).encode(), b"\x11\x22\x33\x44"
    assert len(payload) < 126
    return bytes((129, 128 | len(payload))) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload))


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname
    sock = socket.create_connection((parts.hostname, parts.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(HANDSHAKE.format(path=f"{parts.path}/ws", host=parts.netloc).encode())
    said = b""
    while b"\r\n\r\n" not in said:
        said += sock.recv(1)
    assert b" 101 " in said, said
    sock.sendall(framed({"type": "reset", "data": {"seed": 1}}))
    answer(sock)
    return sock


def answer(sock: socket.socket) -> bytes:
    """One whole message of a server."""
    data = sock.recv(65536)
    while len(data) < 4 or len(data) < (data[1] + 2 if data[1] < 126 else int.from_bytes(data[2:4], "big") + 4):
        more = sock.recv(65536)
        if not more:
            raise SystemExit(f"the server closed: {data!r}")
        data += more
    return data


def step_all(sockets: list[socket.socket], seconds: float) -> int:
    """Keep one step of every session under way; how many were answered."""
    step = framed({"type": "step", "data": {"message": MESSAGE}})
    until, steps = time.perf_counter() + seconds, 0
    if len(sockets) == 1:
        [sock] = sockets
        while time.perf_counter() < until:
            for _ in range(16):
                sock.send(step)
                answer(sock)
            steps += 16
        return steps
    poll, by_number = select.epoll(), {sock.fileno(): sock for sock in sockets}
    for sock in sockets:
        poll.register(sock, select.EPOLLIN)
        sock.send(step)
    waiting = set(by_number)
    while waiting:
        ready = poll.poll()
        goes_on = time.perf_counter() < until
        for number, _ in ready:
            answer(by_number[number])
            if goes_on:
                by_number[number].send(step)
            else:
                waiting.discard(number)
        steps += len(ready)
    return steps


def part(url: str, sessions: int, pipe: Any) -> None:
    sockets = [connected(url) for _ in range(sessions)]
    sockets[0].send(framed({"type": "step", "data": {"message": MESSAGE}}))
    assert MESSAGE.encode() in answer(sockets[0])
    pipe.send(None)
    while seconds := pipe.recv():
        cpu = cpu_seconds()
        pipe.send((step_all(sockets, seconds), cpu_seconds() - cpu))
    for sock in sockets:
        sock.close()


if __name__ == "__main__":
    url, sessions = sys.argv[1], int(sys.argv[2])
    parts = min(sessions, os.cpu_count() or 1)
    began, pipes = time.perf_counter(), []
    for index in range(parts):
        ours, theirs = multiprocessing.Pipe()
        share = len(range(index, sessions, parts))
        multiprocessing.Process(target=part, args=(url, share, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    tell(open_seconds=time.perf_counter() - began)
    for line in sys.stdin:
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(float(line))
        done = [pipe.recv() for pipe in pipes]
        tell(steps=sum(d[0] for d in done), wall=time.perf_counter() - began, cpu=sum(d[1] for d in done))
    for pipe in pipes:
        pipe.send(0.0)
