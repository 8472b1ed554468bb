"""An environment in processes of its own, whose hash seeds differ."""

import json
import os
import subprocess
import sys

CODE = """
import json, random, sys, agentgym
env_id, kwargs = json.loads(sys.argv[1])
env, rng, seen = agentgym.make(env_id, **kwargs), random.Random(7), []
for seed in range(8):
    seen.append([env.reset(seed=seed), env.task.to_json()])
    over = False
    while not over:
        action = rng.choice([env.expert_action(), env.random_action(rng), "no idea"])
        result = env.step(action)
        seen.append([action, *result])
        over = result[2] or result[3]
env.close()
print(json.dumps(seen))
"""


def played_twice(env_id, **kwargs):
    """All that eight episodes show, in each of two processes."""
    command = [sys.executable, "-c", CODE, json.dumps([env_id, kwargs])]
    given = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    return [json.loads(subprocess.check_output(command, env=env, text=True, timeout=120)) for env in given]
