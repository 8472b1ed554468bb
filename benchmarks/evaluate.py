"""What an evaluation costs beyond the model: agentgym against inspect_ai and verifiers, with a model that answers at once.

All sides play the same one-turn questions with the same answers, in a process of their own with one thread for numerics, and
must come to the same score. First the model is in the process (inspect_ai: its mockllm), then it is a local HTTP endpoint
in another one. All write what an evaluation leaves behind to disk; "agentgym, in memory" does not. The peers are installed
from the package index into a cache folder, each into its own virtual environment, on the first run.

python benchmarks/evaluate.py [--out FILE.json] [--episodes N] [--rounds N] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from found import write
from peers import ONE_THREAD, peer_python

HERE = Path(__file__).parent / "evaluation"
PEERS = {"inspect_ai": ("inspect_ai==0.3.285", "openai==3.54.0"), "verifiers": ("verifiers==0.3.1", "openai==2.54.0")}
CONCURRENT = (1, 32, 512)
GOAL = 1500  # episodes/s at 512 at a time, with the model in the process
SCORE = 0.75


@dataclass(frozen=True)
class Side:
    name: str
    script: str
    python: Path = Path(sys.executable)
    env: dict[str, str] = field(default_factory=dict)


def play(side: Side, episodes: int, concurrent: int, base_url: str | None) -> dict[str, float]:
    """One evaluation by one side: wall and CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="agentgym-evaluate-") as folder:
        command = [side.python, HERE / side.script, "--episodes", str(episodes), "--concurrent", str(concurrent)]
        command += ["--folder", folder, *(["--base-url", base_url] if base_url else [])]
        env = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", **side.env}
        done = subprocess.run(
            list(map(str, command)), check=False, env=env, capture_output=True, text=True, timeout=900
        )
    if done.returncode:
        raise SystemExit(f"{side.name} at {concurrent} failed: {done.stderr[-2000:]}")
    took = json.loads(done.stdout.strip().splitlines()[-1])
    if abs(took["score"] - SCORE) > 1 / episodes:
        raise SystemExit(f"{side.name} at {concurrent}: the score is {took['score']}, not {SCORE}")
    return took


def measure(sides: list[Side], episodes: int, rounds: int, places: tuple[int, ...], base_url: str | None) -> list[dict]:
    """All sides in turn, `rounds` times; the least wall time and the least CPU time of each."""
    best: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for concurrent in places:
            for side in sides:
                took = play(side, episodes, concurrent, base_url)
                pair = [took["wall"], took["cpu"]]
                best[concurrent, side.name] = list(map(min, best.get((concurrent, side.name), pair), pair))
    return [
        {
            "side": name,
            "concurrent": concurrent,
            "episodes_per_second": round(episodes / wall, 1),
            "cpu_microseconds_per_episode": round(cpu / episodes * 1e6),
        }
        for (concurrent, name), (wall, cpu) in best.items()
    ]


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    """The URL of an endpoint in a process of its own."""
    with subprocess.Popen([sys.executable, HERE / "endpoint.py"], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        finally:
            server.kill()


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}\n\n| side | concurrent | episodes/s | CPU us/episode |\n|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {:,.0f} | {:,.0f} |".format(*row.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--episodes", type=int, default=2048, help="of each evaluation (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts (default: 3)")
    parser.add_argument("--only-agentgym", action="store_true", help="without the peers")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    args = parser.parse_args()
    episodes, rounds = (64, 1) if args.quick else (args.episodes, args.rounds)
    ours = Side("agentgym", "play_agentgym.py")
    sides = [ours, Side("agentgym, in memory", ours.script, env={"AGENTGYM_IN_MEMORY": "1"})]
    if not args.only_agentgym:
        sides += [
            Side("inspect_ai", "play_inspect.py", peer_python("inspect_ai", PEERS["inspect_ai"])),
            Side("verifiers", "play_verifiers.py", peer_python("verifiers", PEERS["verifiers"])),
        ]
    instant = measure(sides, episodes, rounds, CONCURRENT, None)
    show(f"{episodes} episodes, the model in the process", instant)
    reached = next(r["episodes_per_second"] for r in instant if r["side"] == ours.name and r["concurrent"] == 512)
    print(f"\nagentgym at 512: {reached:,.0f} episodes/s, goal {GOAL:,}: {'met' if reached >= GOAL else 'MISSED'}")
    with endpoint() as base_url:
        served = measure([s for s in sides if s != sides[1]], max(episodes // 2, 1), rounds, (32, 512), base_url)
    show(f"{max(episodes // 2, 1)} episodes, a local HTTP endpoint", served)
    write(args.out, peers=PEERS, rounds=rounds, goal=GOAL, instant=instant, http=served)


if __name__ == "__main__":
    main()
