"""OpenEnv's server of the same environment as `echo.py`: `serve_openenv.py PORT SESSIONS`, run by the Python that has openenv."""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Heard(Observation):
    message: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._steps = 0
        return Heard(message="Say something.")

    def step(self, action, **kwargs):
        self._steps += 1
        return Heard(message=action.message, reward=1.0, done=False)

    @property
    def state(self):
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_app(Echo, Said, Heard, env_name="echo", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
