"""The command `agentgym serve`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.commands.json_object import json_object
from agentgym.commands.output import print_json
from agentgym.commands.spec_of import ENVS, spec_of
from agentgym.mistake import Mistake
from agentgym.service.frames import ServiceLimits

if TYPE_CHECKING:
    from agentgym.registration import EnvSpec
    from agentgym.service.server import Front, ServeSettings

_SHORTEST_TOKEN = 16
# Options of limits: name, the limit it sets, and its help.
_LIMITS = (
    ("--init-timeout", "init_seconds", "of making an environment, and of one init"),
    ("--reset-timeout", "reset_seconds", "of one reset"),
    ("--step-timeout", "step_seconds", "of one step; a process that takes longer is killed"),
    ("--idle-timeout", "idle_seconds", "without a request, after which a session ends"),
    ("--resume-timeout", "resume_seconds", "for a client to come back after its connection dropped"),
    ("--message-timeout", "message_seconds", "for a message to arrive whole, and for an answer to be taken"),
)


def add(commands: argparse._SubParsersAction) -> None:
    """Add `agentgym serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve environments to programs on other machines",
        description="Serve environments over HTTP and WebSockets until Ctrl-C or SIGTERM, each session in a process of its own."
        ' Elsewhere, agentgym.make("http://HOST:PORT/ENV") is such an environment.',
    )
    add = parser.add_argument
    add("envs", nargs="+", metavar="ENV", help=f"what to serve: {ENVS}")
    add(
        "--kwargs",
        default="{}",
        metavar="JSON",
        help="what the environments are made with; of one alone: {ENV: {...}}",
    )
    add("--port", type=int, default=8000, help="where to listen; 0 takes a free one (default: 8000)")
    add("--host", default="127.0.0.1", help="where to listen; any but this machine's own address takes --token-file")
    add("--max-sessions", type=int, default=256, metavar="N", help="open at a time (default: 256)")
    add("--max-sessions-per-token", type=int, metavar="N", help="open at a time for one token (default: no limit)")
    add(
        "--token-file", type=Path, metavar="FILE", help="bearer tokens that are let in, one a line: TOKEN or NAME TOKEN"
    )
    add("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with this certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="its key, if that is in a file of its own")
    defaults = ServiceLimits()
    for option, name, what in _LIMITS:
        value = getattr(defaults, name)
        add(option, type=float, default=value, dest=name, metavar="S", help=f"seconds {what} (default: {value:g})")
    add(
        "--max-message",
        type=int,
        default=defaults.message_bytes,
        metavar="BYTES",
        help=f"of one message from a client (default: {defaults.message_bytes})",
    )
    add(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for running sessions to end after Ctrl-C or SIGTERM; a second one ends them at once (default: 30)",
    )
    add("--json", action="store_true", help="print the address, as JSON")
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    return asyncio.run(_served(_settings(args), args.json))


def _settings(args: argparse.Namespace) -> ServeSettings:
    """What the command line means.

    Raises:
        Mistake: something in it cannot be.
    """
    from agentgym.service.server import ServeSettings

    if sys.platform != "linux":
        raise Mistake("runs on Linux alone: it takes process descriptors and epoll")
    if not 0 <= args.port <= 65535:
        raise Mistake(f"--port is from 0 (a free one) to 65535, not {args.port}")
    if args.tls_key and not args.tls_cert:
        raise Mistake("--tls-key needs --tls-cert")
    if args.max_sessions_per_token is not None and args.max_sessions_per_token < 1:
        raise Mistake(f"--max-sessions-per-token is at least 1, not {args.max_sessions_per_token}")
    if not args.drain_timeout >= 0:
        raise Mistake(f"--drain-timeout is at least 0, not {args.drain_timeout:g}")
    try:
        return ServeSettings(
            envs=_specs_of(args.envs, json_object(args.kwargs, "--kwargs")),
            host=args.host,
            port=args.port,
            max_sessions=args.max_sessions,
            max_sessions_per_token=args.max_sessions_per_token,
            tokens=read_tokens(args.token_file) if args.token_file else {},
            cert=str(args.tls_cert) if args.tls_cert else None,
            key=str(args.tls_key) if args.tls_key else None,
            limits=ServiceLimits(
                **{name: getattr(args, name) for _, name, _ in _LIMITS}, message_bytes=args.max_message
            ),
            drain_seconds=args.drain_timeout,
        )
    except ValueError as error:
        raise Mistake(str(error)) from error


def _specs_of(envs: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, EnvSpec]:
    """The environments by the names that their addresses have.

    Raises:
        Mistake: there is no such one, it is named twice, or it does not take what it is given.
    """
    from agentgym.registration import check_kwargs

    specs = {}
    for named in envs:
        spec = spec_of(named)
        # Of module:Class, an address has the last name.
        id = named if spec.id == named and ":" not in named else spec.id.rpartition(":")[2]
        if id in specs:
            raise Mistake(f"{id!r} is named twice")
        specs[id] = spec
    for id, spec in specs.items():
        own = kwargs.get(id, {})
        if not isinstance(own, dict):
            raise Mistake(f"--kwargs: those of {id!r} alone must be an object, not {own!r}")
        given = {**{name: value for name, value in kwargs.items() if name not in specs}, **own}
        specs[id] = replace(spec, kwargs={**spec.kwargs, **given})
        try:
            specs[id].to_json()
            check_kwargs(specs[id], spec.load(), specs[id].kwargs)
        except (ValueError, TypeError, ImportError) as error:
            raise Mistake(str(error)) from error
    return specs


def read_tokens(path: Path) -> dict[str, str]:
    """The tokens of a file, by name. A line is a token, or a name and a token; empty ones and those with # do not count.

    Raises:
        Mistake: it cannot be read, has none, or has one that is too short or comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Mistake(f"--token-file {path}: cannot be read ({why})") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = words[0] if len(words) == 2 else f"line {number}"
        if len(words) > 2 or len(words[-1]) < _SHORTEST_TOKEN:
            raise Mistake(
                f"{path}:{number}: a line is TOKEN or NAME TOKEN, a token of {_SHORTEST_TOKEN} letters or more"
            )
        if name in tokens or words[-1] in tokens.values():
            raise Mistake(f"{path}:{number}: this name or token was there before")
        tokens[name] = words[-1]
    if not tokens:
        raise Mistake(f"--token-file {path}: there is no token in it")
    return tokens


async def _served(settings: ServeSettings, json: bool) -> int:
    import asyncio
    import signal

    from agentgym.service.forks import ZygoteFailed
    from agentgym.service.server import serve

    asked = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for how in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(how, asked.put_nowait, None)
    _allow_files(settings.max_sessions)
    try:
        front = await serve(settings)
    except ZygoteFailed as error:
        raise Mistake(f"the environments cannot be served: {error}") from error
    except OSError as error:
        where = f"at {settings.host}, port {settings.port}" + (f", with {settings.cert}" if settings.cert else "")
        raise Mistake(f"cannot listen {where}: {error.strerror or error}") from error
    try:
        _say(front, json)
        await asked.get()
        again = asyncio.ensure_future(asked.get())
        if front.sessions.open:
            print(
                f"agentgym serve: waiting for {len(front.sessions.open)} sessions to end", file=sys.stderr, flush=True
            )
        drained = asyncio.ensure_future(front.drain())
        await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        drained.cancel()
    finally:
        await front.close()
    return 0


def _allow_files(sessions: int) -> None:
    """Let this process hold what so many sessions take.

    Raises:
        Mistake: this machine does not allow it.
    """
    import resource

    needed = 6 * sessions + 256  # the HTTP connection, the worker's, one to tell it things, its process; more with TLS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Mistake(f"{sessions} sessions take {needed} open files, and this machine allows {hard} (ulimit -Hn)")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _say(front: Front, json: bool) -> None:
    ids = list(front.settings.envs)
    if json:
        print_json({"url": front.url, "port": front.port, "envs": ids, "max_sessions": front.settings.max_sessions})
    else:
        print(f"{', '.join(ids)} at {front.url} (Ctrl-C ends it)", flush=True)
    if front.settings.tokens and not front.settings.cert:
        print("agentgym serve: without --tls-cert, tokens can be read on the way", file=sys.stderr, flush=True)
