"""What all sides play and answer: one question, one answer, exact match. Every fourth answer is wrong, so that scores are seen."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

WARM_UP = 64  # episodes played first, uncounted: imports, caches, threads


def question(index: int) -> str:
    return f"A box holds {index} nails and another one {3 * index + 7}. How many are in both? Answer with the number alone."


def right(index: int) -> str:
    return str(4 * index + 7)


def answer(prompt: str) -> str:
    """What the instant model says."""
    index = int(re.search(r"\d+", prompt).group())
    return "none" if index % 4 == 0 else right(index)


@dataclass
class Settings:
    episodes: int
    concurrent: int
    folder: str
    base_url: str | None


def measure(play: Callable[[Settings], float]) -> None:
    """Play a few episodes, then all; print wall seconds, CPU seconds of this process and the score as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--concurrent", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--base-url")
    args = parser.parse_args()
    play(Settings(WARM_UP, args.concurrent, f"{args.folder}/warm", args.base_url))
    wall, cpu = time.perf_counter(), time.process_time()
    score = play(Settings(args.episodes, args.concurrent, f"{args.folder}/run", args.base_url))
    took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "score": score}
    sys.stdout.write("\n" + json.dumps(took) + "\n")
