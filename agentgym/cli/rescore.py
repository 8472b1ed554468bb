from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.output import print_json, print_table
from agentgym.cli.spec_of import add_kwargs, find_modules
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.evaluate.rescore import Rescored

_EVERY = 500  # episodes between two lines of progress


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("rescore", help="grade a run's stored episodes again with the current environments")
    add = command.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the folder of an evaluation")
    add("--out", type=Path, metavar="DIR", help="the folder to write (default: RUN-rescored)")
    add_kwargs(command, "keyword arguments that override those of the run; for one environment: {ENV: {...}}")
    add("--concurrency", type=int, default=64, help="episodes at a time (default: 64)")
    add("--json", action="store_true", help="old and new scores as JSON")
    command.set_defaults(run=_rescore)


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
        _print(rows)
        print(f"written to {out}")
    if (kept := sum(row.episodes for row in rows) - seen) > 0:
        before = f"{kept} episodes were graded there before and are not graded again: for that choose another --out"
        print(f"{out}: {before}", file=sys.stderr)
    return 1 if any(row.failed or row.missing for row in rows) else 0


def _print(rows: list[Rescored]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    for column in ("graded", "changed", "reward", "success", "shown otherwise", "errors"):
        table.add_column(column, justify="right")
    for row in rows:
        reward = success = "-"
        if row.old_reward is not None and row.old_success is not None:
            reward = f"{row.old_reward:.3f} -> {row.new_reward:.3f}"
            success = f"{row.old_success:.1%} -> {row.new_success:.1%}"
        errors = row.failed + row.missing + row.failed_before
        table.add_row(row.cell, str(row.graded), str(row.changed), reward, success, str(row.unfaithful), str(errors))
    print_table(table)
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
