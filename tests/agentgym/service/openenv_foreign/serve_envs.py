"""Servers of the real `openenv` package, run by its own Python: `serve_envs.py KIND ...`. It prints their ports.

Kinds: "guess", whose action is one text; "dial", whose action has several fields; "tools", with MCP tools.
"""

import asyncio
import random
import socket
import sys
import time
from typing import Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

WORDS = ["apple", "grape", "lemon", "mango"]


class GuessAction(Action):
    word: str = Field(description="the word that you guess")


class Seen(Observation):
    hint: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._word, self._count = WORDS[0], 0

    def get_metadata(self):
        return EnvironmentMetadata(name="guess", description="Guess the fruit.")

    def reset(self, seed=None, split=None, index=None, **kwargs):
        self._count = 0
        self._word = WORDS[index] if index is not None else random.Random(seed).choice(WORDS)
        return Seen(hint=f"It begins with {self._word[0]}.")

    def step(self, action, **kwargs):
        self._count += 1
        if action.word == "sleep":
            time.sleep(3)
        if action.word == "fail":
            raise RuntimeError("the fruit is rotten")
        right = action.word == self._word
        return Seen(hint="right" if right else "wrong", reward=float(right), done=right, metadata={"success": right})

    @property
    def state(self):
        return State(episode_id="e", step_count=self._count)

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return 4 if split == "train" else 2

    def list_tasks(self, split):
        return [{"index": i} for i in range(self.num_tasks(split))]

    def get_task(self, split, index):
        return self.list_tasks(split)[index]

    def get_task_range(self, split, start, stop):
        return self.list_tasks(split)[start:stop]


class DialAction(Action):
    direction: Literal["left", "right"]
    clicks: int = Field(ge=1, le=9)


class Position(Observation):
    position: int = 0
    goal: int = 0


class Dial(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._position, self._goal = 0, 3

    def reset(self, seed=None, **kwargs):
        self._position, self._goal = 0, random.Random(seed).randrange(1, 10)
        return Position(position=0, goal=self._goal)

    def step(self, action, **kwargs):
        self._position += action.clicks if action.direction == "right" else -action.clicks
        done = self._position == self._goal
        return Position(position=self._position, goal=self._goal, reward=1.0 if done else -0.1, done=done)

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")
        self._total = 0

        @server.tool
        def add(number: int) -> int:
            """Add a number to the total."""
            self._total += number
            return self._total

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("it fails")

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._total = 0
        return Observation(metadata={"ready": True})

    async def step_async(self, action, **kwargs):
        observation = await super().step_async(action, **kwargs)
        if isinstance(action, CallToolAction):
            observation.done = self._total >= 10
            observation.reward = 1.0 if observation.done else 0.0
        return observation

    def _step_impl(self, action, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


KINDS = {
    "guess": (Guess, GuessAction, Seen),
    "dial": (Dial, DialAction, Position),
    "tools": (Tools, CallToolAction, CallToolObservation),
}


async def serve(kinds):
    servers, sockets = [], []
    for kind in kinds:
        environment, action, observation = KINDS[kind]
        app = create_app(environment, action, observation, env_name=kind, max_concurrent_envs=2)
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="error")))
        sockets.append(socket.create_server(("127.0.0.1", 0)))
    sys.stdout.write(" ".join(str(listening.getsockname()[1]) for listening in sockets) + "\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve([own]) for server, own in zip(servers, sockets, strict=True)))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
