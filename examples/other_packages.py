"""Play an environment of another package by its id: Gymnasium's are here, for the others see agentgym_envs/adapters/README.md.

python examples/other_packages.py
python examples/other_packages.py --env gymnasium:Taxi-v4
"""

import argparse
import asyncio
import random

import agentgym
from agentgym.policies import RandomPolicy


def main():
    parser = argparse.ArgumentParser(description="Play an environment of another package at random.")
    parser.add_argument("--env", default="gymnasium:Blackjack-v1", help="prefix:name (default: gymnasium:Blackjack-v1)")
    parser.add_argument("-n", type=int, default=5, help="episodes (default: 5)")
    args = parser.parse_args()

    spec = agentgym.spec(args.env)
    env = spec.make()
    rewards = []
    for task in spec.tasks("test").take(args.n):
        policy = RandomPolicy(rng=random.Random(task.id))
        trajectory = asyncio.run(agentgym.run_episode(env, policy, task))
        rewards.append(trajectory.reward)
        if len(rewards) == 1:
            for message in trajectory.messages():
                print(f"--- {message['role']}\n{message['content']}")
        print(f"--- {trajectory.id}: {trajectory.end}, {len(trajectory.turns)} turns, reward {trajectory.reward:g}")
    env.close()
    print(f"mean reward {sum(rewards) / len(rewards):g} over {len(rewards)} episodes")


if __name__ == "__main__":
    main()
