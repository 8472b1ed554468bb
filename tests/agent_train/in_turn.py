"""`agent-train` several times in one process: what it imports takes most of the time of a short run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preloaded import Preloaded

END = "\x1e"


def in_turn(forks: Preloaded, commands: Sequence[Sequence[str]], env: Mapping[str, str], seconds: float) -> list[str]:
    """What each of these commands printed, which are the words behind `agent-train`. All must end well."""
    return forks.run([__file__, json.dumps(commands)], env, seconds).split(END)[:-1]


if __name__ == "__main__":
    from agent_train.cli import main

    for command in json.loads(sys.argv[1]):
        if code := main(command):
            sys.exit(code)
        print(end=END, flush=True)
