"""The local server of the page. It answers GET requests, by default of this machine only, and contacts no other host."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentgym.hosts import LOCAL_HOSTS, is_ours
from agentgym.viewer import answers
from agentgym.viewer.answers import BadRequest
from agentgym.viewer.export import static_files
from agentgym.viewer.index import NotServed, encoded

if TYPE_CHECKING:
    from agentgym.viewer.run import Runs

POLL_SECONDS = 0.5
# A proxy that hears nothing closes the connection; a comment tells it that the server is there.
HEARTBEAT_SECONDS = 15.0
COMPRESS_BYTES = 4096
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_log = logging.getLogger("agentgym.viewer")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class PageServer:
    """A server that runs. `url` has the page's token, where there is one."""

    url: str
    port: int
    close: Callable[[], Awaitable[None]]


async def serve(runs: Runs, host: str = "127.0.0.1", port: int = 0) -> PageServer:
    """Start the server. Raises OSError if the address cannot be had.

    Args:
        host: the address to listen at. Any but this machine's own is reached through a random token in the page's address.
        port: 0 takes a free one.
    """
    token = "" if host in LOCAL_HOSTS else secrets.token_urlsafe(24)
    closing = asyncio.Event()

    async def end_streams(app: web.Application) -> None:
        closing.set()  # the streams of events would not end by themselves

    app = web.Application(middlewares=[guarded(bool(token))])
    app.on_shutdown.append(end_streams)
    prefix = f"/{token}" if token else ""
    add = app.router.add_get
    add(f"{prefix}/api/runs", _json(lambda r: answers.list_runs(runs)))
    add(f"{prefix}/api/runs/{{id}}", _json(lambda r: answers.one_run(runs, r.match_info["id"])))
    add(f"{prefix}/api/runs/{{id}}/metrics", _json(lambda r: answers.metrics(runs, r.match_info["id"], r.query)))
    add(f"{prefix}/api/runs/{{id}}/episodes", _json(lambda r: answers.episodes(runs, r.match_info["id"], r.query)))
    whole = _json(lambda r: answers.episode(runs, r.match_info["id"], r.match_info["key"]))
    add(f"{prefix}/api/runs/{{id}}/episodes/{{key}}", whole)
    add(f"{prefix}/api/compare", _json(lambda r: answers.compare(runs, r.query)))
    add(f"{prefix}/api/events", partial(_events, runs, closing), allow_head=False)
    for name, (kind, content) in static_files().items():
        for path in (name, "") if name == "index.html" else (name,):
            add(f"{prefix}/{path}", _static(kind, content))
    # Bodies, which nothing here reads, are thrown away as they come: inflated, one megabyte of them is a thousand.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, auto_decompress=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    taken = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    return PageServer(f"http://{shown}:{taken}{prefix}/", taken, runner.cleanup)


def guarded(has_token: bool) -> Any:
    """Middleware: checks the Host, writes errors as JSON, and sets the headers of every answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Answer) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            if has_token or is_ours(request.headers.get("Host", "")):
                response = await handler(request)
            else:  # DNS rebinding: a foreign name that resolves to this machine lets a foreign page read ours
                response = _error(403, "this page is served as 127.0.0.1 or localhost only")
        except NotServed as error:
            response = _error(404, str(error))
        except BadRequest as error:
            response = _error(400, str(error))
        except web.HTTPException as error:
            response = _error(error.status, f"{error.reason}: {request.method} {request.path[:200]}")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            _log.exception("%s %s", request.method, request.path)
            response = _error(500, f"the viewer failed: {type(error).__name__}: {error}")
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    return middleware


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=encoded({"error": text}), content_type="application/json", charset="utf-8")


def _json(answer: Callable[[web.Request], Any]) -> Answer:
    """A handler that computes its answer in a thread, and sends it compressed where it is long."""

    async def handle(request: web.Request) -> web.StreamResponse:
        zipped = "gzip" in request.headers.get("Accept-Encoding", "")

        def work() -> tuple[bytes, bool]:
            body = encoded(answer(request))
            return (gzip.compress(body, 1), True) if zipped and len(body) > COMPRESS_BYTES else (body, False)

        body, compressed = await asyncio.to_thread(work)
        headers = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if compressed else {})}
        return web.Response(body=body, headers=headers, content_type="application/json", charset="utf-8")

    return handle


def _static(kind: str, content: bytes) -> Answer:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers={**headers, "Content-Type": kind})

    return handle


async def _events(runs: Runs, closing: asyncio.Event, request: web.Request) -> web.StreamResponse:
    """Server-sent events of one run: one at once, then one whenever it has grown."""
    id = request.query.get("run", "")
    said = await asyncio.to_thread(answers.growth, runs, id)
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    await response.write(b"data: " + encoded(said) + b"\n\n")
    heard = time.monotonic()
    with suppress(ConnectionError, NotServed):  # it went away, or the run's folder did
        while not closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(closing.wait(), POLL_SECONDS)
            now = await asyncio.to_thread(answers.growth, runs, id)
            if now != said:
                said, heard = now, time.monotonic()
                await response.write(b"data: " + encoded(said) + b"\n\n")
            elif time.monotonic() - heard > HEARTBEAT_SECONDS:
                heard = time.monotonic()
                await response.write(b": still here\n\n")
    return response
