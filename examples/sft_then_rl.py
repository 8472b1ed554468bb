"""Imitate an expert's episodes, then go on by reinforcement learning from that checkpoint.

python examples/sft_then_rl.py [--episodes 1000] [key=value ...]      settings are those of the second run

The expert is any policy: here the environment's own, which errs at times; it may be a large model (`ChatPolicy`). Only its successes are
kept. A record of the file is `{"messages": [...]}`, as others write it too.
"""

import argparse
import asyncio
import json
import random
from functools import partial
from pathlib import Path

from train import MODEL, TINY, steps_of, train

import agentgym
from agent_train.report.metrics import read_metrics
from agentgym.policies import ExpertPolicy
from agentgym.rollout import Episode, run_many

GAME = {"view": "near", "holes": 0.12, "max_turns": 14}  # as configs/env/frozen_lake.yaml has it


def demonstrations(count: int, file: Path) -> int:
    """Write the expert's successes among so many episodes; how many there are."""
    spec = agentgym.spec("frozen_lake")
    tasks = spec.tasks("train", **GAME).take(count)
    episodes = [Episode(task, 0, seed) for seed, task in enumerate(tasks)]
    expert = lambda episode: ExpertPolicy(mistakes=0.3, rng=random.Random(episode.seed))  # noqa: E731
    played = asyncio.run(run_many(partial(spec.make, **GAME), expert, episodes))
    kept = [trajectory for trajectory in played if trajectory.success]
    file.write_text("".join(json.dumps({"messages": trajectory.messages()}) + "\n" for trajectory in kept))
    return len(kept)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Imitation, then reinforcement learning.")
    parser.add_argument("--episodes", type=int, default=1000, help="of the expert")
    asked, settings = parser.parse_known_args(arguments)
    file = Path("demonstrations.jsonl")
    print(f"{demonstrations(asked.episodes, file)} of {asked.episodes} episodes of the expert are kept in {file}")

    imitation = train("mode=sft", f"data.train={file}", "data.batch_rows=16", "learner.lr=4e-3", *MODEL)
    losses = [record["loss"] for record in read_metrics(imitation / "metrics.jsonl") if record["kind"] == "sft"]
    print(f"imitation: {losses[0]:.2f} nats a token at first, {losses[-1]:.2f} at last")

    start = imitation / "checkpoints" / (imitation / "checkpoints" / "latest").read_text().strip()
    folder = train(*TINY, f"model.path={start}", "sft.episodes=0", *settings)  # no warm start: it has learned that
    for record in steps_of(folder):
        print(f"step {record['step']}: success {record['success']:.0%}, reward {record['reward']:.2f}")


if __name__ == "__main__":
    main()
