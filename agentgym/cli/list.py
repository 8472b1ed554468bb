"""The command `agentgym list`. Cheap: it imports no environment, and asks a server only if one is named."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from agentgym.cli.output import print_json, print_table
from agentgym.core.usage_error import UsageError, instead

if TYPE_CHECKING:
    from agentgym.core.registration import Adapter, EnvSpec


@dataclass(frozen=True)
class Need:
    """A requirement of an environment.

    Attributes:
        what: "sandbox IMAGE", or the argument of `pip install`.
        here: whether this machine has it; None where only asking a Docker Engine would tell.
        remedy: the command that gets it, if it is or may be missing.
    """

    what: str
    here: bool | None
    remedy: str | None = None


@dataclass(frozen=True)
class Row:
    """An environment, or an adapter, whose id ends in `:NAME`. `example` is an id of it to try."""

    id: str
    kind: str
    description: str
    tags: Sequence[str]
    needs: Sequence[Need]
    example: str


def add(commands: argparse._SubParsersAction) -> None:
    listing = commands.add_parser("list", help="list environments and their requirements")
    listing.add_argument(
        "server", nargs="?", metavar="URL", help="list those of a server, http://HOST:PORT (default: this machine's)"
    )
    listing.add_argument("--tag", action="append", default=[], metavar="T", help="only those with this tag; repeatable")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> int:
    from agentgym.core.registration import adapters, registry

    if args.server is not None:
        return _list_served(args)
    tags = sorted({tag for spec in registry.values() for tag in spec.tags})
    if unknown := [tag for tag in args.tag if tag not in tags]:
        raise UsageError(f"no environment has the tag {unknown[0]!r}{instead(unknown[0], tags)}")
    rows = [_env_row(registry[id]) for id in sorted(registry) if set(args.tag) <= set(registry[id].tags)]
    if not args.tag:
        rows += [_adapter_row(adapter) for _, adapter in sorted(adapters.items())]
    if args.json:
        print_json([asdict(row) for row in rows])
    else:
        _print(rows)
    return 0


def _list_served(args: argparse.Namespace) -> int:
    from agentgym.service.client.address import Unavailable, server_of
    from agentgym.service.client.lookup import NotFound, records_at

    try:
        address = server_of(args.server)
        records = [env for env in records_at(address).values() if set(args.tag) <= set(env.get("tags", ()))]
    except (ValueError, Unavailable, NotFound) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(records)
    else:
        _print_served(address.servers[0], records)
    return 0


def _print_served(server: str, records: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("id", "description", "tasks", "made with", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for env in records:
        tasks = ", ".join(f"{split} {told['size']:,}" for split, told in (env.get("splits") or {}).items())
        made_with = ", ".join(f"{name}={value!r}" for name, value in (env.get("kwargs") or {}).items())
        table.add_row(f"{server}/{env['id']}", str(env.get("description", "")), tasks, made_with)
    print_table(table)


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table("id", "description", "tags", "needs", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows:
        description = row.description if row.kind == "environment" else f"{row.description}, as {row.example}"
        table.add_row(row.id, description, ", ".join(row.tags), "; ".join(_told(need) for need in row.needs))
    print_table(table)


def _told(need: Need) -> str:
    if need.here:
        return need.what
    return f"{need.what}, {'missing' if need.here is False else 'perhaps missing'}: {need.remedy}"


def _env_row(spec: EnvSpec) -> Row:
    return Row(spec.id, "environment", spec.description, spec.tags, [_need(need) for need in spec.needs], spec.id)


def _adapter_row(adapter: Adapter) -> Row:
    example = f"{adapter.prefix}:{adapter.example}"
    need = _package(adapter.install)
    return Row(f"{adapter.prefix}:NAME", "adapter", adapter.description, (), [need], example)


def _package(requirement: str) -> Need:
    wanted = Requirement(requirement)
    remedy = f"pip install {requirement!r}"
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Need(requirement, False, remedy)
    if wanted.specifier.contains(found, prereleases=True):
        return Need(requirement, True)
    return Need(f"{requirement} (here is {found})", False, remedy)


def _need(need: str) -> Need:
    from agentgym.core.registration import is_here

    kind, _, what = need.partition(":")
    if kind == "sandbox":
        return _sandbox(what)
    if is_here(kind):
        return Need(what, True)
    return Need(what, False, f"pip install {what!r}")


def _sandbox(image: str) -> Need:
    """True if bubblewrap has an image. Docker is not asked, which would be slow."""
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends.bubblewrap import image_root

    what = f"sandbox {image}"
    if importlib.util.find_spec("docker") is None and shutil.which("bwrap") is None:
        return Need(what, False, "agentgym doctor")
    if shutil.which("bwrap") is None:
        return Need(what, None, "agentgym doctor")
    try:
        image_root(image)
    except SandboxError:
        return Need(what, None, f"agentgym sandbox build {image}")
    return Need(what, True)
