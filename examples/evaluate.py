"""Evaluate policies on two environments, with no training and no torch.

python examples/evaluate.py                                           the scripted expert and random play
python examples/evaluate.py --model M --base-url http://host:8000/v1  and a model behind an endpoint
"""

import argparse
import asyncio
import random

from rich.console import Console

from agentgym import ChatPolicy
from agentgym.evaluate import evaluate, table_of
from agentgym.policies import ExpertPolicy, RandomPolicy

ENVS = ("frozen_lake", "tic_tac_toe")


def policies(args):
    """What plays, by name: each a function from an episode to its policy."""
    made = {
        "expert": lambda episode: ExpertPolicy(),
        "random": lambda episode: RandomPolicy(rng=random.Random(f"{episode.task.id}/{episode.sample}")),
    }
    if args.model:
        made[args.model] = lambda episode: ChatPolicy(args.model, args.base_url, seed=episode.sample)
    return made


def main():
    parser = argparse.ArgumentParser(description="Evaluate policies on two environments.")
    parser.add_argument("--model", help="name of the model at the endpoint")
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="OpenAI-compatible endpoint")
    parser.add_argument("-n", type=int, default=20, help="tasks of the test split")
    parser.add_argument("-k", type=int, default=2, help="episodes of each task")
    args = parser.parse_args()
    for name, make_policy in policies(args).items():
        reports = [asyncio.run(evaluate(env, make_policy, n=args.n, k=args.k)) for env in ENVS]
        Console().print(f"[bold]{name}")
        Console().print(table_of(reports))


if __name__ == "__main__":
    main()
