"""Our server: `serve_ours.py SESSIONS ENV ...`. It prints its URL and ends when its standard input does."""

import asyncio
import contextlib
import sys

from agentgym.core.registration import spec
from agentgym.service.server.env_server import serve
from agentgym.service.server.settings import ServeSettings


async def main():
    server = await serve(
        ServeSettings({name: spec(name) for name in sys.argv[2:]}, port=0, max_sessions=int(sys.argv[1]))
    )
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
