"""Train from Python: a tiny run on this machine in less than a minute, with the embedded engine (no vLLM).

python examples/train.py [key=value ...]

It is far too short to learn the game; `make train` runs the whole job. It takes any setting of `agent-train`. Other
examples call `train` to run and `steps_of` to read the metrics.
"""

import sys
from pathlib import Path
from typing import Any

from agent_train.config.compose import compose
from agent_train.config.schema import ConfigError
from agent_train.config.validation import validate
from agent_train.report.metrics import read_metrics
from agent_train.trainer.resume import run_path
from agent_train.trainer.run import run

MODEL = ["model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.layers=1", "learner.workers=1"]
TINY = [
    "+env=frozen_lake",
    "engine=embedded",
    *MODEL,
    "sft.episodes=1024",
    "sft.batch_rows=16",
    "sft.lr=4e-3",
    "learner.lr=2e-4",
    "algorithm.group_size=4",
    "trainer.groups_per_step=4",
    "trainer.steps=5",
    "trainer.eval_episodes=50",
]


def train(*settings: str) -> Path:
    """The folder of a run with these settings. The process ends with the run's exit code if it is not 0."""
    try:
        config = compose(settings)
        validate(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    config.trainer.name = run_path(config).name  # it has the time in it where none is given
    if code := run(config):
        sys.exit(code)
    return run_path(config)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What each training step measured; docs/metrics.md names the fields."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


if __name__ == "__main__":
    train(*TINY, *sys.argv[1:])
