"""Train from Python: a tiny run on this machine in less than a minute, with the embedded engine (no vLLM).

python examples/train.py [key=value ...]

It is far too short to learn the game; `make train` runs the whole job. Any setting can be given, as to `agent-train`.
"""

import sys

from agent_train.config import ConfigError
from agent_train.config.compose import compose
from agent_train.config.validation import validate
from agent_train.trainer.run import run

TINY = [
    "+env=frozen_lake",
    "engine=embedded",
    "model.tiny.hidden=64",
    "model.tiny.heads=2",
    "model.tiny.layers=1",
    "sft.episodes=1024",
    "sft.batch_rows=16",
    "sft.lr=4e-3",
    "learner.workers=1",
    "learner.lr=2e-4",
    "algorithm.group_size=4",
    "trainer.groups_per_step=4",
    "trainer.steps=5",
    "trainer.eval_episodes=50",
]


def main():
    try:
        config = compose([*TINY, *sys.argv[1:]])
        validate(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
