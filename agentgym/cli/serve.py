"""The command `agentgym serve`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import signal
import ssl
import stat
import sys
from typing import TYPE_CHECKING

from agentgym.cli.output import print_json
from agentgym.cli.serve_options import add_options, settings_of
from agentgym.core.usage_error import UsageError

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer
    from agentgym.service.server.settings import ServeSettings

_REMEDIES = {
    errno.EADDRINUSE: ": give another --port, 0 takes a free one",
    errno.EADDRNOTAVAIL: ": --host is an address of this machine; 0.0.0.0 are all it has",
    errno.EACCES: ": ports below 1024 are the administrator's, give another --port",
}


def add(commands: argparse._SubParsersAction) -> None:
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
    settings = settings_of(args)
    if args.token_file and args.token_file.stat().st_mode & stat.S_IROTH:
        print(
            f"agentgym serve: all users of this machine can read the tokens: chmod 600 {args.token_file}",
            file=sys.stderr,
            flush=True,
        )
    return asyncio.run(_served(settings, args.json))


async def _served(settings: ServeSettings, json: bool) -> int:
    from agentgym.processes.subprocess_query import settle_memory
    from agentgym.service.server.env_server import serve
    from agentgym.service.server.forks import ZygoteFailed

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
        server = starting.result()
    except ZygoteFailed as error:
        raise UsageError(f"the environments cannot be served: {error}") from error
    except ssl.SSLError as error:
        raise UsageError(_of_tls(settings, error)) from error
    except OSError as error:
        why = f"{error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}"
        raise UsageError(f"cannot listen at {settings.host}, port {settings.port}: {why}") from error
    try:
        settle_memory()
        _say(server, json)
        looking = asyncio.ensure_future(_warn(server))
        await leaving
        looking.cancel()
        await _drained(server, asyncio.ensure_future(asked.get()))
    finally:
        await server.close()
    return 0


def _of_tls(settings: ServeSettings, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {settings.key or settings.cert} is the key of another certificate than {settings.cert}"
    if settings.key is None:
        return f"--tls-cert {settings.cert}: no PEM certificate with its key in this file: the key's file is --tls-key"
    return f"--tls-cert {settings.cert} and --tls-key {settings.key}: they are no PEM certificate with its key"


async def _warn(server: EnvServer) -> None:
    """Warn about environments that cannot be made now. They stay served, since their needs may be met later."""
    for id in server.settings.envs:
        try:
            told = await server.listing.ask({"env": id, "about": True})
        except (LookupError, OSError) as error:
            told = {"error": str(error)}
        if "error" in told:
            print(f"agentgym serve: {id} cannot be made now: {told['error']}", file=sys.stderr, flush=True)
    await server.listing.rest()


async def _drained(server: EnvServer, again: asyncio.Future[None]) -> None:
    """Wait for sessions to end, until a second signal."""
    if server.sessions.open:
        waits = f"waiting for {len(server.sessions.open)} sessions to end, at most {server.settings.drain_seconds:g} s"
        print(f"agentgym serve: {waits}; once more ends them at once", file=sys.stderr, flush=True)
    drained = asyncio.ensure_future(server.drain())
    await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    drained.cancel()


def _say(server: EnvServer, json: bool) -> None:
    ids, sandboxes = list(server.settings.envs), server.settings.sandbox is not None
    if json:
        told = {"url": server.url, "port": server.port, "envs": ids, "sandboxes": sandboxes}
        print_json({**told, "max_sessions": server.settings.max_sessions})
    else:
        print(f"{', '.join(ids + ['sandboxes'] * sandboxes)} at {server.url} (Ctrl-C ends it)", flush=True)
    if server.settings.tokens and not server.settings.cert:
        print("agentgym serve: without --tls-cert, tokens can be read on the way", file=sys.stderr, flush=True)
