"""The commands for this machine: doctor, sandbox, data."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.cli.shared import print_json, print_rows, set_run
from agentgym.core.install import pip_install
from agentgym.core.usage_error import UsageError, instead, usage_errors

_COLOURS = {"ok": "32", "warning": "33", "missing": "2", "broken": "31"}
_STATES = """states: ok; warning: works with problems; missing: optional, not installed; broken: cannot be used, though every command
or one of your settings (AGENTGYM_DATA, AGENTGYM_SANDBOX, DOCKER_HOST) needs it.
exit code: 1 if something is broken, else 0"""


def add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check packages, hardware, sandboxes and data on this machine",
        epilog=_STATES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--network", action="store_true", help="also contact the Hugging Face hub")
    doctor.add_argument(
        "--cluster", action="store_true", help="check the nodes of the Ray cluster at RAY_ADDRESS instead"
    )
    shared = "with --cluster: folder that all nodes should share, such as that of runs (default: runs)"
    doctor.add_argument("--shared", type=Path, default=Path("runs"), metavar="DIR", help=shared)
    set_run(doctor, _doctor, "as JSON")


def _doctor(args: argparse.Namespace) -> int:
    from agentgym.doctor import NETWORK, PROBES, examine

    if args.cluster:
        return _doctor_of_cluster(args)
    found = examine([*PROBES, NETWORK] if args.network else PROBES)
    broken = sum(f.state == "broken" for findings in found.values() for f in findings)
    if args.json:
        parts = [{"part": part, **asdict(f)} for part, findings in found.items() for f in findings]
        print_json({"ok": not broken, "findings": parts})
        return int(broken > 0)
    for part, findings in found.items():
        print(part)
        for f in findings:
            state = f"{f.state:<7}"
            if sys.stdout.isatty():
                state = f"\x1b[{_COLOURS[f.state]}m{state}\x1b[0m"
            print(f"  {state}  {f.name}: {f.text}")
            if f.todo:
                print(f"{'':<11}-> {f.todo}")
    print("everything that is needed is here" if not broken else f"{broken} broken", flush=True)
    return int(broken > 0)


def _doctor_of_cluster(args: argparse.Namespace) -> int:
    if not (address := os.environ.get("RAY_ADDRESS")):
        raise UsageError("--cluster needs RAY_ADDRESS=HOST:PORT, the head of a Ray cluster")
    if not args.shared.is_dir():
        raise UsageError(
            f"--shared {args.shared} is not a folder on this machine: create it, or name one that all nodes share"
        )
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"--cluster needs Ray: {pip_install('agentgym-toolkit[train]')}")
    # By name: Ray is the trainer's, which nothing here imports.
    examine_cluster = importlib.import_module("agent_train.cluster.doctor").examine_cluster
    with contextlib.redirect_stdout(sys.stderr):  # Ray tells of dead nodes
        nodes, problems = examine_cluster(address, args.shared.absolute())
    broken = any(problem.state == "broken" for problem in problems)
    if args.json:
        print_json({"ok": not broken, "nodes": list(map(asdict, nodes)), "problems": list(map(asdict, problems))})
        return int(broken)
    if nodes:
        rows = [(node.address, *node.versions.values(), "; ".join(node.gpus) or "none", node.clock) for node in nodes]
        print_rows(("node", *nodes[0].versions, "GPUs", "clock ahead"), rows)
    for problem in problems:
        print(f"{problem.state}: {problem.name}: {problem.text}\n  -> {problem.todo}")
    print(f"problems: {len(problems)}" if problems else "no problem found", flush=True)
    return int(broken)


def add_sandbox(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("sandbox", help="manage sandboxes and their images")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=type(parser))
    build = commands.add_parser("build", help="build the images that sandboxes start from")
    add = build.add_argument
    add("names", nargs="*", metavar="IMAGE", help="image names, or folders as ./PATH (default: all names)")
    how = "registry: docker build; packages: from Debian packages; auto: registry if the base image can be pulled (default: auto)"
    add("--how", choices=("auto", "registry", "packages"), default="auto", help=how)
    docker = "also build Docker images (default: if a Docker Engine answers)"
    add("--docker", action=argparse.BooleanOptionalAction, help=docker)
    files = "also copy the files of Docker's images, for bubblewrap (default: yes)"
    add("--bubblewrap", action=argparse.BooleanOptionalAction, default=True, help=files)
    add("--force", action="store_true", help="rebuild existing images; no sandbox should be running")
    of_instances = "build the images of the instances in this file, with the builder IMAGE (swe)"
    add("--instances", metavar="FILE", help=of_instances)
    add("--only", nargs="+", default=[], metavar="ID", help="with --instances: only these instances")
    add("--jobs", type=int, default=2, metavar="N", help="with --instances: builds at a time (default: 2)")
    set_run(build, _build, "print the built images as JSON")
    listing = commands.add_parser("list", help="list sandboxes and the processes that hold them")
    set_run(listing, _list_sandboxes, "as JSON")
    cleanup = commands.add_parser("cleanup", help="remove sandboxes whose process has ended")
    which = cleanup.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="also remove sandboxes in use, and those of other hosts")
    which.add_argument("--run", metavar="LABEL", dest="of_run", help="remove only sandboxes of this run, in use or not")
    set_run(cleanup, _cleanup, "print the removed sandboxes as JSON")


def _build(args: argparse.Namespace) -> int:
    from agentgym.sandbox.api import SandboxError
    from agentgym.sandbox.images.build import build, image_names

    if args.instances:
        return _build_instances(args)
    if args.only:
        raise UsageError("--only names instances of a file: add --instances FILE")
    names = [os.path.abspath(name) if "/" in name else name for name in args.names or image_names()]
    if unknown := [name for name in names if "/" not in name and name not in image_names()]:
        raise UsageError(f"no image {unknown[0]!r}{instead(unknown[0], image_names())}")
    records: list[dict[str, Any]] = []
    for name in names:
        say = partial(print, f"{name}:", file=sys.stderr if args.json else sys.stdout, flush=True)
        try:
            built = build(name, args.how, docker=args.docker, force=args.force, say=say, rootfs=args.bubblewrap)
        except ValueError as error:
            raise UsageError(str(error)) from error
        except SandboxError as error:
            print(f"agentgym sandbox: {name}: {error}", file=sys.stderr)
            records.append({"name": name, "error": str(error)})
            continue
        records.append({**_record(built), "error": None})
        places = " and ".join(str(place) for place in (built.tag, built.rootfs) if place)
        state = f"made in {built.seconds:.1f} s" if built.fresh else "already there"
        say(f"{state}, {built.bytes / 1e6:.0f} MB: {places}")
    if args.json:
        print_json(records)
    return 1 if any(record["error"] for record in records) else 0


def _record(built: Any) -> dict[str, Any]:
    return {**asdict(built), "rootfs": built.rootfs and str(built.rootfs)}


def _tell_unasked(unasked: Mapping[str, str]) -> None:
    for backend, reason in unasked.items():
        print(f"agentgym sandbox: {backend} was not asked: {reason}", file=sys.stderr)


def _build_instances(args: argparse.Namespace) -> int:
    from agentgym.sandbox.images.instances import builder_of

    if len(args.names) != 1 or args.how != "auto":
        raise UsageError(
            "--instances needs the name of one builder, and no --how: agentgym sandbox build swe --instances FILE"
        )
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    options = args.only, args.docker, args.force, args.bubblewrap, args.jobs
    with usage_errors(ValueError, OSError, ImportError):
        results = builder_of(args.names[0])(args.instances, *options, say)
    failed = [result for result in results if result.error]
    if args.json:
        print_json([{**asdict(result), "built": result.built and _record(result.built)} for result in results])
        return int(bool(failed))
    rows = [(r.instance, f"{r.built.bytes / 1e6:.0f}", r.built.tag or str(r.built.rootfs)) for r in results if r.built]
    print_rows(("instance", "MB", "image"), rows)
    for result in failed:
        print(f"agentgym sandbox: {result.instance}: {result.error}", file=sys.stderr)
    print(f"{len(results) - len(failed)} of {len(results)} images are there", flush=True)
    return int(bool(failed))


def _list_sandboxes(args: argparse.Namespace) -> int:
    from agentgym.sandbox.backends.select import sandboxes
    from agentgym.sandbox.discovery import this_host

    found, unasked = sandboxes()
    _tell_unasked(unasked)
    if args.json:
        print_json([asdict(f) for f in found])
        return 0
    rows = []
    for f in found:
        where = "" if f.host == this_host() else f" on {f.host.split()[0] if f.host else 'another host'}"
        state = "" if f.alive else " (ended)"
        age = f"{max(0.0, time.time() - f.started):.0f} s" if f.started else "?"
        rows.append((f.id[:24], f.backend, f.run, f"{f.pid}{where}{state}", age))
    if rows:
        print_rows(("sandbox", "back end", "run", "process", "age"), rows)
    else:
        print("no sandboxes")
    return 0


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


def add_data(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("data", help="list and download data sets")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=type(parser))
    listing = commands.add_parser("list", help="list data sets, and which are on this machine")
    set_run(listing, _list_data, "as JSON")
    get = commands.add_parser("get", help="fetch data sets from the Hugging Face hub into the data folder")
    get.add_argument("names", nargs="+", metavar="DATA", help="names of data sets, see `agentgym data list`")
    get.add_argument("--force", action="store_true", help="overwrite existing files")
    get.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each part (default: 600)")
    set_run(get, _get_data, "which files were written, as JSON")


def _list_data(args: argparse.Namespace) -> int:
    from agentgym.datasets import FOLDER_VARIABLE, data_sets, folder, missing_files

    root, rows = folder(), []
    for data in data_sets().values():
        where = str(Path(root or "", os.path.commonpath(data.files)))
        if missing := len(missing_files(data)):
            parts = "missing" if missing == len(data.files) else f"{missing} of {len(data.files)} files missing"
            where = f"{parts}: {f'agentgym data get {data.name}' if data.parts else f'see {data.source}'}"
        envs = ", ".join(data.envs)
        rows.append({"name": data.name, "items": data.items, "licence": data.licence, "where": where, "envs": envs})
    if args.json:
        print_json(rows)
        return 0
    print(f"data folder: {root or f'none ({FOLDER_VARIABLE} is empty)'}", flush=True)
    columns = ("data", "items", "licence", "where", "environments")
    print_rows(columns, [[value or "-" for value in row.values()] for row in rows])
    return 0


def _get_data(args: argparse.Namespace) -> int:
    from agentgym.datasets import DownloadError, data_sets, fetch

    known = data_sets()
    for name in args.names:
        if name not in known:
            raise UsageError(f"no data set {name!r}{instead(name, known)}")
    if not args.timeout > 0:
        raise UsageError(f"--timeout must be positive, not {args.timeout:g}")
    records = []
    for name in args.names:
        written, problem = [], None
        try:
            written = fetch(known[name], force=args.force, seconds=args.timeout)
        except DownloadError as error:
            problem = str(error)
            print(f"agentgym data: {problem}", file=sys.stderr)
        records.append({"name": name, "written": [str(path) for path in written], "error": problem})
        if args.json or problem:
            continue
        for path in written:
            print(f"{name}: {path}, {path.stat().st_size:,} bytes", flush=True)
        if not written:
            print(f"{name}: already there; --force writes it again", flush=True)
    if args.json:
        print_json(records)
    return 1 if any(record["error"] for record in records) else 0
