"""The command `agentgym list`. Cheap: it imports no environment, and asks a server only if one is named."""

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from agentgym.cli.shared import print_json, print_rows
from agentgym.core.usage_error import UsageError, instead, usage_errors


@dataclass(frozen=True)
class Need:
    """A requirement of an environment.

    Attributes:
        what: "sandbox IMAGE", or the argument of `pip install`.
        here: whether this machine has it; None if only a Docker Engine could tell.
        remedy: the command that gets it, if it is or may be missing.
    """

    what: str
    here: bool | None
    remedy: str | None = None

    def __str__(self) -> str:
        if self.here:
            return self.what
        return f"{self.what}, {'missing' if self.here is False else 'perhaps missing'}: {self.remedy}"


def add_list(commands: argparse._SubParsersAction) -> None:
    listing = commands.add_parser("list", help="list environments and their requirements")
    server = "list those of a server, http://HOST:PORT (default: this machine's)"
    listing.add_argument("server", nargs="?", metavar="URL", help=server)
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
    rows: list[tuple[str, str, str, Sequence[str], list[Need], str]] = []
    for _, spec in sorted(registry.items()):
        if set(args.tag) <= set(spec.tags):
            needs = [_need(need) for need in spec.needs]
            rows.append((spec.id, "environment", spec.description, spec.tags, needs, spec.id))
    for prefix, adapter in sorted(adapters.items()) if not args.tag else ():
        example = f"{prefix}:{adapter.example}"
        needs = [_package(adapter.install)]
        rows.append((f"{prefix}:NAME", "adapter", adapter.description, (), needs, example))
    if args.json:
        names = ("id", "kind", "description", "tags", "needs", "example")
        records: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
        print_json([{**record, "needs": list(map(asdict, record["needs"]))} for record in records])
        return 0
    told = []
    for id, kind, description, own, needs, example in rows:
        about = description if kind == "environment" else f"{description}, as {example}"
        told.append((id, about, ", ".join(own), "; ".join(map(str, needs))))
    print_rows(("id", "description", "tags", "needs"), told, no_wrap=True)
    return 0


def _list_served(args: argparse.Namespace) -> int:
    from agentgym.service.client.address import Unavailable, server_of
    from agentgym.service.client.lookup import NotFound, records_at

    with usage_errors(ValueError, Unavailable, NotFound):
        address = server_of(args.server)
        records = [env for env in records_at(address).values() if set(args.tag) <= set(env.get("tags", ()))]
    if args.json:
        print_json(records)
        return 0
    rows = []
    for env in records:
        tasks = ", ".join(f"{split} {told['size']:,}" for split, told in (env.get("splits") or {}).items())
        made_with = ", ".join(f"{name}={value!r}" for name, value in (env.get("kwargs") or {}).items())
        rows.append((f"{address.servers[0]}/{env['id']}", str(env.get("description", "")), tasks, made_with))
    print_rows(("id", "description", "tasks", "made with"), rows, overflow="fold")
    return 0


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
    return Need(what, True) if is_here(kind) else Need(what, False, f"pip install {what!r}")


def _sandbox(image: str) -> Need:
    """Has bubblewrap the image? Docker is not asked, which would be slow."""
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends.bubblewrap import image_root

    what = f"sandbox {image}"
    if shutil.which("bwrap") is None:
        return Need(what, None if importlib.util.find_spec("docker") else False, "agentgym doctor")
    try:
        image_root(image)
    except SandboxError:
        return Need(what, None, f"agentgym sandbox build {image}")
    return Need(what, True)
