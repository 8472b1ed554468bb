"""Evaluation: run a policy over tasks and say how good it is, and how sure that is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from agentgym.evaluate.statistics import Report, summarise
from agentgym.policy import Policy
from agentgym.registration import EnvSpec, spec
from agentgym.rollout import Episode, Limits, run_many
from agentgym.trajectory import Trajectory, write_jsonl


async def evaluate(
    env: str | EnvSpec,
    make_policy: Callable[[Episode], Policy],
    *,
    split: str = "test",
    n: int | None = None,
    k: int = 1,
    seed: int = 0,
    concurrency: int = 64,
    limits: Limits | None = None,
    retries: int = 1,
    out: Path | None = None,
    on_end: Callable[[Trajectory], None] | None = None,
) -> Report:
    """Play k episodes of each of the first n tasks of a split.

    Args:
        env: id or spec.
        make_policy: makes the policy of one episode.
        split: of the environment's task set.
        n: how many tasks; None or more than there are: all.
        k, seed: episodes of each task; sample i is reset with seed `seed + i`.
        concurrency, limits, retries: see `run_many`; `limits` None: `Limits()`.
        out: a folder for `trajectories.jsonl`, written as episodes end, and `report.json`.
        on_end: called with each trajectory as it ends.

    Raises:
        ValueError: n or k below 1, an unknown split, or `out` holds another evaluation.
    """
    if k < 1 or (n is not None and n < 1):
        raise ValueError(f"n and k must be at least 1, not {n} and {k}")
    env = env if isinstance(env, EnvSpec) else spec(env)
    tasks = env.tasks(split)
    tasks = tasks if n is None else tasks.take(n)
    store = None if out is None else _open_store(out)

    def record(trajectory: Trajectory) -> None:
        if store is not None:
            write_jsonl(store, [trajectory])
        if on_end is not None:
            on_end(trajectory)

    started = time.perf_counter()
    episodes = [Episode(task, sample, seed + sample) for task in tasks for sample in range(k)]
    trajectories = await run_many(
        env.make,
        make_policy,
        episodes,
        concurrency=concurrency,
        limits=limits or Limits(),
        retries=retries,
        on_end=record,
        env_id=env.id,
    )
    report = summarise(trajectories, env=env.id, split=split, samples=k, seconds=time.perf_counter() - started)
    if out is not None:
        (out / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return report


def _open_store(out: Path) -> Path:
    store = out / "trajectories.jsonl"
    if store.exists():
        raise ValueError(f"{out} already holds an evaluation ({store.name}): choose another folder or move it away")
    out.mkdir(parents=True, exist_ok=True)
    return store
