"""What the drivers share. Each runs where the foreign package can be imported, and prints one JSON object."""

import asyncio
import json
import sys
from dataclasses import replace

from agentgym.checks.check_env import check_env
from agentgym.core.registration import spec
from agentgym.policies.base import ScriptedPolicy
from agentgym.rollout.episode import run_episode


def spec_of(env_id, **kwargs):
    found = spec(env_id)
    return replace(found, kwargs={**found.kwargs, **kwargs})


def played(env_spec, task, replies):
    """An episode by the agent loop, as JSON."""
    env = env_spec.make()
    trajectory = asyncio.run(run_episode(env, ScriptedPolicy(replies), task))
    env.close()
    return {
        "rewards": [turn.reward for turn in trajectory.turns],
        "observations": [turn.observation for turn in trajectory.turns],
        "final": trajectory.final_observation,
        "info": trajectory.turns[-1].info if trajectory.turns else {},
        "end": trajectory.end,
        "error": trajectory.error,
    }


def refusal(call):
    """The kind and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def report(**found):
    """Print what was found as the last line; a package may have printed something before."""
    sys.stdout.write("\n" + json.dumps(found) + "\n")


__all__ = ["check_env", "played", "refusal", "report", "spec_of"]
