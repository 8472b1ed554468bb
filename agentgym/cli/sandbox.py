"""The command `agentgym sandbox`: build, list, cleanup."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from agentgym.cli.output import print_json, print_table
from agentgym.core.usage_error import UsageError, instead

if TYPE_CHECKING:
    from rich.table import Table

    from agentgym.sandbox.discovery import Found


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("sandbox", help="manage sandboxes and their images")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=type(parser))
    build = commands.add_parser("build", help="build the images that sandboxes start from")
    build.add_argument("names", nargs="*", metavar="IMAGE", help="image names (default: all)")
    build.add_argument(
        "--how",
        choices=("auto", "registry", "packages"),
        default="auto",
        help="by docker build; out of Debian packages; or the first where its base can be pulled (default: auto)",
    )
    build.add_argument(
        "--docker",
        action=argparse.BooleanOptionalAction,
        help="also build Docker images (default: if a Docker Engine answers)",
    )
    build.add_argument("--force", action="store_true", help="rebuild existing images; no sandbox should be running")
    build.add_argument("--json", action="store_true", help="print the built images as JSON")
    build.set_defaults(run=_build)
    listing = commands.add_parser("list", help="list sandboxes and the processes that hold them")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)
    cleanup = commands.add_parser("cleanup", help="remove sandboxes whose process has ended")
    which = cleanup.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="also remove those in use, and those of other hosts")
    which.add_argument("--run", metavar="LABEL", dest="of_run", help="remove only those of this run, in use or not")
    cleanup.add_argument("--json", action="store_true", help="print the removed sandboxes as JSON")
    cleanup.set_defaults(run=_cleanup)


def _build(args: argparse.Namespace) -> int:
    from agentgym.sandbox.api import SandboxError
    from agentgym.sandbox.images.build import build, image_names

    names = args.names or image_names()
    if unknown := [name for name in names if name not in image_names()]:
        raise UsageError(f"no image {unknown[0]!r}{instead(unknown[0], image_names())}")
    records: list[dict[str, Any]] = []
    for name in names:
        say = partial(print, f"{name}:", file=sys.stderr if args.json else sys.stdout, flush=True)
        try:
            built = build(name, args.how, docker=args.docker, force=args.force, say=say)
        except ValueError as error:
            raise UsageError(str(error)) from error
        except SandboxError as error:
            print(f"agentgym sandbox: {name}: {error}", file=sys.stderr)
            records.append({"name": name, "error": str(error)})
            continue
        records.append({**asdict(built), "rootfs": str(built.rootfs), "error": None})
        places = f"{built.tag} and {built.rootfs}" if built.tag else f"{built.rootfs}"
        state = f"made in {built.seconds:.1f} s" if built.fresh else "already there"
        say(f"{state}, {built.bytes / 1e6:.0f} MB: {places}")
    if args.json:
        print_json(records)
    return 1 if any(record["error"] for record in records) else 0


def _tell_unasked(unasked: Mapping[str, str]) -> None:
    for backend, reason in unasked.items():
        print(f"agentgym sandbox: {backend} was not asked: {reason}", file=sys.stderr)


def _list(args: argparse.Namespace) -> int:
    from agentgym.sandbox.backends.select import sandboxes

    found, unasked = sandboxes()
    _tell_unasked(unasked)
    if args.json:
        print_json([asdict(f) for f in found])
    elif found:
        print_table(_table(found))
    else:
        print("no sandboxes")
    return 0


def _table(found: list[Found]) -> Table:
    from rich.table import Table

    from agentgym.sandbox.discovery import this_host

    table = Table("sandbox", "back end", "run", "process", "age", box=None, pad_edge=False)
    for f in found:
        where = "" if f.host == this_host() else f" on {f.host.split()[0] if f.host else 'another host'}"
        state = "" if f.alive else " (ended)"
        age = f"{max(0.0, time.time() - f.started):.0f} s" if f.started else "?"
        table.add_row(f.id[:24], f.backend, f.run, f"{f.pid}{where}{state}", age)
    return table


def _cleanup(args: argparse.Namespace) -> int:
    from agentgym.sandbox.api import SandboxError
    from agentgym.sandbox.backends.select import cleanup

    try:
        removed, unasked = cleanup(everything=args.all, run=args.of_run)
    except SandboxError as error:
        print(f"agentgym sandbox: {error}", file=sys.stderr)
        return 1
    _tell_unasked(unasked)
    if args.json:
        print_json([asdict(f) for f in removed])
    else:
        print(f"{len(removed)} removed")
    return 0
