"""A chat endpoint whose faults a test chooses: a real HTTP server on this machine, in a thread of its own."""

import asyncio
import contextlib
import threading

from aiohttp import web


def said(text, finish_reason="stop", **more):
    """A whole chat completion; `usage=None` leaves the count out."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    record = {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}, **more}
    return {name: value for name, value in record.items() if value is not None}


@contextlib.contextmanager
def serving(answer, models=("double",)):
    """The base URL of an endpoint that answers each request by `answer(body)`: a record, or `(status, text, headers)`."""
    loop = asyncio.new_event_loop()
    ready, place = threading.Event(), []

    async def complete(request):
        found = answer(await request.json())
        found = await found if asyncio.iscoroutine(found) else found
        if isinstance(found, tuple):
            status, text, *headers = found
            return web.Response(status=status, text=text, headers=headers[0] if headers else {})
        return web.json_response(found)

    async def listing(request):
        return web.json_response({"data": [{"id": model} for model in models]})

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        app.router.add_get("/v1/models", listing)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        place.append(runner.addresses[0][1])
        stop = asyncio.Event()
        place.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{place[0]}/v1"
    finally:
        place[1]()
        thread.join(10)
        loop.close()
