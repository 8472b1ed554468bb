"""A load of chat completions over plain sockets, as little Python as can be: python load.py URL CONNECTIONS SECONDS STREAM MODEL TURNS

Each connection asks again as soon as it has its answer: TURNS times in a conversation, and each conversation with a new key of those
that it reads from its input. One turn: all calls of a connection are unrelated, and have one key. Prints the calls, the seconds, and
quantiles of the latency in ms.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

LEAST_CALLS, LONGEST_SECONDS = 50, 60.0  # of a slow side
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. " * 4},
    {"role": "user", "content": "What is the answer? Think well before you say it. "},
]


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, host: str, model: str, keys: Iterator[str], stream: bool, turns: int, taken: list[float]):
        self.host, self.model, self.keys, self.stream, self.turns, self.taken = host, model, keys, stream, turns, taken
        self.key = next(keys)
        self.messages = list(MESSAGES)
        self.end = b"\r\n0\r\n\r\n" if stream else b""
        self.number = 0
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.number += 1
        self.messages.append({"role": "user", "content": f"{self.number}"})
        more = {"stream": True} if self.stream else {}
        body = json.dumps({"model": self.model, "messages": self.messages, "max_tokens": 16, **more}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.began = time.perf_counter()
        self.transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.is_whole():
            return
        if not self.data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(self.data[:500].decode())
        self.taken.append(time.perf_counter() - self.began)
        if self.number % self.turns:
            self.messages.append({"role": "assistant", "content": said(self.data.partition(b"\r\n\r\n")[2])})
        else:
            self.messages = list(MESSAGES)
            self.key = next(self.keys) if self.turns > 1 else self.key
        self.data = b""
        self.ask()

    def is_whole(self) -> bool:
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return False
        lower = head.lower()
        if b"content-length:" in lower:
            return len(body) >= int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return self.data.endswith(b"0\r\n\r\n")


def said(body: bytes) -> str:
    """The text of an answer, or of its events."""
    if body.startswith(b"{"):
        return json.loads(body)["choices"][0]["message"]["content"] or ""
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def main(url: str, connections: str, seconds: str, stream: str, model: str, turns: str) -> None:
    place = urlsplit(url)
    loop, taken, all_keys = asyncio.get_running_loop(), [], sys.stdin.read().split()
    if int(turns) > 1:  # other episodes than those of the measurements before
        random.shuffle(all_keys)
    keys = itertools.cycle(all_keys)

    def made() -> Client:
        return Client(place.netloc, model, keys, stream == "1", int(turns), taken)

    for _ in range(int(connections)):
        await loop.create_connection(made, place.hostname, place.port)
    await asyncio.sleep(0.5)  # what is done once: caches, pages
    taken.clear()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(float(seconds))
    while len(taken) < LEAST_CALLS and time.perf_counter() < began + LONGEST_SECONDS:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    found = sorted(taken)
    quantiles = {
        name: found[int(len(found) * part)] * 1e3 for name, part in (("p5", 0.05), ("median", 0.5), ("p99", 0.99))
    }
    print(json.dumps({"calls": len(found), "seconds": wall, "client_cpu": cpu, **quantiles}))
    sys.stdout.flush()
    import os

    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
