"""OpenEnv's own client: `play_openenv.py URL SESSIONS`, run by the Python that has openenv."""

from __future__ import annotations

import asyncio
import sys

from load import MESSAGE, Way, play
from openenv import GenericEnvClient


async def opened(url: str) -> GenericEnvClient:
    client = GenericEnvClient(base_url=url)
    await client.reset(seed=1)
    return client


async def stepped(client: GenericEnvClient) -> None:
    result = await client.step({"message": MESSAGE})
    if result.reward != 1.0 or MESSAGE not in str(result.observation):
        raise SystemExit(f"not what was said: {result}")


async def closed(client: GenericEnvClient) -> None:
    await client.close()


if __name__ == "__main__":
    url, sessions = sys.argv[1:]
    asyncio.run(play(Way(lambda: opened(url), stepped, closed), int(sessions)))
