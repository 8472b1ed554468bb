"""agentgym's client: `play_agentgym.py URL SESSIONS`; the URL may be `openenv:http://...`, of an OpenEnv server."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from load import MESSAGE, Way, play

import agentgym


async def opened(url: str) -> Any:
    # Made in a thread, as it asks the server; an OpenEnv server does not tell when episodes end, so that is its argument.
    kwargs = {"max_turns": 1 << 40} if url.startswith("openenv:") else {}
    env = await asyncio.to_thread(agentgym.make, url, **kwargs)
    await env.reset(seed=1)
    return env.unwrapped


async def stepped(env: Any) -> None:
    observation, reward, *_ = await env.step(MESSAGE)
    if reward != 1.0 or MESSAGE not in observation[0]["content"]:
        raise SystemExit(f"not what was said: {observation} {reward}")


async def closed(env: Any) -> None:
    ending = env.close()
    if ending is not None:
        await ending


if __name__ == "__main__":
    url, sessions = sys.argv[1:]
    asyncio.run(play(Way(lambda: opened(url), stepped, closed), int(sessions)))
