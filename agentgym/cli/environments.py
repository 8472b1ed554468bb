"""The commands for environments: list, init, check, validate, export."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib.util
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from agentgym.cli.shared import ENVS, add_kwargs, print_json, print_rows, set_run, spec_of
from agentgym.core.install import pip_install
from agentgym.core.usage_error import UsageError, instead, making, unmade, usage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from agentgym.checks.audit import Audit
    from agentgym.checks.subject import Finding
    from agentgym.checks.validate import Validation
    from agentgym.core.registration import EnvSpec

_GRACE = 15.0  # seconds, past the timeout, of an interpreter that a call does not let go of


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
    listing.add_argument(
        "--tag", action="append", default=[], metavar="T", help="only environments with this tag; repeatable"
    )
    set_run(listing, _list, "as JSON")


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
    remedy = pip_install(requirement)
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Need(requirement, False, remedy)
    if wanted.specifier.contains(found, prereleases=True):
        return Need(requirement, True)
    return Need(f"{requirement} (here is {found})", False, remedy)


def _need(need: str) -> Need:
    from agentgym.core.registration import is_here
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends.bubblewrap import image_root

    kind, _, what = need.partition(":")
    if kind != "sandbox":
        return Need(what, True) if is_here(kind) else Need(what, False, pip_install(what))
    # Docker is not asked for the image, which would be slow.
    if shutil.which("bwrap") is None:
        return Need(f"sandbox {what}", None if importlib.util.find_spec("docker") else False, "agentgym doctor")
    try:
        image_root(what)
    except SandboxError:
        return Need(f"sandbox {what}", None, f"agentgym sandbox build {what}")
    return Need(f"sandbox {what}", True)


def add_init(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("init", help="create a new environment as an installable package")
    add = command.add_argument
    add("name", metavar="NAME", help="name of the package and the environment, such as my_env")
    add("--dir", type=Path, default=Path("."), metavar="DIR", help="parent of the new folder NAME (default: here)")
    kind = command.add_mutually_exclusive_group()
    for name, verb in (("tools", "calls tools"), ("sandbox", "runs commands in a sandbox")):
        about = f"create an environment whose agent {verb}"
        kind.add_argument(f"--{name}", action="store_const", dest="kind", const=name, default="plain", help=about)
    set_run(command, _init, "print the written files as JSON")


def _init(args: argparse.Namespace) -> int:
    from agentgym.scaffold import scaffold

    try:
        with usage_errors(ValueError):
            root, files = scaffold(args.name, args.dir, args.kind)
    except OSError as error:
        raise UsageError(f"{args.dir / args.name}: cannot be made ({error.strerror or error})") from error
    if args.json:
        print_json({"folder": str(root), "files": [str(file.relative_to(root)) for file in files]})
        return 0
    for file in files:
        print(file)
    print(f"\nNext:\n  cd {root}\n  pip install -e '.[dev]'")
    for words in (f"check {args.name}", f"validate {args.name}", f"eval {args.name} --policy expert"):
        print(f"  agentgym {words}")
    print("  python -m pytest")
    return 0


def add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser("check", help="check environments before publishing them")
    check.add_argument("envs", nargs="+", metavar="ENV", help=ENVS)
    timeout = "seconds that one call may take (default: 30)"
    check.add_argument("--timeout", type=float, default=30.0, metavar="S", help=timeout)
    set_run(check, _check, "the findings as JSON")


def _check(args: argparse.Namespace) -> int:
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout must be a positive number of seconds, not {args.timeout:g}")
    code, rows = 0, []
    for spec in [spec_of(id) for id in args.envs]:
        started = time.perf_counter()
        found, error = _examined(spec, args.timeout)
        seconds = time.perf_counter() - started
        ok = not error and all(finding.state != "problem" for finding in found)
        row = {"id": spec.id, "ok": ok, "seconds": round(seconds, 2), "checks": [asdict(finding) for finding in found]}
        if error:
            print(f"agentgym check: {spec.id}: {error}", file=sys.stderr)
            row["error"] = error
        elif not args.json:
            _print_findings(spec.id, found, seconds)
        rows.append(row)
        code = max(code, 2 if error else int(not ok))
    if args.json:
        print_json(rows)
    return code


def _examined(spec: EnvSpec, timeout: float) -> tuple[list[Finding], str]:
    """The findings, and the user's mistake if the environment cannot be examined here: a missing package, a wrong name."""
    from agentgym.checks.check_env import examine
    from agentgym.checks.subject import Finding
    from agentgym.core.registration import UnknownEnvError
    from agentgym.service.client.address import Unavailable

    # A call may hold the interpreter (a regular expression that never ends does), so that no thread here could say so.
    # Then faulthandler, which needs no interpreter, shows where it is and ends this process with exit code 1.
    on_beat = partial(faulthandler.dump_traceback_later, timeout + _GRACE, exit=True, file=2)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the environment prints is no part of the result
            return examine(spec, timeout=timeout, on_beat=on_beat), ""
    except (ImportError, UnknownEnvError, Unavailable) as error:  # what others have, or it needs, is only seen here
        return [], str(error)
    except (TypeError, ValueError) as error:
        return [Finding("spec", "problem", f"cannot be made: {error}")], ""
    except Exception as error:
        return [Finding("spec", "problem", unmade(error))], ""
    finally:
        faulthandler.cancel_dump_traceback_later()


def _print_findings(title: str, found: Sequence[Finding], seconds: float) -> None:
    count = {state: sum(finding.state == state for finding in found) for state in ("problem", "note")}
    parts = [f"{n} {state}{'s' if n > 1 else ''}" for state, n in count.items() if n]
    verdict = ", ".join(parts if count["problem"] else ["ok", *parts])
    checks = len({finding.check for finding in found})
    print(f"{title}: {verdict} ({checks} check{'s' if checks > 1 else ''} in {seconds:.1f} s)")
    width = max((len(finding.check) for finding in found), default=0)
    for finding in found:
        print(f"  {finding.state:<8}{finding.check:<{width}}  {finding}".rstrip())
    sys.stdout.flush()


def add_validate(commands: argparse._SubParsersAction) -> None:
    about = "validate environments: gold, null and random policies, replays, splits"
    command = commands.add_parser("validate", help=about)
    add = command.add_argument
    add("envs", nargs="+", metavar="ENV", help=ENVS)
    add("--split", default="test", help="split to play (default: test)")
    add("-n", "--n", type=int, help="number of tasks (default: 50; with --audit 1)")
    add("--seed", type=int, default=0, help="seed of episodes and the random policy (default: 0)")
    floor = "largest success of null and random play, 0 to 1 (default: null 0, random less than gold)"
    add("--floor", type=float, metavar="SHARE", help=floor)
    add_kwargs(command, "keyword arguments of the environments")
    add("--audit", action="store_true", help="play the environment's known hacks instead, which must earn nothing")
    add("--hack", action="append", default=[], metavar="NAME", help="with --audit: only this hack; repeatable")
    add("--concurrency", type=int, help="episodes at a time (default: 16; with --audit 4)")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds that one call may take (default: 60)")
    set_run(command, _validate, "scores and findings as JSON")


def _validate(args: argparse.Namespace) -> int:
    from agentgym.checks.audit import audit
    from agentgym.checks.validate import validate
    from agentgym.rollout.episode import Limits
    from agentgym.sandbox import SandboxError

    if args.hack and not args.audit:
        raise UsageError("--hack goes with --audit")
    if args.floor is not None and args.audit:
        raise UsageError("--floor does not go with --audit")
    if args.floor is not None and not 0 <= args.floor <= 1:
        raise UsageError(f"--floor is a share from 0 to 1, not {args.floor:g}")
    examine: Callable[..., Coroutine[Any, Any, Any]] = audit if args.audit else validate
    if args.audit:
        n, concurrency, own = 1, 4, {"only": args.hack}
    else:
        n, concurrency, own = 50, 16, {"floor": args.floor}
    n = n if args.n is None else args.n
    concurrency = concurrency if args.concurrency is None else args.concurrency
    if n < 1 or concurrency < 1:
        raise UsageError(f"-n and --concurrency are at least 1, not {n} and {concurrency}")
    settings = {"n": n, "concurrency": concurrency, **own}
    results = []
    for spec in [spec_of(id, args.kwargs) for id in args.envs]:

        def say(text: str, id: str = spec.id) -> None:
            print(f"{id}: {text}", file=sys.stderr, flush=True)

        usage = usage_errors(ValueError, TypeError, ImportError, OSError, SandboxError)
        with usage, contextlib.redirect_stdout(sys.stderr):
            limits = Limits(init_timeout=args.timeout, reset_timeout=args.timeout, step_timeout=args.timeout)
            examined = examine(spec, split=args.split, seed=args.seed, limits=limits, say=say, **settings)
            results.append(asyncio.run(examined))
        if not args.json:
            (_print_audit if args.audit else _print_scores)(results[-1])
    if args.json:
        print_json([result.to_json() for result in results])
    return 0 if all(result.ok for result in results) else 1


def _print_audit(result: Audit) -> None:
    rows = []
    for each in result.played:
        reward = "failed" if each.reward is None else f"{each.reward:g}"
        told = ", ".join(f"{name}: {text}" for name, text in each.told.items())
        rows.append((each.task, each.hack, each.what, reward, "" if each.ok else "problem", each.error or told))
    print_rows(("task", "hack", "what it does", "reward", "", "end"), rows)
    hacks = [each for each in result.played if each.hack != "gold"]
    bad = sum(not each.ok for each in result.played)
    verdict = f"{bad} problem{'s' if bad > 1 else ''}" if bad else "ok"
    print(f"{result.env}: {verdict} ({len(hacks)} hacks in {result.seconds:.0f} s)")


def _print_scores(result: Validation) -> None:
    _print_findings(f"{result.env}/{result.split}", result.findings, result.seconds)
    rows = []
    for s in result.scores:
        numbers = ["-"] * 6
        if s["episodes"]:
            numbers = [f"{s[name]:.3f}" for name in ("reward", "reward_min", "reward_max")]
            interval = f"{100 * s['success_low']:.1f}-{100 * s['success_high']:.1f}"
            numbers += [f"{s['success']:.1%}", interval, f"{s['turns']:.1f}"]
        rows.append((s["player"], str(s["episodes"]), str(s["errors"]), *numbers))
    columns = ("player", "episodes", "errors", "reward", "least", "most", "success", "95%", "turns")
    print_rows(columns, rows, numbers=True)


def add_export(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("export", help="export an environment for another framework")
    forms = command.add_subparsers(dest="form", required=True, metavar="FORM", parser_class=type(command))
    openenv = forms.add_parser("openenv", help="write a folder that OpenEnv's tools can build, validate and deploy")
    add = openenv.add_argument
    add("env", metavar="ENV", help=ENVS)
    add("--out", type=Path, required=True, metavar="DIR", help="output folder, new or empty")
    add_kwargs(openenv, "keyword arguments of the environment")
    wheel = "a package file that is on no index; repeatable"
    add("--wheel", type=Path, action="append", default=[], metavar="FILE", help=wheel)
    set_run(openenv, _export, "print the written files as JSON")


def _export(args: argparse.Namespace) -> int:
    from agentgym.service.openenv.export import export_openenv, lacks_agentgym

    spec = spec_of(args.env)
    try:
        with usage_errors(ValueError, TypeError, ImportError, FileExistsError), making(spec.id):
            spec.make(**args.kwargs)
            files = export_openenv(spec, args.out, args.kwargs, args.wheel)
    except OSError as error:
        raise UsageError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    if lacks_agentgym(args.wheel):
        why = "agentgym here did not come from a package index, and a container's build would ask one for it"
        remedy = "give its wheel too, --wheel FILE (pip wheel --no-deps makes it)"
        print(f"agentgym export: {why}: {remedy}", file=sys.stderr)
    names = [str(file.relative_to(args.out)) for file in files]
    if args.json:
        print_json({"env": spec.id, "folder": str(args.out), "files": names})
        return 0
    for name in names:
        print(args.out / name)
    print(f"\nNext:\n  openenv validate {args.out}\n  cd {args.out} && python -m server.app")
    return 0
