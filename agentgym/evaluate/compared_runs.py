"""Runs as a comparison reads them: the means of every task, cell by cell, of an evaluation, a training run, or one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core.trajectory import Trajectory, read_jsonl
from agentgym.evaluate.results import EpisodeNumbers, numbers_of
from agentgym.evaluate.store import effective, read_run

MEASURES = ("success", "reward", "turns", "tokens")
WITH_ERRORS = ("success_with_errors", "reward_with_errors")  # each error counted as the environment's least reward


@dataclass
class TaskMeans:
    """Sums over the episodes of one task that were played, and how many failed. Those of `WITH_ERRORS` are over both."""

    episodes: int = 0
    errors: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0

    def add(self, e: EpisodeNumbers) -> None:
        """One more episode."""
        for name, value in zip(WITH_ERRORS, (0.0, e.floor) if e.failed else (e.success, e.reward), strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + value
        if e.failed:
            self.errors += 1
            return
        self.episodes += 1
        values = {"success": e.success, "reward": e.reward, "turns": float(e.turns)}
        if "completion_tokens" in e.usage:
            self.counted += 1
            values["tokens"] = float(e.usage["completion_tokens"])
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, measure: str) -> float | None:
        """Of an episode; None where none was played, or nobody counted tokens."""
        episodes = self.counted if measure == "tokens" else self.episodes
        episodes += self.errors if measure in WITH_ERRORS else 0
        return self.sums[measure] / episodes if episodes else None


@dataclass
class ComparedCell:
    """The tasks of one cell, and how it was played: `settings` has what is known of that and must be the same."""

    env: str
    split: str
    agent: str
    tasks: dict[str, TaskMeans]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `Cell.name`."""
        split = "" if self.split in ("test", "") else f"/{self.split}"
        return f"{self.env}{split}@{self.agent}"


@dataclass
class ComparedRun:
    """A run by its path."""

    path: str
    cells: list[ComparedCell]


def read_compared(path: Path, tasks_of: Callable[[Path], dict[str, TaskMeans]] | None = None) -> ComparedRun:
    """A run to compare: an evaluation's folder, a training run's (its last evaluation), or a file of trajectories.

    Args:
        path: where it is.
        tasks_of: gives the means of a cell by its file, for who has read it already; None reads it.

    Raises:
        ValueError: it is none of these, or holds a broken line.
    """
    if path.is_file() and path.suffix == ".json":
        raise ValueError(f"{path} is no file of episodes (.jsonl): name the run's folder, {path.parent}")
    if path.is_file():
        return ComparedRun(str(path), _cells_of(effective(path), path.stem.rpartition("@")[2]))
    if (path / "run.json").is_file():
        return ComparedRun(str(path), [_evaluated(path, r, tasks_of) for r in read_run(path)["cells"]])
    evaluations = sorted((path / "trajectories").glob("eval-*.jsonl"))
    if evaluations:
        last = evaluations[-1]
        return ComparedRun(str(path), _cells_of(read_jsonl(last), _step(last)))
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    raise ValueError(
        f"{path} holds nothing to compare: neither an evaluation (run.json) nor a training run's (trajectories/eval-*.jsonl)"
    )


def _evaluated(
    run: Path, record: dict[str, Any], tasks_of: Callable[[Path], dict[str, TaskMeans]] | None
) -> ComparedCell:
    env = record["env"]
    settings = {
        "kwargs": env.get("kwargs", {}),
        "entry point": env["entry_point"],
        "seed": record["seed"],
        "max_turns": record["max_turns"],
        "first task": record.get("first_task") or None,
    }
    if "kwargs" in (served := record.get("served", {})):
        settings["the server's kwargs"] = served["kwargs"]
    file = run / record["file"]
    tasks = _tasks(effective(file)) if tasks_of is None else tasks_of(file)
    return ComparedCell(env["id"], record["split"], record["agent"]["name"], tasks, settings)


def _step(path: Path) -> str:
    number = path.stem.partition("-")[2]
    return f"step {int(number)}" if number.isdigit() else path.stem


def _cells_of(trajectories: Iterable[Trajectory], agent: str) -> list[ComparedCell]:
    """A cell for each environment of a file; nobody wrote down their split and settings."""
    by_env: dict[str, dict[str, TaskMeans]] = {}
    for trajectory in trajectories:
        _add(by_env.setdefault(trajectory.env, {}), trajectory)
    return [ComparedCell(env, "", agent, tasks) for env, tasks in by_env.items()]


def _tasks(trajectories: Iterable[Trajectory]) -> dict[str, TaskMeans]:
    tasks: dict[str, TaskMeans] = {}
    for trajectory in trajectories:
        _add(tasks, trajectory)
    return tasks


def _add(tasks: dict[str, TaskMeans], trajectory: Trajectory) -> None:
    tasks.setdefault(trajectory.task_id, TaskMeans()).add(numbers_of(trajectory))
