"""The embedded engine, which writes down all that it samples: the log that trained tokens are compared with."""

import json
import os

from agent_train.engine.embedded import EmbeddedEngine


async def start(config, model_dir, logs, **more):
    engine = await EmbeddedEngine.start(config, model_dir, logs, **more)
    generate = engine.generate

    async def logged(prompt_ids, sampling, episode=None):
        completion = await generate(prompt_ids, sampling, episode)
        with open(os.environ["ENGINE_LOG"], "a") as log:
            log.write(json.dumps([prompt_ids, completion.ids, completion.logprobs, completion.versions]) + "\n")
        return completion

    engine.generate = logged
    return engine
