"""The command `agentgym serve`: its options, the settings made of them, and the server."""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import re
import signal
import ssl
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.shared import ENVS, add_kwargs, print_json, set_run, spec_of
from agentgym.core.usage_error import UsageError, usage_errors
from agentgym.hosts import host_name
from agentgym.processes.subprocess_query import SubprocessQueryError, subprocess_query
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.tokens import TokenFileError, read_tokens

if TYPE_CHECKING:
    from agentgym.core.registration import EnvSpec
    from agentgym.service.server.env_server import EnvServer
    from agentgym.service.server.settings import ServeSettings

_REMEDIES = {
    errno.EADDRINUSE: ": give another --port, 0 takes a free one",
    errno.EADDRNOTAVAIL: ": --host must be an address of this machine; 0.0.0.0 stands for all of them",
    errno.EACCES: ": ports below 1024 need root, give another --port",
}
_SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
# Limits of a session in seconds: option, the limit it sets, and its help.
_LIMITS = (
    ("--init-timeout", "init_seconds", "for making an environment, and for one init"),
    ("--reset-timeout", "reset_seconds", "for one reset"),
    ("--step-timeout", "step_seconds", "for one step; a process that takes longer is killed"),
    ("--close-timeout", "close_seconds", "for an environment to close, and its process to exit"),
    ("--idle-timeout", "idle_seconds", "without a request, after which a session ends"),
    ("--resume-timeout", "resume_seconds", "for a client to reconnect"),
    ("--message-timeout", "message_seconds", "for a message to arrive, and for a client to read an answer"),
)
# The least values of other numbers.
_LEAST = {
    **dict.fromkeys(("workers", "drain_timeout", "session_pids"), 0),
    **dict.fromkeys(("sessions_per_worker", "max_sessions", "max_sessions_per_token", "max_message"), 1),
}


def add_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve environments or sandboxes to programs on other machines",
        description="Serve environments over HTTP and WebSockets until Ctrl-C or SIGTERM, each session in its own process."
        ' Clients call agentgym.make("http://HOST:PORT/ENV").',
    )
    add = parser.add_argument
    add("envs", nargs="*", metavar="ENV", help=f"environments to serve: {ENVS}")
    add_kwargs(parser, "arguments of the environments; for one of several: {ENV: {...}}")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    host = "address to listen on; any but this machine's own address needs --token-file"
    add("--host", default="127.0.0.1", help=host)
    tokens = (
        "bearer tokens, one per line: TOKEN, NAME TOKEN, or NAME TOKEN SCOPES, with the scopes metrics, play and sandboxes"
        " joined by commas (default: all); the server rereads the file when it changes"
    )
    add("--token-file", type=Path, metavar="FILE", help=tokens)
    names = (
        "accept this Host name, such as a proxy's, on a server without tokens; may be repeated."
        " localhost is always accepted, other names are refused"
    )
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with this certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's key, if it is in another file")
    ahead = "processes forked in advance, so that new sessions open quickly (default: 2)"
    add("--workers", type=int, default=2, metavar="N", help=ahead)
    shared = (
        "sessions that share a process, each in a thread: they open faster and need less memory. Only for environments that"
        " you trust: a call that exceeds its time limit ends all of them. Sandboxes, and environments that run programs in"
        " them, always have one process per session. A process may use N times --session-memory and --session-pids (default: 1)"
    )
    add("--sessions-per-worker", type=int, default=1, metavar="N", help=shared)
    add("--max-sessions", type=int, default=256, metavar="N", help="sessions open at a time (default: 256)")
    for_one = "sessions open at a time for one token (default: no limit)"
    add("--max-sessions-per-token", type=int, metavar="N", help=for_one)
    most = ServiceLimits().message_bytes
    largest = f"largest message from a client (default: {most})"
    add("--max-message", type=int, default=most, metavar="BYTES", help=largest)
    drain = (
        "seconds for running sessions to end after Ctrl-C or SIGTERM; a second signal ends them at once (default: 30)"
    )
    add("--drain-timeout", type=float, default=30.0, metavar="S", help=drain)
    pids = "processes and threads of a session, if control groups are available; 0: no limit (default: 512)"
    add("--session-pids", type=int, default=512, metavar="N", help=pids)
    for option, name, what in _LIMITS:
        value = getattr(ServiceLimits(), name)
        add(option, type=float, default=value, dest=name, metavar="S", help=f"seconds {what} (default: {value:g})")
    memory = (
        "memory of a session with its child processes, beyond what all sessions share: 512MiB, 2GiB; a session that"
        " needs more is killed, the others go on (default: no limit)"
    )
    add("--session-memory", type=_size, default=0, metavar="SIZE", help=memory)
    _add_sandboxes(parser)
    set_run(parser, _serve, "print the address, as JSON")


def _add_sandboxes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sandbox = "serve sandboxes, with or without environments; with sandbox=http://HOST:PORT, clients run programs here"
    add("--sandbox", action="store_true", help=sandbox)
    backends = ("auto", "docker", "bubblewrap")
    add("--sandbox-backend", choices=backends, default="auto", help="sandbox back end (default: auto)")
    most = (
        "largest sandbox that a client may request: cpus (4), memory and disk in bytes (4 GiB, 1 GiB), pids (1024), output"
        " in bytes (8 MiB), network=true (false); may be given several times"
    )
    add("--sandbox-most", action="append", default=[], metavar="NAME=VALUE", help=most)
    total = (
        "limits of all sandboxes together: cpus, memory in bytes, count; beyond them the server"
        " is full, and clients wait or use another server; may be given several times (default: no limit)"
    )
    add("--sandbox-total", action="append", default=[], metavar="NAME=VALUE", help=total)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * (1 << _SIZES[found[2].upper()])) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"a size is like 512MiB or 2GiB, not {text!r}")
    return size


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The settings of a command line. Raises `UsageError`."""
    _check_options(args)
    from agentgym.service.server.bounds import Bounds, raise_open_files
    from agentgym.service.server.settings import ServeSettings

    sandbox = _sandboxes(args)
    if not args.envs and sandbox is None:
        raise UsageError("name environments to serve, or give --sandbox")
    try:
        open_files = raise_open_files(args.max_sessions + args.workers)
    except ValueError as error:
        raise UsageError(f"--max-sessions: {error}") from error
    seconds = {name: getattr(args, name) for _, name, _ in _LIMITS}
    same = ("host", "port", "max_sessions", "max_sessions_per_token", "workers", "sessions_per_worker", "token_file")
    try:
        return ServeSettings(
            envs=_specs_apart(args.envs, args.kwargs),
            tokens=read_tokens(args.token_file) if args.token_file else {},
            allowed_hosts=tuple(name.lower() for name in args.allow_host),
            cert=str(args.tls_cert) if args.tls_cert else None,
            key=str(args.tls_key) if args.tls_key else None,
            limits=ServiceLimits(**seconds, message_bytes=args.max_message),
            bounds=Bounds(args.session_memory, open_files, args.session_pids),
            drain_seconds=args.drain_timeout,
            sandbox=sandbox,
            **{name: getattr(args, name) for name in same},
        )
    except TokenFileError as error:
        raise UsageError(f"--token-file {error}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_options(args: argparse.Namespace) -> None:
    if sys.platform != "linux":
        raise UsageError("runs on Linux only: it needs process descriptors and epoll")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is from 0 (a free one) to 65535, not {args.port}")
    if args.tls_key and not args.tls_cert:
        raise UsageError("--tls-key needs --tls-cert")
    for option, file in (("--tls-cert", args.tls_cert), ("--tls-key", args.tls_key)):
        try:
            if file is not None:
                file.open("rb").close()
        except OSError as error:
            raise UsageError(f"{option} {file}: cannot be read ({error.strerror})") from error
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} is at least {least}, not {value:g}")
    for option, name, _ in _LIMITS:
        if not getattr(args, name) > 0:
            raise UsageError(f"{option} must be positive, not {getattr(args, name):g}")
    for name in args.allow_host:
        if not name or host_name(name) != name.lower():
            raise UsageError(f"--allow-host takes a name without scheme, port and path, not {name!r}")


def _specs_apart(envs: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, EnvSpec]:
    """`_specs_of` in a subprocess, so that the server process imports no environment."""
    from agentgym.core.registration import EnvSpec

    def ask() -> dict[str, Any]:
        try:
            found = _specs_of(envs, kwargs)
        except UsageError as error:
            return {"error": str(error)}
        return {"specs": {id: spec.to_json() for id, spec in found.items()}, "path": sys.path}

    if not envs:
        return {}
    try:
        told = subprocess_query(ask)
    except SubprocessQueryError as error:
        raise UsageError(f"the environments cannot be imported: the importing process {error}") from error
    if "error" in told:
        raise UsageError(told["error"])
    sys.path[:] = told["path"]  # where the modules are that were named; the zygote looks there too
    return {id: EnvSpec.from_json(record) for id, record in told["specs"].items()}


def _specs_of(envs: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, EnvSpec]:
    """The environments by the ids in their URLs. Raises `UsageError`."""
    from agentgym.core.env import close_unused  # it imports Gymnasium
    from agentgym.core.registration import check_kwargs

    specs = {}
    for named in envs:
        spec = spec_of(named)
        # Of module:Class, an address has the last name.
        id = named if spec.id == named and ":" not in named else spec.id.rpartition(":")[2]
        if id in specs:
            raise UsageError(f"{id!r} is named twice")
        specs[id] = spec
    for id, spec in specs.items():
        own = kwargs.get(id, {})
        if not isinstance(own, dict):
            raise UsageError(f"--kwargs: those of {id!r} alone must be an object, not {own!r}")
        given = {**{name: value for name, value in kwargs.items() if name not in specs}, **own}
        specs[id] = replace(spec, kwargs={**spec.kwargs, **given})
        with usage_errors(ValueError, TypeError, ImportError):
            specs[id].to_json()
            check_kwargs(specs[id], spec.load(), specs[id].kwargs)
        if not given:
            continue
        try:  # make it once: a bad value would otherwise fail every session
            env: Any = specs[id].make()
            close_unused(env)
        except (ValueError, TypeError) as error:
            raise UsageError(f"--kwargs: {id!r} cannot be made with {dict(specs[id].kwargs)}: {error}") from error
        except Exception:  # its needs may be met later: the server warns, and serves the others
            continue
    return specs


def _sandboxes(args: argparse.Namespace) -> dict[str, Any] | None:
    """The value of `ServeSettings.sandbox`; None: no sandboxes are served. Raises `UsageError`."""
    if not args.sandbox:
        if args.sandbox_most or args.sandbox_total or args.sandbox_backend != "auto":
            raise UsageError("--sandbox-most, --sandbox-total and --sandbox-backend are for sandboxes: add --sandbox")
        return None
    from agentgym.sandbox import SandboxError, choose
    from agentgym.sandbox.served import Most, Total, built

    most = _numbers("--sandbox-most", args.sandbox_most, vars(Most()))
    total = _numbers("--sandbox-total", args.sandbox_total, vars(Total()))
    if not built(args.sandbox_backend):
        try:
            choose(args.sandbox_backend)
        except SandboxError as error:
            raise UsageError(f"--sandbox: {error}") from error
    return {"backend": args.sandbox_backend, "most": most, "total": total}


def _numbers(option: str, given: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any]:
    most = dict(defaults)
    for text in given:
        name, _, value = text.partition("=")
        if name not in defaults:
            raise UsageError(f"{option} {text}: there are {', '.join(defaults)}")
        if name == "network":
            if value not in ("true", "false"):
                raise UsageError(f"{option} {text}: network is true or false")
            most[name] = value == "true"
            continue
        try:
            number = type(defaults[name])(value)
        except ValueError:
            number = 0
        if not (math.isfinite(number) and number > 0):
            raise UsageError(f"{option} {text}: {name} is a number over 0")
        most[name] = number
    return most


def _serve(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if args.token_file and args.token_file.stat().st_mode & stat.S_IROTH:
        _warn(f"all users of this machine can read the tokens: chmod 600 {args.token_file}")
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
        looking = asyncio.ensure_future(_look(server))
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


async def _look(server: EnvServer) -> None:
    """Warn about environments that cannot be made now. They stay served, since their needs may be met later."""
    for id in server.settings.envs:
        try:
            told = await server.listing.ask({"env": id, "about": True})
        except (LookupError, OSError) as error:
            told = {"error": str(error)}
        if "error" in told:
            _warn(f"{id} cannot be made now: {told['error']}")
    await server.listing.rest()


async def _drained(server: EnvServer, again: asyncio.Future[None]) -> None:
    """Wait for sessions to end, until a second signal."""
    if server.sessions.open:
        waits = f"waiting for {len(server.sessions.open)} sessions to end, at most {server.settings.drain_seconds:g} s"
        _warn(f"{waits}; once more ends them at once")
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
        _warn("without --tls-cert, tokens can be read on the way")


def _warn(text: str) -> None:
    print(f"agentgym serve: {text}", file=sys.stderr, flush=True)
