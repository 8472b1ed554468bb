"""Plays episodes again from their stored replies, here or in another process.

`python -m agentgym.rollout.replays` reads a request as JSON from standard input and answers with one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.core.messages import Action, Message, assistant
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Trajectory
from agentgym.policies.base import EndEpisode, Reply
from agentgym.rollout.episode import Episode, Limits, run_many

_MARK = "agentgym replays: "  # before the answer: an environment may print


class ReplayPolicy:
    """Repeats stored replies, whatever the environment shows.

    Args:
        replies: in order.
        end: the reason that ends an episode which goes on after the last.
    """

    def __init__(self, replies: Sequence[Action], end: str = "replayed"):
        self._replies = iter(replies)
        self._end = end

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The next reply."""
        for reply in self._replies:
            return Reply(assistant(reply))
        raise EndEpisode(self._end)


def shown(trajectory: Trajectory) -> list[str]:
    """An environment's answers as JSON texts: the opening, the observation and reward of each turn, and how the episode ended."""
    turns = trajectory.turns
    openings = [turn.observation for turn in turns] + [trajectory.final_observation]
    answers = [[after, turn.reward] for turn, after in zip(turns, openings[1:], strict=True)]
    return [json.dumps(value, ensure_ascii=False) for value in (openings[0], *answers, trajectory.end)]


async def replay(
    spec: EnvSpec,
    episodes: Sequence[tuple[Episode, Sequence[Action]]],
    *,
    limits: Limits | None = None,
    concurrency: int = 8,
) -> list[Trajectory]:
    """Play episodes again, in new environments and without retries."""
    replies = {(episode.task.id, episode.sample): actions for episode, actions in episodes}
    return await run_many(
        spec.make,
        lambda episode: ReplayPolicy(replies[episode.task.id, episode.sample]),
        [episode for episode, _ in episodes],
        concurrency=concurrency,
        limits=limits or Limits(),
        retries=0,
        env_id=spec.id,
    )


class ElsewhereError(RuntimeError):
    """The other process failed; the message says why."""


async def replay_elsewhere(
    spec: EnvSpec,
    episodes: Sequence[tuple[Episode, Sequence[Action]]],
    *,
    limits: Limits | None = None,
    timeout: float = 120.0,
) -> list[Trajectory]:
    """Play episodes again in another process, with another hash seed, and so another order of sets.

    Raises:
        ValueError: the spec has no JSON form, so that no other process can make its environment.
        ElsewhereError: that process failed, or took too long.
    """
    request = {
        "spec": spec.to_json(),
        "limits": vars(limits or Limits()),
        "episodes": [
            {"task": e.task.to_json(), "sample": e.sample, "seed": e.seed, "actions": list(actions)}
            for e, actions in episodes
        ],
    }
    answer = await asyncio.to_thread(_ask, json.dumps(request), timeout)
    return [Trajectory.from_json(record) for record in answer]


def _ask(request: str, timeout: float) -> list[dict[str, Any]]:
    # Modules that this process can import, the other can: the current folder may have been put on the path here.
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    other_hash = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": other_hash}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agentgym.rollout.replays"],
            input=request,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ElsewhereError(f"another process did not play the same episodes within {timeout:g} s") from error
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
        raise ElsewhereError(f"another process could not play the same episodes: {last[0]:.500}")
    return json.loads(line.removeprefix(_MARK))


def main() -> None:
    """Answer one request on standard input."""
    request: Mapping[str, Any] = json.load(sys.stdin)
    episodes = [
        (Episode(Task.from_json(item["task"]), item["sample"], item["seed"]), item["actions"])
        for item in request["episodes"]
    ]
    with contextlib.redirect_stdout(sys.stderr):
        played = asyncio.run(replay(EnvSpec.from_json(request["spec"]), episodes, limits=Limits(**request["limits"])))
    sys.stdout.write("\n" + _MARK + json.dumps([trajectory.to_json() for trajectory in played]) + "\n")


if __name__ == "__main__":
    main()
