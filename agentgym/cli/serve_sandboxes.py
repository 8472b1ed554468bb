"""The options of `agentgym serve` for sandboxes."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.core.usage_error import UsageError


def add_options(add: Callable[..., Any]) -> None:
    add(
        "--sandbox",
        action="store_true",
        help="serve sandboxes too, or alone: elsewhere, sandbox=http://HOST:PORT runs an environment's programs here",
    )
    add(
        "--sandbox-backend",
        choices=("auto", "docker", "bubblewrap"),
        default="auto",
        help="sandbox back end (default: auto)",
    )
    add(
        "--sandbox-most",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="limits of one sandbox that a client may ask for: cpus (4), memory and disk in bytes (4 GiB, 1 GiB), pids (1024), output"
        " in bytes (8 MiB), network=true (false); may be given several times",
    )
    add(
        "--sandbox-total",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="limits of all sandboxes together: cpus, memory in bytes, count; a client that asks for more is told"
        " that the server is full, and waits or goes elsewhere; may be given several times (default: no limit)",
    )


def sandbox_settings(args: argparse.Namespace) -> dict[str, Any] | None:
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
