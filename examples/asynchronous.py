"""Rollouts that run ahead of training, and the correction for the older weights that sampled them.

python examples/asynchronous.py [key=value ...]

With a staleness of 2, step n trains on samples of weight versions n - 2 and newer, while the next episodes are played.
The loss clips around the trainer's own policy, and each token is weighted by how much likelier it is now than when
sampled, at most 2 (decoupled PPO). Watch `ess`, the effective share of the tokens: if it falls far below 1, the lag is
too large.
"""

import sys
from collections import Counter

from train import TINY, steps_of, train

from agentgym.core.trajectory import read_jsonl

AHEAD = [
    "trainer.staleness=2",
    "env.kwargs.shaping=1.0",  # rewards on the way: it learns from the first step
    "algorithm.updates_per_step=2",
    "algorithm.proximal=recomputed",
    "algorithm.correction.name=tis",
    "algorithm.correction.cap=2",
    "trainer.steps=8",
]


def main(arguments):
    folder = train(*TINY, *AHEAD, *arguments)
    print("step  lag  tokens   ess  mean weight, capped")
    for record in steps_of(folder):
        update = record["update"]
        for lag, gap in update["gap_by_lag"].items():
            weights = f"{update['correction_mean']:.3f}, {update['cut_fraction']:.1%}"
            print(f"{record['step']:4}  {lag:>3}  {gap['tokens']:6.0f}  {gap['ess']:.2f}  {weights}")
    # The same from the episodes: each token has the version that sampled it. Version 0 is the start, and step n makes n.
    last = steps_of(folder)[-1]["step"]
    episodes = read_jsonl(folder / "trajectories" / f"train-{last:06d}.jsonl")
    versions = Counter(version for t in episodes for turn in t.turns for version in turn.tokens.versions)
    print(f"step {last} trained version {last - 1} on tokens of versions {dict(sorted(versions.items()))}")


if __name__ == "__main__":
    main(sys.argv[1:])
