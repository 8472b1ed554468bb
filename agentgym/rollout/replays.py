"""Replay episodes from their stored replies, in this process or another, and compare the observations."""

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from agentgym.core.messages import Action
from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import Trajectory
from agentgym.policies.base import ScriptedPolicy
from agentgym.processes.isolate import IsolatedCallError, NoWorker, Worker, WorkerDied, reference
from agentgym.rollout.episode import Episode, Limits, run_many

Replies = Sequence[tuple[Episode, Sequence[Action]]]


def shown(trajectory: Trajectory) -> list[str]:
    """An episode as JSON texts: the opening, then the observation and reward of each turn, then how it ended."""
    turns = trajectory.turns
    openings = [turn.observation for turn in turns] + [trajectory.final_observation]
    answers = [[after, turn.reward] for turn, after in zip(turns, openings[1:], strict=True)]
    return [json.dumps(value, ensure_ascii=False) for value in (openings[0], *answers, trajectory.end)]


async def replay(spec: EnvSpec, episodes: Replies, limits: Limits, concurrency: int = 8) -> list[Trajectory]:
    replies = {(episode.task.id, episode.sample): actions for episode, actions in episodes}

    def script(episode: Episode) -> ScriptedPolicy:
        return ScriptedPolicy(replies[episode.task.id, episode.sample], "replayed")

    again = [episode for episode, _ in episodes]
    return await run_many(spec.make, script, again, concurrency=concurrency, limits=limits, retries=0, env_id=spec.id)


class ElsewhereError(RuntimeError):
    """The other process could not play the episodes; the message has the reason."""


async def replay_elsewhere(spec: EnvSpec, episodes: Replies, limits: Limits, timeout: float) -> list[Trajectory]:
    """Replay episodes in another process, with another hash seed, and so another order of sets.

    Raises ValueError if the spec has no JSON form, ElsewhereError if that process failed, or took too long.
    """
    spec = EnvSpec.from_json(spec.to_json())
    other_hash = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    try:
        # Leaving the block kills the worker, so a cancelled call ends too.
        with Worker({**os.environ, "PYTHONHASHSEED": other_hash}, memory=None, stderr=subprocess.DEVNULL) as worker:
            records = await asyncio.to_thread(worker.call, reference(_play), spec, episodes, limits, timeout=timeout)
    except TimeoutError as error:
        raise ElsewhereError(f"another process did not play the same episodes within {timeout:g} s") from error
    except (IsolatedCallError, NoWorker, WorkerDied) as error:
        raise ElsewhereError(f"another process could not play the same episodes: {error!s:.500}") from error
    return [Trajectory.from_json(record) for record in records]


def _play(spec: EnvSpec, episodes: Replies, limits: Limits) -> list[dict[str, Any]]:
    return [trajectory.to_json() for trajectory in asyncio.run(replay(spec, episodes, limits))]
