from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from agentgym.cli.check import print_findings
from agentgym.cli.output import print_json, print_table
from agentgym.cli.spec_of import ENVS, add_kwargs, spec_of
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.checks.validate import Validation


def add(commands: argparse._SubParsersAction) -> None:
    about = "validate environments: gold, null and random policies, replays, splits"
    command = commands.add_parser("validate", help=about)
    add = command.add_argument
    add("envs", nargs="+", metavar="ENV", help=ENVS)
    add("--split", default="test", help="split to play (default: test)")
    add("-n", "--n", type=int, default=50, help="number of tasks (default: 50)")
    add("--seed", type=int, default=0, help="seed of episodes and the random policy (default: 0)")
    floor = "successes that null and random play may have, 0 to 1 (default: null none, random fewer than gold)"
    add("--floor", type=float, metavar="SHARE", help=floor)
    add_kwargs(command, "keyword arguments of the environments")
    add("--concurrency", type=int, default=16, help="episodes at a time (default: 16)")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds that one call may take (default: 60)")
    add("--json", action="store_true", help="scores and findings as JSON")
    command.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> int:
    from agentgym.checks.validate import validate
    from agentgym.rollout.episode import Limits
    from agentgym.sandbox import SandboxError

    if args.floor is not None and not 0 <= args.floor <= 1:
        raise UsageError(f"--floor is a share from 0 to 1, not {args.floor:g}")
    settings = {name: getattr(args, name) for name in ("split", "n", "seed", "floor", "concurrency")}
    results = []
    for spec in [spec_of(id) for id in args.envs]:

        def say(text: str, id: str = spec.id) -> None:
            print(f"{id}: {text}", file=sys.stderr, flush=True)

        playing = replace(spec, kwargs={**spec.kwargs, **args.kwargs})
        with usage_errors(ValueError, TypeError, ImportError, OSError, SandboxError):
            limits = Limits(init_timeout=args.timeout, reset_timeout=args.timeout, step_timeout=args.timeout)
            with contextlib.redirect_stdout(sys.stderr):
                result = asyncio.run(validate(playing, limits=limits, say=say, **settings))
        results.append(result)
        if not args.json:
            _print(result)
    if args.json:
        print_json([result.to_json() for result in results])
    return 0 if all(result.ok for result in results) else 1


def _print(result: Validation) -> None:
    from rich.table import Table

    print_findings(f"{result.env}/{result.split}", result.findings, result.seconds)
    table = Table(box=None, pad_edge=False)
    table.add_column("player")
    for column in ("episodes", "errors", "reward", "least", "most", "success", "95%", "turns"):
        table.add_column(column, justify="right")
    for s in result.scores:
        numbers = ["-"] * 6
        if s.success is not None and s.success_low is not None and s.success_high is not None:
            numbers = [f"{value:.3f}" for value in (s.reward, s.reward_min, s.reward_max) if value is not None]
            interval = f"{100 * s.success_low:.1f}-{100 * s.success_high:.1f}"
            numbers += [f"{s.success:.1%}", interval, f"{s.turns:.1f}"]
        table.add_row(s.player, str(s.episodes), str(s.errors), *numbers)
    print_table(table)
