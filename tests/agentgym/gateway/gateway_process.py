"""A gateway in front of the small model as a process of its own: python gateway_process.py FOLDER PORT ADMIN_KEY. Says when it serves."""

import asyncio
import sys

from toy_model import ToyModel

from agentgym.gateway import Gateway


async def main(folder, port, key):
    async with Gateway(ToyModel(pause=0.001), folder, port=int(port), admin_key=key):
        print("serves", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
