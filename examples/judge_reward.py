"""A language model as a judge of each group: what it says goes into the rewards.

python examples/judge_reward.py --base-url http://localhost:8000/v1 --model my-judge [key=value ...]

After a group is played, the judge ranks its episodes by the rubric in one request; the best gets `judge.weight`, the worst 0, on top of
what the environment gives. A policy learns what the judge likes, its mistakes too: read the best and the worst that it has found. For a
score of each episode by itself see `Judge` in examples/rewards.py.
"""

import argparse
from itertools import groupby

from train import TINY, steps_of, train

from agentgym.core.trajectory import read_jsonl

RUBRIC = "Does the agent come nearer to the goal with each move, without walking to and fro?"


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train on a judge's rankings.")
    parser.add_argument("--base-url", required=True, help="up to and with the version: http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="name of the judge there")
    asked, settings = parser.parse_known_args(arguments)
    judge = [
        f"judge.url={asked.base_url}",
        f"judge.model={asked.model}",
        f"judge.rubric='{RUBRIC}'",
        "judge.weight=0.5",
    ]
    folder = train(*TINY, *judge, *settings)

    for record in steps_of(folder):
        print(
            f"step {record['step']}: reward {record['reward']:.2f}, of it {record['env']['reward/judge'] / 2:.2f} the judge's"
        )
    last = steps_of(folder)[-1]["step"]
    episodes = read_jsonl(folder / "trajectories" / f"train-{last:06d}.jsonl")
    for task, group in groupby(episodes, key=lambda episode: episode.task_id):
        ranked = sorted((e for e in group if not e.failed), key=lambda episode: -episode.metrics["reward/judge"])
        print(f"task {task}")
        for name, episode in (("best", ranked[0]), ("worst", ranked[-1])):
            moves = " ".join(str(turn.reply["content"]) for turn in episode.turns)
            print(f"  {name:>5}: {episode.metrics['reward/judge']:.2f}, {episode.end}, {moves!r:.80}")


if __name__ == "__main__":
    main()
