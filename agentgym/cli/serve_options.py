"""The options of `agentgym serve`, and the settings made of them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli import serve_sandboxes
from agentgym.cli.spec_of import ENVS, add_kwargs, spec_of
from agentgym.core.usage_error import UsageError
from agentgym.hosts import host_name
from agentgym.processes.subprocess_query import SubprocessQueryError, subprocess_query
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.tokens import Token, TokenFileError, read_tokens

if TYPE_CHECKING:
    from agentgym.core.registration import EnvSpec
    from agentgym.service.server.settings import ServeSettings

_SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
# Limits of a session in seconds: option, the limit it sets, and its help.
_LIMITS = (
    ("--init-timeout", "init_seconds", "for making an environment, and for one init"),
    ("--reset-timeout", "reset_seconds", "for one reset"),
    ("--step-timeout", "step_seconds", "for one step; a process that takes longer is killed"),
    ("--idle-timeout", "idle_seconds", "without a request, after which a session ends"),
    ("--resume-timeout", "resume_seconds", "for a client to come back after its connection dropped"),
    ("--message-timeout", "message_seconds", "for a message to arrive whole, and for an answer to be taken"),
)
_MOST_BYTES = ServiceLimits().message_bytes
# Other numbers: option, default, least value, metavar and help.
_NUMBERS: tuple[tuple[str, float | None, int, str, str], ...] = (
    ("--workers", 2, 0, "N", "processes forked in advance, so that a new session waits for no fork (default: 2)"),
    (
        "--sessions-per-worker",
        1,
        1,
        "N",
        "sessions that share a process, each in a thread: they open faster and need less memory. For environments that you"
        " trust: a call that exceeds its time limit ends all of them. Sandboxes, and environments that run programs in"
        " them, keep one process a session; a process may use N times --session-memory and --session-pids (default: 1)",
    ),
    ("--max-sessions", 256, 1, "N", "sessions open at a time (default: 256)"),
    ("--max-sessions-per-token", None, 1, "N", "sessions open at a time for one token (default: no limit)"),
    ("--max-message", _MOST_BYTES, 1, "BYTES", f"largest message from a client (default: {_MOST_BYTES})"),
    (
        "--drain-timeout",
        30.0,
        0,
        "S",
        "seconds for running sessions to end after Ctrl-C or SIGTERM; a second one ends them at once (default: 30)",
    ),
    (
        "--session-pids",
        512,
        0,
        "N",
        "processes and threads of a session at a time, where control groups can be made; 0: no limit (default: 512)",
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("envs", nargs="*", metavar="ENV", help=f"environments to serve: {ENVS}")
    add_kwargs(parser, "arguments of the environments; of one alone: {ENV: {...}}")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    host = "address to listen on; any but this machine's own address needs --token-file"
    add("--host", default="127.0.0.1", help=host)
    tokens = (
        "accepted bearer tokens, one a line: TOKEN, NAME TOKEN, or NAME TOKEN SCOPES, with scopes out of metrics, play"
        " and sandboxes, joined by commas (default: all); the file is read again when it changes"
    )
    add("--token-file", type=Path, metavar="FILE", help=tokens)
    names = (
        "accept this Host name on a server without tokens, such as a proxy's; may be repeated."
        " localhost is always accepted, other names are refused"
    )
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with this certificate chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's key, if it is in another file")
    for option, default, _, metavar, help in _NUMBERS:
        add(option, type=float if isinstance(default, float) else int, default=default, metavar=metavar, help=help)
    for option, name, what in _LIMITS:
        value = getattr(ServiceLimits(), name)
        add(option, type=float, default=value, dest=name, metavar="S", help=f"seconds {what} (default: {value:g})")
    memory = (
        "memory of a session beyond what all sessions share, child processes included, as 512MiB or 2GiB; a session"
        " that needs more is ended alone (default: no limit)"
    )
    add("--session-memory", type=_size, default=0, metavar="SIZE", help=memory)
    serve_sandboxes.add_options(add)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * (1 << _SIZES[found[2].upper()])) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"a size is like 512MiB or 2GiB, not {text!r}")
    return size


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The settings of a command line. Raises `UsageError`."""
    if sys.platform != "linux":
        raise UsageError("runs on Linux alone: it takes process descriptors and epoll")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is from 0 (a free one) to 65535, not {args.port}")
    from agentgym.service.server.bounds import Bounds, raise_open_files
    from agentgym.service.server.settings import ServeSettings

    if args.tls_key and not args.tls_cert:
        raise UsageError("--tls-key needs --tls-cert")
    for option, file in (("--tls-cert", args.tls_cert), ("--tls-key", args.tls_key)):
        try:
            if file is not None:
                file.open("rb").close()
        except OSError as error:
            raise UsageError(f"{option} {file}: cannot be read ({error.strerror})") from error
    _check_numbers(args)
    sandbox = serve_sandboxes.sandbox_settings(args)
    if not args.envs and sandbox is None:
        raise UsageError("name environments to serve, or give --sandbox")
    try:
        open_files = raise_open_files(args.max_sessions + args.workers)
    except ValueError as error:
        raise UsageError(f"--max-sessions: {error}") from error
    try:
        return ServeSettings(
            envs=_specs_apart(args.envs, args.kwargs),
            host=args.host,
            port=args.port,
            max_sessions=args.max_sessions,
            max_sessions_per_token=args.max_sessions_per_token,
            workers=args.workers,
            sessions_per_worker=args.sessions_per_worker,
            tokens=_tokens(args.token_file),
            token_file=args.token_file,
            allowed_hosts=_allowed_hosts(args.allow_host),
            cert=str(args.tls_cert) if args.tls_cert else None,
            key=str(args.tls_key) if args.tls_key else None,
            limits=ServiceLimits(
                **{name: getattr(args, name) for _, name, _ in _LIMITS}, message_bytes=args.max_message
            ),
            bounds=Bounds(args.session_memory, open_files, args.session_pids),
            drain_seconds=args.drain_timeout,
            sandbox=sandbox,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _tokens(path: Path | None) -> dict[str, Token]:
    try:
        return read_tokens(path) if path is not None else {}
    except TokenFileError as error:
        raise UsageError(f"--token-file {error}") from error


def _allowed_hosts(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not name or host_name(name) != name.lower():
            raise UsageError(f"--allow-host takes a name without scheme, port and path, not {name!r}")
    return tuple(name.lower() for name in names)


def _check_numbers(args: argparse.Namespace) -> None:
    for option, _, least, *_ in _NUMBERS:
        value = getattr(args, option.strip("-").replace("-", "_"))
        if value is not None and not value >= least:
            raise UsageError(f"{option} is at least {least}, not {value:g}")
    for option, name, _ in _LIMITS:
        if not getattr(args, name) > 0:
            raise UsageError(f"{option} must be positive, not {getattr(args, name):g}")


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
        raise UsageError(f"the environments cannot be imported: the process that tried {error}") from error
    if "error" in told:
        raise UsageError(told["error"])
    sys.path[:] = told["path"]  # where the modules are that were named; the zygote looks there too
    return {id: EnvSpec.from_json(record) for id, record in told["specs"].items()}


def _specs_of(envs: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, EnvSpec]:
    """The environments by the ids in their URLs. Raises `UsageError`."""
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
        try:
            specs[id].to_json()
            check_kwargs(specs[id], spec.load(), specs[id].kwargs)
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(str(error)) from error
        if given:
            _check_values(id, specs[id])
    return specs


def _check_values(id: str, spec: EnvSpec) -> None:
    """Make the environment once: a bad value would otherwise fail every session. Raises `UsageError`."""
    from agentgym.core.env import close_unused  # it imports Gymnasium

    try:
        env: Any = spec.make()
        close_unused(env)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--kwargs: {id!r} cannot be made with {dict(spec.kwargs)}: {error}") from error
    except Exception:  # its needs may be met later: the server warns, and serves the others
        return
