"""A load of chat completions over plain sockets, as little Python as can be: python load.py URL CONNECTIONS SECONDS STREAM MODEL KEYS

Each connection asks again as soon as it has its answer. Prints the calls, the seconds, and quantiles of the latency in ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

LEAST_CALLS, LONGEST_SECONDS = 50, 60.0  # of a slow side
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. " * 4},
    {"role": "user", "content": "What is the answer? Think well before you say it. "},
]


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, host: str, model: str, key: str, stream: bool, taken: list[float]):
        self.host, self.model, self.key, self.stream, self.taken = host, model, key, stream, taken
        self.end = b"\r\n0\r\n\r\n" if stream else b""
        self.number = 0
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.number += 1
        asked = {"role": "user", "content": f"{self.number}"}
        more = {"stream": True} if self.stream else {}
        body = json.dumps({"model": self.model, "messages": [*MESSAGES, asked], "max_tokens": 16, **more}).encode()
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


async def main(url: str, connections: str, seconds: str, stream: str, model: str, keys: str) -> None:
    place = urlsplit(url)
    loop, taken, all_keys = asyncio.get_running_loop(), [], keys.split(",")
    for number in range(int(connections)):
        key = all_keys[number % len(all_keys)]

        def made(key: str = key) -> Client:
            return Client(place.netloc, model, key, stream == "1", taken)

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
