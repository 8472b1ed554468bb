"""Runs of `agent-train` whose engine writes down all that it samples, for a comparison with what is trained.

As a program: python logged_run.py COMMANDS. A command is a folder and the words behind `agent-train`; one runs after the other.
"""

import json
import os
import sys
from pathlib import Path

from agent_train.algorithms.selection import turn_rewards
from agent_train.config.schema import AlgorithmConfig
from agent_train.data.samples import samples_of
from agent_train.report.metrics import read_metrics
from agentgym.core.trajectory import read_jsonl

ROOT = Path(__file__).parents[2]
LOG = "engine.log"


def run_in_turn(forks, runs, shared_ray, **more):
    """Runs of two steps in one process, as its imports take most of the time: for each its folder, and its words."""
    small = ["learner.workers=1", "trainer.steps=2", "trainer.name=run"]
    commands = [[str(folder), *words, *small, f"trainer.runs_dir={folder}"] for folder, words in runs]
    env = {**os.environ, **shared_ray, **more, "PYTHONPATH": str(ROOT)}
    forks.run([__file__, json.dumps(commands)], env, 800, ROOT)


def trained(folder):
    """The training trajectories of a run, their samples, and its steps: all that the engine sampled, and no more."""
    files = sorted((folder / "run/trajectories").glob("*.jsonl"))
    trajectories = [t for path in files if path.name.startswith("train") for t in read_jsonl(path)]
    played = [t for path in files for t in read_jsonl(path)]
    assert not any(t.failed for t in played), [t.error for t in played]

    sampled = [json.loads(line) for line in (folder / LOG).open()]
    told = [[*vars(turn.tokens).values()][:4] for t in played for turn in t.turns]
    assert sorted(told) == sorted(sampled), "log-probabilities and versions are those of the engine's own log too"

    rows = [row for t in trajectories for row in samples_of(t, 1.0, turn_rewards(t, AlgorithmConfig()))]
    ids = sorted(id for row in rows for id, is_trained in zip(row.ids, row.mask, strict=True) if is_trained)
    assert ids == sorted(id for t in trajectories for turn in t.turns for id in turn.tokens.completion_ids)
    steps = [record for record in read_metrics(folder / "run/metrics.jsonl") if record["kind"] == "train"]
    assert [step["agent"]["trainable"] >= 0.995 for step in steps] == [True, True]
    assert sum(step["sampled_tokens"] for step in steps) == len(ids)
    assert all(step["update"]["grad_norm"] > 0 for step in steps)
    return trajectories, rows, steps


def _logged(generate, log):
    async def generate_and_log(self, prompt_ids, sampling, episode=None):
        completion = await generate(self, prompt_ids, sampling, episode)
        with log.open("a") as file:
            file.write(json.dumps([prompt_ids, completion.ids, completion.logprobs, completion.versions]) + "\n")
        return completion

    return generate_and_log


def _main(commands):
    from agent_train.cli import main
    from agent_train.engine.embedded import EmbeddedEngine
    from agent_train.engine.external import OpenAIEngine
    from agent_train.engine.vllm import VllmEngine

    engines = {engine: engine.generate for engine in (EmbeddedEngine, OpenAIEngine, VllmEngine)}
    for folder, *words in commands:
        for engine, generate in engines.items():
            engine.generate = _logged(generate, Path(folder) / LOG)
        if code := main(words):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
