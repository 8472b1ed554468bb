"""Environments of another machine: here a server on this one, played by plain calls and by many episodes at once.

python examples/remote_env.py                                       starts a server and ends it
python examples/remote_env.py --url http://host:8000                a server that is there
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

import agentgym
from agentgym import Blocking
from agentgym.policies import ExpertPolicy
from agentgym.rollout import Episode, run_many

ENVS = ("frozen_lake", "sokoban")


@contextmanager
def server(*envs):
    """The URL of `agentgym serve` at a free port. It ends its sessions and their processes when it is told to end."""
    command = [sys.executable, "-m", "agentgym.cli", "serve", *envs, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = ""
        while not said.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                sys.exit(f"the server ended with {process.wait()}")
            said += line
        yield json.loads(said)["url"]
    finally:
        process.terminate()
        process.wait()


def plain_calls(url):
    """One episode by `reset` and `step`, as Gymnasium has them."""
    env = Blocking(agentgym.make(f"{url}/frozen_lake"))
    observation, _ = env.reset(seed=0)
    print(observation[0]["content"])
    over = False
    while not over:
        action = env.expert_action()
        observation, reward, terminated, truncated, _ = env.step(action)
        print(f"{action:<6} {reward:+g}  {observation[0]['content'].splitlines()[0]}")
        over = terminated or truncated
    env.close()


def played(id, n):
    """Rewards and steps of n expert episodes, eight at a time, and how long they took."""
    spec = agentgym.spec(id)
    episodes = [Episode(task, 0, seed) for seed, task in enumerate(spec.tasks("test").take(n))]
    begun = time.perf_counter()
    trajectories = asyncio.run(run_many(spec.make, lambda episode: ExpertPolicy(), episodes, concurrency=8))
    seconds = time.perf_counter() - begun
    failed = [trajectory.error for trajectory in trajectories if trajectory.failed]
    if failed:
        sys.exit(failed[0])
    return [[turn.reward for turn in trajectory.turns] for trajectory in trajectories], seconds


def main():
    parser = argparse.ArgumentParser(description="Play environments that are served.")
    parser.add_argument("--url", help="of a server of frozen_lake and sokoban (default: starts one)")
    parser.add_argument("-n", type=int, default=16, help="episodes of each")
    args = parser.parse_args()
    if args.url:
        show(args.url, args.n)
    else:
        with server(*ENVS) as url:
            show(url, args.n)


def show(url, n):
    plain_calls(url)
    table = Table("environment", "episodes", "steps", "served", "here", "rewards", box=None)
    for env in ENVS:
        served, seconds = played(f"{url}/{env}", n)
        here, quickly = played(env, n)
        same = "the same" if served == here else "different"
        table.add_row(env, str(n), str(sum(map(len, served))), f"{seconds:.2f} s", f"{quickly:.2f} s", same)
    Console().print(table)


if __name__ == "__main__":
    main()
