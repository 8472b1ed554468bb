"""What the agent loop costs: `run_many` against a plain `for` loop and against `asyncio.to_thread` for every call.

All sides play the same episodes of frozen_lake with the same scripted answers, so what differs is the loop. The plain loop
is the limit: nothing runs at the same time, nothing has a timeout, and the first error ends all. The second table plays a
lake whose every step sleeps, as a tool or a database would.

python benchmarks/rollout.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path

from found import write

from agentgym import Env, Task, make, run_many
from agentgym.policies.base import ScriptedPolicy
from agentgym.rollout.episode import Episode
from agentgym_envs.games.grid import DIRECTIONS

Played = list[tuple[int, float]]  # turns and reward of each episode, in order


def answer(messages: list) -> str:
    return DIRECTIONS[len(messages) // 2 * 3 % 4]  # goes round, so that some episodes are long and some short


def slow_lake(seconds: float) -> Env:
    env = make("frozen_lake")
    fast = env.step

    def step(action):
        time.sleep(seconds)
        return fast(action)

    env.step = step
    return env


def plain_loop(make_env: Callable[[], Env], tasks: list[Task], concurrent: int) -> Played:
    env, played = make_env(), []
    for task in tasks:
        env.init(task)
        messages, _ = env.reset(seed=0)
        turns, total, over = 0, 0.0, False
        while not over:
            action = {"role": "assistant", "content": answer(messages)}
            observation, reward, terminated, truncated, _ = env.step(action)
            messages = [*messages, action, *observation]
            turns, total, over = turns + 1, total + reward, terminated or truncated
        played.append((turns, total))
    env.close()
    return played


def thread_per_call(make_env: Callable[[], Env], tasks: list[Task], concurrent: int) -> Played:
    played: dict[int, tuple[int, float]] = {}
    waiting = iter(enumerate(tasks))

    async def work() -> None:
        env = await asyncio.to_thread(make_env)
        for index, task in waiting:
            await asyncio.to_thread(env.init, task)
            messages, _ = await asyncio.to_thread(env.reset, seed=0)
            turns, total, over = 0, 0.0, False
            while not over:
                action = {"role": "assistant", "content": answer(messages)}
                observation, reward, terminated, truncated, _ = await asyncio.to_thread(env.step, action)
                messages = [*messages, action, *observation]
                turns, total, over = turns + 1, total + reward, terminated or truncated
            played[index] = (turns, total)
        await asyncio.to_thread(env.close)

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(concurrent)))

    asyncio.run(run())
    return [played[index] for index in range(len(tasks))]


def agent_loop(make_env: Callable[[], Env], tasks: list[Task], concurrent: int) -> Played:
    episodes = [Episode(task, seed=0) for task in tasks]
    found = asyncio.run(run_many(make_env, lambda _: ScriptedPolicy(answer), episodes, concurrency=concurrent))
    assert not any(t.failed for t in found), next(t.error for t in found if t.failed)
    return [(len(t.turns), t.reward) for t in found]


SIDES = {"for loop": plain_loop, "to_thread": thread_per_call, "run_many": agent_loop}


def measure(cases: list[tuple[str, int]], make_env: Callable[[], Env], tasks: list[Task], rounds: int) -> list[dict]:
    """Every case once a round, one after another; the least CPU time and the least wall time of all rounds."""
    best: dict[tuple[str, int], list[float]] = {}
    expected = None
    for _ in range(rounds):
        for case in cases:
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            played = SIDES[case[0]](make_env, tasks, case[1])
            took = [time.perf_counter() - wall, time.process_time() - cpu]
            expected = expected or played
            assert played == expected, f"{case} played other episodes than {cases[0]}"
            best[case] = [min(pair) for pair in zip(best.get(case, took), took, strict=True)]
    turns = sum(count for count, _ in expected)
    return [
        {
            "side": side,
            "concurrent": concurrent,
            "episodes_per_second": round(len(tasks) / wall, 1),
            "turns_per_second": round(turns / wall, 1),
            "cpu_microseconds_per_turn": round(cpu / turns * 1e6, 1),
        }
        for (side, concurrent), (wall, cpu) in best.items()
    ]


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}\n\n| side | concurrent | episodes/s | turns/s | CPU us/turn |\n|---|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {:,.0f} | {:,.0f} | {:,.0f} |".format(*row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--episodes", type=int, default=1024, help="episodes of the first table (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least counts (default: 5)")
    args = parser.parse_args()
    tasks = list(make("frozen_lake").tasks.take(args.episodes))
    cases = [("for loop", 1), *((side, n) for n in (1, 32, 512) for side in ("to_thread", "run_many"))]
    instant = measure(cases, lambda: make("frozen_lake"), tasks, args.rounds)
    show(f"{len(tasks)} episodes, steps that take no time", instant)
    few = tasks[: max(len(tasks) // 8, 1)]
    cases = [("for loop", 1), ("to_thread", 64), ("run_many", 64)]
    sleeping = measure(cases, lambda: slow_lake(0.005), few, 2)
    show(f"{len(few)} episodes, every step sleeps 5 ms", sleeping)
    write(args.out, instant=instant, sleeping=sleeping)


if __name__ == "__main__":
    main()
