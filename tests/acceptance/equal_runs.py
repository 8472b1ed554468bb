"""Whether two training runs are the same run, to the last bit; and one that was cut off, to be compared with the whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_process import Training

from agent_train.report.metrics import OF_FAILURES
from agentgym.core.trajectory import read_jsonl

TIMES = {"elapsed", "tokens_per_second", "seconds"}


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A record of metrics without what a clock measured, and without what tells that a part of it was played again."""
    return {
        key: without_times(value) if isinstance(value, dict) else value
        for key, value in record.items()
        if key not in TIMES | OF_FAILURES and not key.endswith("_seconds")
    }


def sampled(run: Training) -> dict[str, list]:
    """Every trajectory of a run by file: its id, and all token ids and log-probabilities."""
    return {
        file.name: [(t.id, [(n.tokens.completion_ids, n.tokens.logprobs) for n in t.turns]) for t in read_jsonl(file)]
        for file in sorted((run.folder / "trajectories").glob("*.jsonl"))
    }


def played(run: Training) -> dict[str, list]:
    """Every trajectory of a run by file: all that environments said and gave, whatever they are called."""
    return {
        file.name: [
            [t.id, t.task_id, t.end, t.error, t.metrics, t.final_observation]
            + [[turn.observation, turn.reply, turn.reward, turn.info] for turn in t.turns]
            for t in read_jsonl(file)
        ]
        for file in sorted((run.folder / "trajectories").glob("*.jsonl"))
    }


def leave_as_killed_after(step: int, run: Training, folder: Path) -> None:
    """Copy a finished run as it is when its driver is killed after a step and before the next checkpoint is written."""
    shutil.copytree(run.folder, folder)
    (folder / "result.json").unlink(missing_ok=True)  # of offline runs there is none
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    (folder / "checkpoints" / "latest").write_text(f"step-{step:06d}\n")


def assert_equal_runs(one: Training, other: Training) -> None:
    """Metrics, tokens, episodes and the last weights, of all roles, are equal."""
    assert [without_times(record) for record in one.metrics] == [without_times(record) for record in other.metrics]
    assert sampled(one) == sampled(other)
    assert played(one) == played(other)
    weights = [
        {f.relative_to(run.checkpoint): f.read_bytes() for f in run.checkpoint.rglob("*.safetensors")}
        for run in (one, other)
    ]
    assert weights[0]
    assert weights[0] == weights[1]


def assert_equal_states(one: Training, other: Training, roles: tuple[str, ...], scratch: Path) -> None:
    """The last checkpoints hold the same weights and optimizer averages of each role that learns."""
    for role in roles:
        states = []
        for number, run in enumerate((one, other)):
            file = scratch / f"{role}-{number}.pt"
            dcp_to_torch_save(run.checkpoint / "state" / role, file)
            states.append(torch.load(file))
        ours, theirs = states
        assert ours.keys() == theirs.keys()
        assert any(name.endswith("exp_avg_sq") for name in ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
