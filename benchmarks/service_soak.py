"""Whether the memory of `agentgym serve` stays as it is: episodes by the ten thousand, in sessions that open and close.

A tenth of the episodes has a session of its own each; the others come one after another in a few sessions that stay. Every
tenth of the way the memory and the open files of each process are read. Flat is what grows by no more than GROWTH MiB, and by
no file, from the end of the warm-up (20 %) of each of the two parts on. Ends with 1 if something is not flat.

python benchmarks/service_soak.py [--env ENV] [--episodes N] [--at-once N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from found import write

from agentgym.service.worker.websocket import TEXT, Frames, encoded

GROWTH = 2.0  # MiB
WARM = 0.2  # of each part
SECONDS = 60.0  # by which any answer must have come
STEPS = 4
HANDSHAKE = (
    "GET /envs/{env}/session HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@dataclass(frozen=True)
class Reading:
    """What the processes of a server hold.

    Attributes:
        part: "sessions" or "episodes".
        episodes: played so far in this part.
        rate: episodes per second since the reading before.
        own, shared: memory in MiB by process: what is its own alone (USS), and its share of the rest too (PSS).
        files: open ones by process.
    """

    part: str
    episodes: int
    rate: float
    own: dict[str, float]
    shared: dict[str, float]
    files: dict[str, int]


class Session:
    """A session: messages there and back."""

    @classmethod
    async def open(cls, port: int, env: str) -> Session:
        session = cls()
        session._reader, session._writer = await asyncio.open_connection("127.0.0.1", port)
        session._writer.write(HANDSHAKE.format(env=env).encode())
        head = await asyncio.wait_for(session._reader.readuntil(b"\r\n\r\n"), SECONDS)
        if b" 101 " not in head:
            raise SystemExit(f"no session: {head.decode()}")
        session._frames = Frames(1 << 26, masked=False)
        session._id = 0
        await session._receive()
        return session

    async def play(self, number: int, last: bool) -> None:
        """One episode in one message; and the end of the session, if it is the last."""
        calls = [{"call": "reset", "seed": number}, *({"call": "step", "action": "up"} for _ in range(STEPS))]
        calls += [{"call": "close"}] if last else []
        requests = [{"id": self._id + place, **call} for place, call in enumerate(calls, 1)]
        self._id += len(requests)
        self._writer.write(encoded(TEXT, json.dumps(requests).encode(), masked=True))
        answers = await self._receive()
        if "result" not in answers[0] or (last and "result" not in answers[-1]):
            raise SystemExit(f"an episode failed: {answers}")

    async def _receive(self) -> list[dict]:
        while (found := self._frames.next()) is None:
            data = await asyncio.wait_for(self._reader.read(1 << 16), SECONDS)
            if not data:
                raise SystemExit("a session ended by itself")
            self._frames.buffer += data
        return json.loads(found[1])

    async def close(self) -> None:
        while await self._reader.read(1 << 16):
            continue
        self._writer.close()


class Watched:
    """A server whose memory is read.

    Args:
        pid: of the command.
    """

    def __init__(self, pid: int):
        [supervisor] = _children(pid)
        [zygote] = _children(supervisor)
        self._pids = {"server": pid, "supervisor": supervisor, "zygote": zygote}

    def read(self, part: str, episodes: int, rate: float) -> Reading:
        memory = {name: _memory(pid) for name, pid in self._pids.items()}
        workers = [found for pid in _children(self._pids["zygote"]) if (found := _memory(pid))[1]]
        memory["workers"] = tuple(sum(column) / max(1, len(workers)) for column in zip(*workers, strict=True)) or (
            0.0,
            0.0,
        )
        own = {name: round(uss, 2) for name, (_, uss) in memory.items()}
        shared = {name: round(pss, 2) for name, (pss, _) in memory.items()}
        files = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self._pids.items()}
        return Reading(part, episodes, round(rate, 1), own, shared, files)


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _memory(pid: int) -> tuple[float, float]:
    """PSS and USS in MiB; zeros for a process that has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0, 0.0
    found = {name: int(value) / 1024 for name, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return found.get("Pss", 0.0), found.get("Private_Clean", 0.0) + found.get("Private_Dirty", 0.0)


async def soak(port: int, env: str, watched: Watched, episodes: int, at_once: int) -> list[Reading]:
    """All readings, ten of each part and one before."""
    readings = []
    for part, count in (("sessions", episodes // 10), ("episodes", episodes - episodes // 10)):
        stay = [await Session.open(port, env) for _ in range(at_once)] if part == "episodes" else []
        readings.append(watched.read(part, 0, 0.0))
        for tenth in range(10):
            begun = time.perf_counter()
            numbers = iter(range(count * tenth // 10, count * (tenth + 1) // 10))
            players = [_stays(session, numbers) for session in stay] or [
                _comes(port, env, numbers) for _ in range(at_once)
            ]
            await asyncio.gather(*players)
            done = count * (tenth + 1) // 10
            rate = (done - count * tenth // 10) / (time.perf_counter() - begun)
            if not stay:
                await _all_gone(port)
            readings.append(watched.read(part, done, rate))
            print(_line(readings[-1]), flush=True)
        for session in stay:
            await session.play(0, last=True)
            await session.close()
    await _all_gone(port)
    return readings


async def _stays(session: Session, numbers) -> None:
    for number in numbers:
        await session.play(number, last=False)


async def _comes(port: int, env: str, numbers) -> None:
    for number in numbers:
        session = await Session.open(port, env)
        await session.play(number, last=True)
        await session.close()


async def _all_gone(port: int) -> None:
    """Wait until the server has no session, and some more for the last words to have been read."""
    async with asyncio.timeout(SECONDS):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b'"sessions": 0' in answer or b'"sessions":0' in answer:
                break
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)


def growth(readings: list[Reading]) -> list[str]:
    """What is not flat, in words."""
    found = []
    for part in ("sessions", "episodes"):
        rows = [row for row in readings if row.part == part]
        late = [row for row in rows if row.episodes >= WARM * rows[-1].episodes]
        for name in ("server", "supervisor", "zygote", "workers"):
            if part == "sessions" and name == "workers":
                continue  # those that wait, which are new each time
            slope = _slope([(row.episodes, row.own[name]) for row in late])
            rise = slope * (late[-1].episodes - late[0].episodes)
            if rise > GROWTH:
                found.append(f"{part}: {name} grows by {1000 * slope:.3f} MiB per 1,000 episodes")
        for name in late[0].files:
            if late[-1].files[name] > late[0].files[name]:
                found.append(f"{part}: {name} has {late[-1].files[name]} open files, after {late[0].files[name]}")
    return found


def _slope(points: list[tuple[float, float]]) -> float:
    middle = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    above = sum((x - middle[0]) * (y - middle[1]) for x, y in points)
    return above / sum((x - middle[0]) ** 2 for x, _ in points)


HEAD = f"{'part':>8} {'episodes':>9} {'per s':>7}   server USS/PSS fds   zygote USS/PSS fds   supervisor USS   each worker USS/PSS"


def _line(row: Reading) -> str:
    server = f"{row.own['server']:7.1f}/{row.shared['server']:5.1f} {row.files['server']:3}"
    zygote = f"{row.own['zygote']:8.1f}/{row.shared['zygote']:5.1f} {row.files['zygote']:3}"
    rest = f"{row.own['supervisor']:10.1f}   {row.own['workers']:12.2f}/{row.shared['workers']:5.2f}"
    return f"{row.part:>8} {row.episodes:9,} {row.rate:7.0f}   {server}   {zygote}   {rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="sessions (default: 8)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    words = [sys.executable, "-m", "agentgym.cli", "serve", args.env, "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.rstrip().endswith("}"):
            if not (line := server.stdout.readline()):
                return 1
            text += line
        print(HEAD, flush=True)
        begun = time.perf_counter()
        watched = Watched(server.pid)
        readings = asyncio.run(soak(json.loads(text)["port"], args.env, watched, args.episodes, args.at_once))
        seconds = time.perf_counter() - begun
    finally:
        server.terminate()
        server.wait()
    grows = growth(readings)
    print(f"{args.episodes:,} episodes in {seconds:.0f} s: {'; '.join(grows) or 'flat'}")
    write(args.out, seconds=seconds, grows=grows, readings=[asdict(row) for row in readings])
    return 1 if grows else 0


if __name__ == "__main__":
    sys.exit(main())
