"""An OpenAI-compatible endpoint that answers at once. Prints its port."""

from __future__ import annotations

import asyncio
import sys
import time

from aiohttp import web
from questions import answer


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    message = {"role": "assistant", "content": answer(asked["messages"][-1]["content"])}
    usage = {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    made = {"id": "1", "object": "chat.completion", "created": int(time.time()), "model": "model"}
    return web.json_response({**made, "choices": [choice], "usage": usage})


async def serve() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"{site._server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
