"""`agent-train`, some times in turn, whose engine writes down all that it samples: python logged_run.py COMMANDS.

A command is the file of what was sampled, with which trained tokens are compared, and the words behind `agent-train`.
"""

import json
import sys

from agent_train.cli import main
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.external import OpenAIEngine
from agent_train.engine.vllm import VllmEngine


def logged(generate, path):
    async def generate_and_log(self, prompt_ids, sampling, episode=None):
        completion = await generate(self, prompt_ids, sampling, episode)
        with open(path, "a") as log:
            log.write(json.dumps([prompt_ids, completion.ids, completion.logprobs, completion.versions]) + "\n")
        return completion

    return generate_and_log


if __name__ == "__main__":
    engines = {engine: engine.generate for engine in (EmbeddedEngine, VllmEngine, OpenAIEngine)}
    for path, *words in json.loads(sys.argv[1]):
        for engine, generate in engines.items():
            engine.generate = logged(generate, path)
        if code := main(words):
            sys.exit(code)
