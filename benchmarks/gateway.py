"""What the gateway adds to a call: beside asking the engine itself, and beside another recording proxy of this field, LiteLLM's.

The engine is instant: it always says the same 12 tokens, so all that is measured is on the way. Episodes are conversations of
8 turns, as of agents, or of one turn: then all calls of a connection are unrelated calls of one episode, thousands. With `--vllm`
a tiny model behind vLLM on the CPU is a second one. The load asks over plain sockets, each connection anew as soon as it has its
answer. LiteLLM records each call by a callback that appends a line to a file, without syncing it; it is installed from the package
index into a virtual environment of its own in the user's cache, on the first run. CPU time is that of the side's process alone.

python benchmarks/gateway.py [--out FILE.json] [--connections 1,32] [--turns 8,1] [--seconds 3] [--rounds 3] [--sides SIDE,...]
                             [--vllm] [--folder DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from found import write
from peers import peer_python

HERE = Path(__file__).parent
PARTS = HERE / "gateway_sides"
PEER = "litellm[proxy]==1.108.7"
SIDES = ("engine", "inside", "upstream", "litellm")
GOAL_MS, GOAL_CALLS = 1.0, 2000


@contextlib.contextmanager
def side_of(name: str, folder: Path, engine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A side that serves: its `url`, `model`, `keys` and `pid`."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PARTS / "serve.py", name, folder / name, engine.get("url", "")]
    if name == "litellm":
        command = [peer_python("litellm", [PEER]), PARTS / "serve_litellm.py", folder, engine["url"], engine["model"]]
        env.pop("PYTHONPATH")
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    try:
        told = next((line for line in process.stdout if line.startswith('{"url"')), None)
        if told is None:
            raise SystemExit(f"the side {name} does not come up")
        yield {"model": engine.get("model", "model"), "keys": ["sk-none"], "pid": process.pid, **json.loads(told)}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def vllm(folder: Path) -> Iterator[dict[str, Any]]:
    from agent_train.config.schema import TinyConfig
    from agent_train.learner.tiny import build_tiny, texts_of_env
    from agentgym.evaluate.serving import serve_model

    build_tiny(
        folder / "tiny", texts_of_env("frozen_lake", n=8), TinyConfig(hidden=64, layers=1, heads=2), 1024, seed=0
    )
    with serve_model(folder / "tiny", log=folder / "vllm.log", timeout=600) as (url, model):
        yield {"url": url.removesuffix("/v1"), "model": model, "keys": ["none"], "pid": os.getpid()}


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(side: dict[str, Any], connections: int, turns: int, stream: bool, seconds: float) -> dict[str, float]:
    command = [sys.executable, PARTS / "load.py", side["url"], connections, seconds, int(stream), side["model"], turns]
    before, began, keys = cpu_seconds(side["pid"]), time.perf_counter(), " ".join(side["keys"])
    done = subprocess.run(list(map(str, command)), input=keys, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(f"the load on {side['url']} failed: {done.stdout} {done.stderr}")
    told = json.loads(done.stdout)
    used = (cpu_seconds(side["pid"]) - before) * told["seconds"] / (time.perf_counter() - began)
    calls = max(told["calls"], 1)
    return {"median_ms": told["median"], "p99_ms": told["p99"], "calls_per_second": told["calls"] / told["seconds"]} | {
        "cpu_us": used / calls * 1e6
    }


def rows_of(args: argparse.Namespace, engine: dict[str, Any], folder: Path, of: str) -> list[dict[str, Any]]:
    """The best of the rounds of each side; all sides run in turn in every round."""
    found: dict[tuple[str, int, int, bool], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        sides = {"engine": engine}
        wanted = [name for name in args.sides if name != "engine" and (of == "instant" or name != "inside")]
        sides |= {name: stack.enter_context(side_of(name, folder, engine)) for name in wanted}
        for _ in range(args.rounds):
            for kind in itertools.product(args.connections, args.turns, (False, True)):
                for name, side in sides.items():
                    found.setdefault((name, *kind), []).append(measure(side, *kind, args.seconds))
    rows = []
    for (name, connections, turns, stream), rounds in found.items():
        best = {part: (max if part == "calls_per_second" else min)(each[part] for each in rounds) for part in rounds[0]}
        about = {"engine": of, "side": name, "connections": connections, "turns": turns, "stream": stream}
        rows.append({**about, **best})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    kind = operator.itemgetter("engine", "connections", "turns", "stream")
    direct = {kind(row): row["median_ms"] for row in rows if row["side"] == "engine"}
    names = (
        "engine",
        "connections",
        "turns",
        "stream",
        "side",
        "median ms (added)",
        "p99 ms",
        "calls/s",
        "CPU us/call",
    )
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        median = f"{row['median_ms']:.2f} ({row['median_ms'] - direct[kind(row)]:+.2f})"
        numbers = f"{row['p99_ms']:.1f} | {row['calls_per_second']:,.0f} | {row['cpu_us']:.0f}"
        about = f"{row['engine']} | {row['connections']} | {row['turns']} | {'yes' if row['stream'] else 'no'}"
        print(f"| {about} | {row['side']} | {median} | {numbers} |")
    for turns in sorted({row["turns"] for row in rows}, reverse=True):
        ours = [row for row in rows if (row["side"], row["turns"], row["stream"]) == ("inside", turns, False)]
        if ours:
            least, most = min(row["median_ms"] for row in ours), max(row["calls_per_second"] for row in ours)
            met = "met" if least < GOAL_MS else "MISSED", "met" if most >= GOAL_CALLS else "MISSED"
            print(
                f"\nturns {turns}: median of a call inside, engine and all: {least:.2f} ms, goal {GOAL_MS:g}: {met[0]}"
            )
            print(f"calls/s: {most:,.0f}, goal {GOAL_CALLS:,}: {met[1]}")


def sync_ms(folder: Path) -> float:
    """The median of one synced write of 2 kB on the folder's disk."""
    taken = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            began = time.perf_counter()
            file.write(bytes(2000))
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return sorted(taken)[50] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    numbers = {"type": lambda text: [int(word) for word in text.split(",")]}
    parser.add_argument("--connections", **numbers, default=[1, 32])
    parser.add_argument("--turns", **numbers, default=[8, 1], help="of the conversations (default: 8,1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (default: 3)")
    parser.add_argument(
        "--sides", type=lambda text: text.split(","), default=list(SIDES), help=f"of {', '.join(SIDES)}"
    )
    parser.add_argument("--vllm", action="store_true", help="also in front of vLLM on the CPU")
    parser.add_argument("--folder", type=Path, help="where records are written (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        synced = sync_ms(folder)
        with side_of("engine", folder, {}) as engine:
            rows = rows_of(args, engine, folder, "instant")
        if args.vllm:
            with vllm(folder) as engine:
                rows += rows_of(args, engine, folder / "vllm", "vLLM")
    show(rows)
    print(f"\none synced write: {synced:.2f} ms; load {os.getloadavg()[0]:.1f}")
    write(args.out, sync_ms=synced, rows=rows)


if __name__ == "__main__":
    main()
