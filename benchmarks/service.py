"""What it costs to serve environments: `agentgym serve` against OpenEnv's server, each with both clients, and with a bare load.

Both servers serve the same environment, which says back what it is told, and every client must hear that. A client is one
process; the raw load (OpenEnv's wire, hardly any framing) has one for each core. The bare server looks at nothing and always
gives the same answer: no server can be faster with a client. CPU time is counted apart: that of a server is of all its
processes. All sides run in turn, in every round. OpenEnv is installed from the package index into a virtual environment of
its own in the user's cache, on the first run.

python benchmarks/service.py [--out FILE.json] [--sessions 1,32,256] [--seconds 2] [--rounds 3] [--sides SERVER+CLIENT,...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from found import write
from peers import ONE_THREAD, peer_python

HERE = Path(__file__).parent
SERVING = HERE / "serving"
PINS = HERE.parent / "tests/agentgym/service/openenv_foreign/packages.txt"
BOOT_SECONDS = 60.0
SIDES = (
    *("agentgym+openenv", "agentgym+agentgym", "agentgym+raw"),
    *("shared+openenv", "shared+agentgym", "shared+raw"),
    *("openenv+openenv", "openenv+agentgym", "openenv+raw"),
    *("bare+openenv", "bare+raw"),
)
# Our server gives each session a process of its own, or lets many share one.
OURS = {"agentgym": [], "shared": ["--sessions-per-worker", "256"]}
GOALS = {1: 10_000, 32: 13_000}  # steps/s of our server with OpenEnv's client
GOAL_MEGABYTES = 60.0
GOAL_TIMES = 3.0


def openenv_python() -> Path:
    pins = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    return peer_python("openenv", pins, "--no-deps")


def environ(**more: str) -> dict[str, str]:
    dropped = ("AGENTGYM_TOKEN", "PYTHONHOME", "PYTHONPATH", "ENABLE_WEB_INTERFACE", "OPENENV_MODE")
    return {key: value for key, value in os.environ.items() if key not in dropped} | ONE_THREAD | more


@dataclass
class Server:
    """A server that runs."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    boot_seconds: float

    def processes(self) -> list[int]:
        """It and all its descendants."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return found

    def cpu_seconds(self) -> float:
        """That all of them have used, to the nanosecond where the kernel tells."""
        total = 0.0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
        return total

    def megabytes(self) -> float:
        """Proportional set size of all of them: memory that they share is counted once."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(name: str, sessions: int) -> Iterator[Server]:
    """A server with room for so many sessions; it is ended afterwards."""
    port = free_port()
    if name in OURS:
        command = [sys.executable, "-m", "agentgym.cli", "serve", "echo:Echo", "--port", str(port)]
        command += ["--max-sessions", str(sessions), "--drain-timeout", "1", "--workers", "2", *OURS[name]]
    elif name == "openenv":
        command = [str(openenv_python()), str(SERVING / "serve_openenv.py"), str(port), str(sessions)]
    else:
        command = [sys.executable, str(SERVING / "serve_bare.py"), str(port)]
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    env = environ(PYTHONPATH=os.pathsep.join([str(SERVING), str(HERE.parent)]) if name in OURS else str(SERVING))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.perf_counter() > began + BOOT_SECONDS:
                raise SystemExit(f"the server of {name} does not come up")
            time.sleep(0.005)
        yield Server(name, url, process, time.perf_counter() - began)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def player(client: str, server: Server) -> tuple[list[str], dict[str, str]]:
    """The command of a client, without the number of sessions, and its environment."""
    if client == "raw":
        return [sys.executable, str(SERVING / "play_raw.py"), server.url], environ(PYTHONPATH=str(SERVING))
    if client == "openenv":
        return [str(openenv_python()), str(SERVING / "play_openenv.py"), server.url], environ(PYTHONPATH=str(SERVING))
    url = f"{server.url}/Echo" if server.name in OURS else f"openenv:{server.url}"
    paths = os.pathsep.join([str(SERVING), str(HERE.parent)])
    return [sys.executable, str(SERVING / "play_agentgym.py"), url], environ(PYTHONPATH=paths)


def measure(server: Server, client: str, sessions: int, seconds: float) -> dict[str, float]:
    """Open so many sessions, step all of them for so long, close them."""
    empty = server.megabytes()
    command, env = player(client, server)
    with subprocess.Popen(
        [*command, str(sessions)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            opened = told(process)

            def stepping(seconds: float) -> dict[str, float]:
                process.stdin.write(f"{seconds}\n")
                process.stdin.flush()
                return told(process)

            stepping(min(0.5, seconds))  # what is done once: caches, pages
            cpu = server.cpu_seconds()
            done = stepping(seconds)
            cpu, full = server.cpu_seconds() - cpu, server.megabytes()
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()
    settle(server)
    return {
        "steps_per_second": done["steps"] / done["wall"],
        "server_us": cpu / done["steps"] * 1e6,
        "client_us": done["cpu"] / done["steps"] * 1e6,
        "opened_per_second": sessions / opened["open_seconds"],
        "megabytes_per_session": (full - empty) / sessions,
        "megabytes": full,
    }


def told(process: subprocess.Popen[str]) -> dict[str, float]:
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the client {process.args} failed")
    return json.loads(line)


def settle(server: Server) -> None:
    """Wait until the sessions that were closed are gone, and the server does nothing any more."""
    end, before = time.perf_counter() + 10.0, server.cpu_seconds()
    while time.perf_counter() < end:
        time.sleep(0.2)
        now = server.cpu_seconds()
        if now - before < 0.01:
            return
        before = now


BEST: dict[str, Callable[[list[float]], float]] = {"steps_per_second": max, "opened_per_second": max}


def best_of(found: list[dict[str, float]]) -> dict[str, float]:
    """The most steps, the least CPU time, and the middle of what memory was taken."""
    best = {}
    for name in found[0]:
        choose = BEST.get(name, statistics.median if name.startswith("megabytes") else min)
        best[name] = round(choose([each[name] for each in found]), 2)
    return best


def boots(name: str, sessions: int, rounds: int) -> dict[str, float]:
    """How long it takes until a server answers, and what it takes before it has a session."""
    found = []
    for _ in range(rounds):
        with serving(name, sessions) as server:
            settle(server)
            found.append((server.boot_seconds, server.megabytes()))
    return {"boot_seconds": round(min(f[0] for f in found), 2), "idle_megabytes": round(min(f[1] for f in found), 1)}


def measured(args: argparse.Namespace, sides: list[str]) -> list[dict[str, Any]]:
    """The best of each side, at each number of sessions."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        names = dict.fromkeys(side.partition("+")[0] for side in sides)
        servers = {name: stack.enter_context(serving(name, room_for(args.sessions))) for name in names}
        for _ in range(args.rounds):
            for count in args.sessions:
                for side in sides:
                    name, _, client = side.partition("+")
                    taken = measure(servers[name], client, count, args.seconds)
                    found.setdefault((count, side), []).append(taken)
    return [
        {"server": side.partition("+")[0], "client": side.partition("+")[2], "sessions": count, **best_of(each)}
        for (count, side), each in found.items()
    ]


def room_for(counts: list[int]) -> int:
    return max(counts) + 32  # some of the round before may be ending still


def show(idle: dict[str, dict[str, float]], rows: list[dict[str, Any]]) -> None:
    print("\n| server | boot s | MB before the first session (PSS) |\n|---|---|---|")
    for name, found in idle.items():
        print(f"| {name} | {found['boot_seconds']:.2f} | {found['idle_megabytes']:.0f} |")
    print(
        "\n| server | client | sessions | steps/s | server CPU us/step | client CPU us/step | opened/s | MB/session |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['server']} | {row['client']} | {row['sessions']} | {row['steps_per_second']:,.0f}"
            f" | {row['server_us']:.0f} | {row['client_us']:.0f} | {row['opened_per_second']:,.0f}"
            f" | {row['megabytes_per_session']:.2f} |",
            flush=True,
        )


def judge(idle: dict[str, dict[str, float]], rows: list[dict[str, Any]]) -> None:
    """What was reached of the goals."""

    def line(what: str, got: float, goal: float, met: bool) -> None:
        print(f"{what}: {got:,.1f}, goal {goal:,.0f}: {'met' if met else 'MISSED'}")

    print()
    by_side = {(row["server"], row["client"], row["sessions"]): row for row in rows}
    for (server, client, sessions), row in by_side.items():
        got = row["steps_per_second"]
        if (server, client) == ("agentgym", "openenv") and sessions in GOALS:
            line(f"steps/s at {sessions}, OpenEnv's client", got, GOALS[sessions], got >= GOALS[sessions])
        theirs = by_side.get(("openenv", client, sessions))
        if server in OURS and theirs:
            times = got / theirs["steps_per_second"]
            what = f"times the steps/s of OpenEnv's server, {client} client, {sessions} sessions"
            what = f"{what}, a shared process" if server == "shared" else what
            line(what, times, GOAL_TIMES, times >= GOAL_TIMES)
    if "agentgym" in idle:
        megabytes = idle["agentgym"]["idle_megabytes"]
        line("MB before the first session", megabytes, GOAL_MEGABYTES, megabytes < GOAL_MEGABYTES)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--sessions", type=numbers, default=[1, 32, 256], help="at a time (default: 1,32,256)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of stepping in each round (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (default: 3)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"SERVER+CLIENT, of {', '.join(SIDES)} (default: all)")
    args = parser.parse_args()
    sides = args.sides.split(",")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides: no {min(unknown)}; there are {', '.join(SIDES)}")
    names = [name for name in ("agentgym", "shared", "openenv") if any(side.startswith(f"{name}+") for side in sides)]
    idle = {name: boots(name, room_for(args.sessions), args.rounds) for name in names}
    rows = measured(args, sides)
    show(idle, rows)
    judge(idle, rows)
    goals = {"goals": GOALS, "goal_megabytes": GOAL_MEGABYTES, "goal_times": GOAL_TIMES}
    write(args.out, rounds=args.rounds, seconds=args.seconds, **goals, idle=idle, rows=rows)


if __name__ == "__main__":
    main()
