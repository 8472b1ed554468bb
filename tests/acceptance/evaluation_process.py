"""An evaluation as its user starts it: the installed command in a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym.evaluate.store import cells_of, effective, read_run

COMMAND = str(Path(sys.executable).with_name("agentgym"))
# Every environment that is registered when `agentgym_envs` alone is installed.
ENVS = (
    *("code_humaneval", "code_mbpp", "countdown", "frozen_lake", "gsm8k", "gsm8k_python", "gsm8k_tool", "guess_number"),
    *("gsm8k_team", "math_python", "reference_game", "search", "sokoban", "sql", "tic_tac_toe", "tic_tac_toe_self"),
    "wordle",
)
RUN_SECONDS = 240.0  # longer than any run here takes on a busy machine
# What differs between two runs of the same episodes: their names, and what time it took. Requests come with retries.
_OF_THE_RUN = {"name", "seconds", "episode_seconds", "requests", "retries", "waited"}


class Evaluation:
    """One start of `agentgym eval`."""

    def __init__(self, out: Path, *options: str):
        self.out = out
        self.log = out.with_suffix(".log")
        with self.log.open("ab") as log:
            command = [COMMAND, "eval", *options, "--out", str(out), "--quiet"]
            env = {
                name: value for name, value in os.environ.items() if name != "AGENTGYM_DATA"
            }  # the same tasks anywhere
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so, or the process has ended."""
        deadline = time.monotonic() + RUN_SECONDS
        while not condition() and self.runs:
            assert time.monotonic() < deadline, f"nothing came of it: {self.told()}"
            time.sleep(0.001)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ends(self) -> int:
        """The exit code."""
        return self.process.wait(RUN_SECONDS)

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def lines(out: Path) -> int:
    """Episodes that are stored, those that failed included."""
    return sum(file.read_bytes().count(b"\n") for file in (out / "episodes").glob("*.jsonl"))


def stored(out: Path) -> list[dict[str, Any]]:
    """Every line of every file of episodes."""
    files = sorted((out / "episodes").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def times_played(out: Path) -> Counter[tuple[str, str, int]]:
    """How often each episode was played to an end."""
    return Counter((e["env"], e["task_id"], e["sample"]) for e in stored(out) if e["end"] != "error")


def results(out: Path) -> Any:
    """results.json without what is of the run and not of its episodes."""

    def of_episodes(value: Any) -> Any:
        if isinstance(value, list):
            return [of_episodes(item) for item in value]
        if isinstance(value, dict):
            return {k: of_episodes(v) for k, v in value.items() if k not in _OF_THE_RUN}
        return value

    return of_episodes(json.loads((out / "results.json").read_text(encoding="utf-8")))


def conversations(out: Path) -> dict[tuple[str, str, int], Any]:
    """What was said, and what came of it, in each effective episode."""
    return {
        (episode.env, episode.task_id, episode.sample): (episode.messages(), episode.reward, episode.end)
        for _, file in cells_of(out, read_run(out))
        for episode in effective(file)
    }
