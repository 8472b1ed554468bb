"""`agent-train` several times in one process: what it imports takes most of the time of a short run."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

END = "\x1e"


def in_turn(commands: Sequence[Sequence[str]], env: Mapping[str, str], seconds: float) -> list[str]:
    """What each of these commands printed, which are the words behind `agent-train`. All must end well."""
    words = [sys.executable, __file__, json.dumps(commands)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=seconds, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(END)[:-1]


if __name__ == "__main__":
    from agent_train.cli import main

    for command in json.loads(sys.argv[1]):
        if code := main(command):
            sys.exit(code)
        print(end=END, flush=True)
