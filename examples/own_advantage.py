"""An advantage of your own: a function in a file, named as `module:function`.

python examples/own_advantage.py [key=value ...]
cd examples && agent-train +env=frozen_lake algorithm.advantage.name=own_advantage:by_rank

Losses, filters, corrections and reward shaping work the same way (docs/algorithms.md). Each is tried on made-up
episodes before anything starts.
"""

import sys

from train import TINY, steps_of, train


def by_rank(inputs):
    """From -1 for the worst of a group to 1 for its best: how large rewards are does not count, only their order."""
    advantages = []
    for rewards in inputs.rewards:  # of the episodes of each group
        others = max(1, len(rewards) - 1)
        beaten = [sum(other < own for other in rewards) for own in rewards]
        better = [sum(other > own for other in rewards) for own in rewards]
        advantages.append([(down - up) / others for down, up in zip(beaten, better, strict=True)])
    return inputs.on_tokens(advantages)


def main(arguments):
    own = ["algorithm.advantage.name=own_advantage:by_rank", "env.kwargs.shaping=1.0", "trainer.steps=10"]
    folder = train(*TINY, *own, *arguments)
    for record in steps_of(folder):
        said = f"reward {record['reward']:+.2f} +- {record['reward_std']:.2f}"
        print(
            f"step {record['step']}: {said}, advantages {record['advantage_mean']:+.2f} +- {record['advantage_std']:.2f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
