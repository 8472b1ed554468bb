"""Give an environment another reward: named, weighted functions, and a language model as a judge if there is an endpoint.

python examples/rewards.py
python examples/rewards.py --model M --base-url http://localhost:8000/v1
"""

import argparse
import asyncio

import agentgym
from agentgym import ScriptedPolicy
from agentgym.rewards import Reward, Rewarded, Rubric, env_reward, has_tags, length_penalty
from agentgym.rewards.judge import Judge


def shows_its_work(completion: str, answer: str) -> float:
    """How much of the reply is not the answer, up to 40 letters: a reward function takes what it names."""
    return min(40, len(completion.replace(str(answer), ""))) / 40


def main():
    parser = argparse.ArgumentParser(description="Play an environment for another reward.")
    parser.add_argument("--model", help="name of a judge at the endpoint")
    parser.add_argument("--base-url", help="up to and with the version: http://localhost:8000/v1")
    args = parser.parse_args()

    rewards = [
        env_reward,  # what the environment itself gives: 1 for the right number
        Reward(has_tags("think"), weight=0.2),
        Reward(length_penalty(free=200, most=400), weight=0.5),
        Reward(shows_its_work, weight=0.0),  # only recorded
    ]
    if args.base_url:
        judge = Judge(args.base_url, args.model, "Is the reasoning right, and easy to follow?")
        rewards.append(Reward(judge, weight=0.5, timeout=120))
    env = Rewarded(agentgym.make("gsm8k"), Rubric(rewards))

    task = agentgym.TaskSet.load("gsm8k", "test")[0]
    replies = {
        "tidy": f"<think>I work it out step by step, and check it.</think> #### {task.answer}",
        "bare": f"#### {task.answer}",
        "wrong": "<think>I guess.</think> #### 0",
        "long": f"<think>{'Hmm. ' * 80}</think> #### {task.answer}",
    }
    for name, reply in replies.items():
        trajectory = asyncio.run(agentgym.run_episode(env, ScriptedPolicy([reply]), task))
        parts = ", ".join(f"{key.removeprefix('reward/')} {value:g}" for key, value in trajectory.metrics.items())
        print(f"{name:>5}: {trajectory.reward:+.2f}  ({parts})" if not trajectory.failed else trajectory.error)


if __name__ == "__main__":
    main()
