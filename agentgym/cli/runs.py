"""The commands that read runs: compare, rescore, view."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.shared import add_kwargs, find_modules, print_json, print_rows, print_table, set_run
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.evaluate.rescore import Rescored
    from agentgym.viewer.run import Runs

_EVERY = 500  # rescored episodes between two lines of progress


def add_compare(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two or more runs, paired by task",
        description="Compare runs with the first, on the tasks that both have: differences with 95% intervals, an exact"
        " sign test, the tasks that changed most. A run is the folder of an evaluation, that of a training run (its last"
        " evaluation), or a file of trajectories.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="two or more; the first is the baseline")
    measure = "measure in the table; tokens: sampled by the agent (default: success)"
    add("--measure", choices=("success", "reward", "turns", "tokens"), default="success", help=measure)
    help_json = "print all measures as JSON: an object, or a list with more than two runs"
    set_run(parser, _compare, help_json)


def _compare(args: argparse.Namespace) -> int:
    from agentgym.evaluate.compare import compare_all, comparison_table

    if len(args.runs) < 2:
        raise UsageError(f"needs at least two runs, got only {args.runs[0]}")
    with usage_errors(ValueError, OSError):
        comparisons = compare_all(args.runs)
    if args.json:
        found = [comparison.to_json() for comparison in comparisons]
        print_json(found[0] if len(found) == 1 else found)
    code = 0
    for position, comparison in enumerate(comparisons):
        if not args.json:
            if position:
                print()
            print_table(comparison_table(comparison, args.measure))
        if not any(cell.measures for cell in comparison.cells):
            print(f"agentgym compare: {comparison.a} and {comparison.b} have no task in common", file=sys.stderr)
            code = 1
    return code


def add_rescore(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("rescore", help="grade a run's stored episodes again with the current environments")
    add = command.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of an evaluation")
    add("--out", type=Path, metavar="DIR", help="the folder to write (default: RUN-rescored)")
    add_kwargs(command, "keyword arguments that override those of the run; for one environment: {ENV: {...}}")
    add("--concurrency", type=int, default=64, help="episodes at a time (default: 64)")
    set_run(command, _rescore, "old and new scores as JSON")


def _rescore(args: argparse.Namespace) -> int:
    from agentgym.evaluate.rescore import rescore
    from agentgym.sandbox import SandboxError

    run: Path = args.run_folder
    if not run.is_dir():
        raise UsageError(f"{run}: there is no such folder")
    beside = run if run.name not in ("", "..") else run.resolve()
    out = args.out or beside.with_name(f"{beside.name}-rescored")
    seen = 0

    def on_end(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen % _EVERY == 0:
            print(f"{run}: {seen} episodes", file=sys.stderr, flush=True)

    with usage_errors(ValueError, TypeError, ImportError, OSError, SandboxError):
        find_modules(run)
        settings = {"kwargs": args.kwargs, "concurrency": args.concurrency, "command": sys.argv, "on_end": on_end}
        rows, _ = asyncio.run(rescore(run, out, **settings))
    if args.json:
        print_json({"run": str(run), "out": str(out), "cells": [vars(row) for row in rows]})
    else:
        _print_rescored(rows)
        print(f"written to {out}")
    if (kept := sum(row.episodes for row in rows) - seen) > 0:
        before = f"{kept} episodes were graded there before and are not graded again: for that choose another --out"
        print(f"{out}: {before}", file=sys.stderr)
    return 1 if any(row.failed or row.missing for row in rows) else 0


def _print_rescored(rows: list[Rescored]) -> None:
    told = []
    for row in rows:
        reward = success = "-"
        if row.old_reward is not None and row.old_success is not None:
            reward = f"{row.old_reward:.3f} -> {row.new_reward:.3f}"
            success = f"{row.old_success:.1%} -> {row.new_success:.1%}"
        errors = row.failed + row.missing + row.failed_before
        told.append((row.cell, str(row.graded), str(row.changed), reward, success, str(row.unfaithful), str(errors)))
    columns = ("cell", "graded", "changed", "reward", "success", "shown otherwise", "errors")
    print_rows(columns, told, numbers=True, no_wrap=True)
    for row in rows:
        parts = {
            "had failed when they were played": row.failed_before,
            "failed now": row.failed,
            "have a task that the environment no longer has": row.missing,
            "were shown something else than when they were played, where the agent might have replied otherwise": row.unfaithful,
        }
        for text, count in parts.items():
            if count:
                print(f"{row.cell}: {count} episodes {text}", file=sys.stderr)


def add_view(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "view",
        help="view runs in the browser: curves, comparisons, episodes turn by turn",
        description="Serve a page that shows runs, evaluations and training runs, until Ctrl-C; to this machine only, and"
        " nothing is sent anywhere. With --export, write the page and the runs into one HTML file.",
    )
    add = parser.add_argument
    paths = "run folders, or folders of runs (default: runs)"
    add("paths", nargs="*", type=Path, default=[Path("runs")], metavar="DIR", help=paths)
    add("--port", type=int, default=0, help="port of the page (default: a free one)")
    add("--host", default="127.0.0.1", help="address to listen on; other machines need the token in the printed URL")
    add("--no-open", action="store_true", help="do not open the browser")
    add("--export", type=Path, metavar="FILE", help="write one static HTML file and exit")
    episodes = "episodes of each run in the exported file (default: 200)"
    add("--episodes", type=int, default=200, metavar="N", help=episodes)
    set_run(parser, _view, "print the page's address, or what was exported, as JSON")


def _view(args: argparse.Namespace) -> int:
    from agentgym.viewer.run import Runs, roots_of

    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is from 0 (a free one) to 65535, not {args.port}")
    runs = Runs(roots_of(args.paths))
    if args.export:
        return _export_page(args, runs)
    if not (count := len(runs.look())):
        names = ", ".join(map(str, args.paths))
        print(f"agentgym view: no runs in {names} yet; the page shows them as they come", file=sys.stderr)
    asyncio.run(_serve_page(args, runs, count))
    return 0


def _export_page(args: argparse.Namespace, runs: Runs) -> int:
    from agentgym.viewer.export import export

    if args.episodes < 0:
        raise UsageError(f"--episodes is at least 0, not {args.episodes}")
    try:
        with usage_errors(ValueError):
            exported = export(runs, args.export, args.episodes)
    except OSError as error:
        raise UsageError(f"--export {args.export}: cannot be written ({error.strerror or error})") from error
    if args.json:
        print_json({**vars(exported), "path": str(exported.path)})
    else:
        what = f"{_many(exported.runs, 'run')}, {_many(exported.episodes, 'episode')}"
        print(f"{exported.path}: {what}, {exported.bytes / 1e6:.1f} MB")
        if exported.note:
            print(f"agentgym view: {exported.note}", file=sys.stderr)
    return 0


async def _serve_page(args: argparse.Namespace, runs: Runs, count: int) -> None:
    from agentgym.hosts import LOCAL_HOSTS
    from agentgym.viewer.server import serve

    ended = asyncio.Event()
    for how in (signal.SIGINT, signal.SIGTERM):  # before the address is printed, so that Ctrl-C works from then on
        asyncio.get_running_loop().add_signal_handler(how, ended.set)
    try:
        served = await serve(runs, args.host, args.port)
    except OSError as error:
        raise UsageError(f"cannot listen at {args.host}, port {args.port}: {error.strerror or error}") from error
    try:
        if args.json:
            print_json({"url": served.url, "port": served.port, "runs": count})
        else:
            print(f"{_many(count, 'run')} at {served.url} (Ctrl-C ends it)", flush=True)
        if args.host not in LOCAL_HOSTS:
            risk = "anyone with this address can read these runs; the connection is not encrypted"
            print(f"agentgym view: {risk}", file=sys.stderr)
        has_display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if has_display and not args.no_open and not args.json:
            import webbrowser

            await asyncio.to_thread(webbrowser.open, served.url)
        await ended.wait()
    finally:
        await served.close()


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
