"""The command `agentgym sandbox`: build, list, cleanup."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from agentgym.mistake import Mistake

if TYPE_CHECKING:
    from rich.table import Table

    from agentgym.sandbox.cleanup import Survey
    from agentgym.sandbox.found import Found


def add_sandbox_commands(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `agentgym sandbox` its commands."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=type(parser))

    build = commands.add_parser("build", help="make the images that sandboxes start from")
    build.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    build.add_argument(
        "--how",
        choices=("auto", "registry", "packages"),
        default="auto",
        help="by docker build; out of Debian packages; or the first where its base can be pulled (default: auto)",
    )
    build.add_argument(
        "--docker",
        action=argparse.BooleanOptionalAction,
        help="make Docker images too, or not (default: if a Docker Engine answers)",
    )
    build.add_argument("--force", action="store_true", help="also what is there already; no sandbox should be running")
    build.set_defaults(run=_build)

    listing = commands.add_parser("list", help="the sandboxes that there are, and who holds them")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)

    cleanup = commands.add_parser("cleanup", help="remove sandboxes whose process has ended")
    which = cleanup.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="also those that are in use, and those of other hosts")
    which.add_argument("--run", metavar="RUN", dest="of_run", help="those of this run only, in use or not")
    cleanup.set_defaults(run=_cleanup)


def _build(args: argparse.Namespace) -> int:
    from agentgym.sandbox.core import SandboxError
    from agentgym.sandbox.images import build, image_names

    names = args.names or image_names()
    if unknown := [name for name in names if name not in image_names()]:
        raise Mistake(f"there is no image {unknown[0]!r}; there are {', '.join(image_names())}")
    failed = False
    for name in names:
        try:
            built = build(name, args.how, docker=args.docker, force=args.force, say=partial(_say, name))
        except ValueError as error:
            raise Mistake(str(error)) from error
        except SandboxError as error:
            print(f"agentgym sandbox: {name}: {error}", file=sys.stderr)
            failed = True
            continue
        places = f"{built.tag} and {built.rootfs}" if built.tag else f"{built.rootfs}"
        state = f"made in {built.seconds:.1f} s" if built.fresh else "already there"
        print(f"{name}: {state}, {built.bytes / 1e6:.0f} MB: {places}", flush=True)
    return 1 if failed else 0


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def _list(args: argparse.Namespace) -> int:
    from agentgym.sandbox.cleanup import sandboxes

    survey = sandboxes()
    if args.json:
        print(json.dumps([asdict(f) for f in survey.found], indent=2))
    else:
        from rich.console import Console

        Console().print(_table(survey.found) if survey.found else "no sandboxes")
    _tell_unasked(survey)
    return 0


def _tell_unasked(survey: Survey) -> None:
    for backend, reason in survey.unasked.items():
        print(f"agentgym sandbox: {backend} was not asked: {reason}", file=sys.stderr)


def _table(found: list[Found]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from agentgym.sandbox.found import this_host

    table = Table("sandbox", "back end", "run", "process", "age", box=None, pad_edge=False)
    for f in found:
        where = "" if f.host == this_host() else f" on {f.host.split()[0] if f.host else 'another host'}"
        state = "" if f.alive else " (ended)"
        age = f"{max(0.0, time.time() - f.started):.0f} s" if f.started else "?"
        table.add_row(f.id[:24], f.backend, escape(f.run), escape(f"{f.pid}{where}{state}"), age)
    return table


def _cleanup(args: argparse.Namespace) -> int:
    from agentgym.sandbox.cleanup import cleanup, sandboxes
    from agentgym.sandbox.core import SandboxError

    survey = sandboxes()
    _tell_unasked(survey)
    try:
        removed = cleanup(everything=args.all, run=args.of_run, survey=survey)
    except SandboxError as error:
        print(f"agentgym sandbox: {error}", file=sys.stderr)
        return 1
    print(f"{len(removed)} removed")
    return 0
