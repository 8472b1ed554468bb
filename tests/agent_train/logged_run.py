"""`agent-train` whose engine writes down all that it samples: python logged_run.py LOG WORDS. Trained tokens are compared with it."""

import json
import sys

from agent_train.cli import main
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.vllm import VllmEngine


def logged(engine, path):
    generate = engine.generate

    async def generate_and_log(self, prompt_ids, sampling, episode=None):
        completion = await generate(self, prompt_ids, sampling, episode)
        with open(path, "a") as log:
            log.write(json.dumps([prompt_ids, completion.ids, completion.logprobs, completion.versions]) + "\n")
        return completion

    engine.generate = generate_and_log


if __name__ == "__main__":
    for kind in (EmbeddedEngine, VllmEngine):
        logged(kind, sys.argv[1])
    sys.exit(main(sys.argv[2:]))
