"""mini-swe-agent's docker environment: seconds of starts, commands and ends."""

import argparse
import json
import time
from collections import defaultdict

from minisweagent.environments.docker import DockerEnvironment

parser = argparse.ArgumentParser()
parser.add_argument("--image", required=True)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
seconds = defaultdict(list)
for _ in range(args.rounds):
    began = time.perf_counter()
    env = DockerEnvironment(image=args.image, cwd="/testbed", run_args=["--rm", "--network", "none"])
    seconds["start again at once"].append(time.perf_counter() - began)
    for _ in range(10):
        began = time.perf_counter()
        done = env.execute({"command": "true"})
        assert done["returncode"] == 0, done
        seconds["command"].append(time.perf_counter() - began)
    began = time.perf_counter()
    env.cleanup()  # in the background
    seconds["close"].append(time.perf_counter() - began)
print(json.dumps(seconds))
