"""The command `agentgym serve`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from agentgym.commands.output import print_json
from agentgym.commands.serve_options import add_options, settings_of
from agentgym.mistake import Mistake

if TYPE_CHECKING:
    from agentgym.service.server import Front, ServeSettings


def add(commands: argparse._SubParsersAction) -> None:
    """Add `agentgym serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve environments, or sandboxes, to programs on other machines",
        description="Serve environments over HTTP and WebSockets until Ctrl-C or SIGTERM, each session in a process of its own."
        ' Elsewhere, agentgym.make("http://HOST:PORT/ENV") is such an environment.',
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the address, as JSON")
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    return asyncio.run(_served(settings_of(args), args.json))


async def _served(settings: ServeSettings, json: bool) -> int:
    from agentgym.service.forks import ZygoteFailed
    from agentgym.service.frugal import settle_memory
    from agentgym.service.server import serve

    asked = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for how in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(how, asked.put_nowait, None)
    leaving = asyncio.ensure_future(asked.get())
    starting = asyncio.ensure_future(serve(settings))
    await asyncio.wait({leaving, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    try:
        front = starting.result()
    except ZygoteFailed as error:
        raise Mistake(f"the environments cannot be served: {error}") from error
    except OSError as error:
        where = f"at {settings.host}, port {settings.port}" + (f", with {settings.cert}" if settings.cert else "")
        raise Mistake(f"cannot listen {where}: {error.strerror or error}") from error
    try:
        settle_memory()
        _say(front, json)
        looking = asyncio.ensure_future(_warn(front))
        await leaving
        looking.cancel()
        await _drained(front, asyncio.ensure_future(asked.get()))
    finally:
        await front.close()
    return 0


async def _warn(front: Front) -> None:
    """Say which environments cannot be made: they may be at another time, and the others are served."""
    for id in front.settings.envs:
        try:
            told = await front.listing.ask({"env": id, "about": True})
        except (LookupError, OSError) as error:
            told = {"error": str(error)}
        if "error" in told:
            print(f"agentgym serve: {id} cannot be made now: {told['error']}", file=sys.stderr, flush=True)


async def _drained(front: Front, again: asyncio.Future[None]) -> None:
    """Let sessions end by themselves, until the user asks again."""
    if front.sessions.open:
        print(f"agentgym serve: waiting for {len(front.sessions.open)} sessions to end", file=sys.stderr, flush=True)
    drained = asyncio.ensure_future(front.drain())
    await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    drained.cancel()


def _say(front: Front, json: bool) -> None:
    ids, sandboxes = list(front.settings.envs), front.settings.sandbox is not None
    if json:
        told = {"url": front.url, "port": front.port, "envs": ids, "sandboxes": sandboxes}
        print_json({**told, "max_sessions": front.settings.max_sessions})
    else:
        print(f"{', '.join(ids + ['sandboxes'] * sandboxes)} at {front.url} (Ctrl-C ends it)", flush=True)
    if front.settings.tokens and not front.settings.cert:
        print("agentgym serve: without --tls-cert, tokens can be read on the way", file=sys.stderr, flush=True)
