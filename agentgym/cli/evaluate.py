from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.evaluate_options import LIMITS, add_options, option_of, suite_from
from agentgym.cli.output import print_json, print_table
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.evaluate.plan import AgentSpec
    from agentgym.evaluate.results import Results
    from agentgym.evaluate.suite import Suite

_SAY_SECONDS = 10.0


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate models, agents and policies on environments",
        usage="agentgym eval ENV... --model M --base-url URL [options]\n       agentgym eval SUITE.yaml [options]",
    )
    add_options(command)
    command.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    suite = suite_from(args)
    agents = list({cell.agent.name: cell.agent for cell in suite.cells}.values())
    for note in _prepared(suite, agents, args):
        _tell(args, note)
    with contextlib.ExitStack() as open_things:
        if args.no_store:
            out = Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="agentgym-"))) / "run"
        else:
            out = args.resume or args.out or _new_folder(suite, agents)
        return _run(suite, agents, out, args)


def _tell(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(text, file=sys.stderr)


def _prepared(suite: Suite, agents: list[AgentSpec], args: argparse.Namespace) -> list[str]:
    from agentgym.evaluate.prepare import check_agents, check_endpoints, check_envs, check_prices

    if args.no_store and (args.out or args.resume):
        raise UsageError("--no-store stores nothing: leave out --out and --resume")
    with usage_errors(ValueError):
        check_agents(agents, _serve_args(args))
        if suite.budget.cost is not None:
            check_prices(agents, suite.prices)
        notes = check_envs(suite.cells)
        return notes if args.no_probe else [*notes, *asyncio.run(check_endpoints(agents))]


def _new_folder(suite: Suite, agents: list[AgentSpec]) -> Path:
    who = agents[0].name if len(agents) == 1 else f"{len(agents)}-agents"
    name = re.sub(r"[^\w.@+-]+", "-", f"{suite.name}-{who}").strip("-.")[:120]
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = (Path(stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in paths if not path.exists())


def _run(suite: Suite, agents: list[AgentSpec], out: Path, args: argparse.Namespace) -> int:
    """Play, first who needs no server, then each model folder while it is served: one at a time, as they share a GPU."""
    from agentgym.evaluate.serving import ServingError
    from agentgym.evaluate.store import StoreError

    served = [agent for agent in agents if "serve" in agent.settings]
    others = {agent.name: agent for agent in agents if agent not in served}
    begun = time.monotonic()
    results = None
    try:
        if others:
            results = asyncio.run(_play(suite, out, others, begun, args))
        for agent in served:
            if results is not None and results.stopped is not None:
                break
            with _served(agent, out, args) as there:
                results = asyncio.run(_play(suite, out, {agent.name: there}, begun, args))
    except (StoreError, ServingError) as error:
        print(f"agentgym eval: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if results is None:
        raise UsageError("there is no agent to play")
    _show(results, out, args)
    return _exit_code(results)


@contextlib.contextmanager
def _served(agent: AgentSpec, out: Path, args: argparse.Namespace) -> Iterator[AgentSpec]:
    from agentgym.evaluate.agents import located
    from agentgym.evaluate.serving import serve_model

    folder = agent.settings["serve"]
    name = re.sub(r"[^\w.-]+", "-", agent.name)
    log = out / f"serve-{name}.log"
    _tell(args, f"{agent.name}: starting vLLM on {folder}; its log is {log}")
    with serve_model(folder, log=log, args=_serve_args(args), say=_say(agent.name, args)) as place:
        yield located(agent, *place)


def _serve_args(args: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(args.serve_args or "")
    except ValueError as error:
        raise UsageError(f"--serve-args: {error}: {args.serve_args}") from error


def _say(name: str, args: argparse.Namespace) -> Any:
    last = 0.0

    def say(seconds: float, line: str) -> None:
        nonlocal last
        if seconds - last >= _SAY_SECONDS:
            last = seconds
            _tell(args, f"{name}: starting for {seconds:.0f} s: {line}")

    return say


async def _play(
    suite: Suite, out: Path, playing: Mapping[str, AgentSpec], begun: float, args: argparse.Namespace
) -> Results:
    from rich.console import Console

    from agentgym.evaluate.agents import policy_maker
    from agentgym.evaluate.display import LiveDisplay
    from agentgym.evaluate.run import run_plan

    stop = asyncio.Event()
    with contextlib.ExitStack() as around:
        display = None if args.quiet else around.enter_context(LiveDisplay(Console(stderr=True)))
        around.enter_context(_stopping(stop))
        return await run_plan(
            suite,
            out,
            make=lambda agent: policy_maker(playing[agent.name]) if agent.name in playing else None,
            watch=display,
            begun=begun,
            stop=stop,
            command=["agentgym", *args.words],
        )


@contextlib.contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C, and the signals that end processes, stop the run in good order; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the live display hides the cursor
            os._exit(130)
        asked = True
        loop.call_soon_threadsafe(stop.set)
        os.write(2, b"stopping: what has ended is stored, what still runs is given up; once more ends it at once\n")

    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # Ignored ones stay so: nohup and shells that run in the background say what they want.
    before = {number: signal.getsignal(number) for number in signals if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(results: Results, out: Path, args: argparse.Namespace) -> None:
    from agentgym.evaluate.tables import results_table

    if args.json:
        print_json({**results.to_json(), "folder": None if args.no_store else str(out)})
    else:
        print_table(results_table(results, parts=args.parts))
    if args.no_store:
        return
    folder = shlex.quote(str(out))
    _tell(args, f"stored in {out}; to look at the episodes: agentgym view {folder}")
    errors = sum(cell.errors for cell in results.cells)
    resume = f"agentgym eval --resume {folder}"
    if limit := next((name for name, of in LIMITS.items() if of == results.stopped), None):
        option = option_of(limit)
        more = "" if results.stopped == "seconds" else f" {option} MORE"
        print(f"stopped by the limit of {results.stopped} ({option}); to go on: {resume}{more}", file=sys.stderr)
    elif results.stopped is not None:
        print(f"{results.stopped}; to go on: {resume}", file=sys.stderr)
    elif errors:
        many = errors > 1
        failed = f"{errors:,} episodes failed, and are" if many else "1 episode failed, and is"
        print(f"{failed} in no mean; to play {'them' if many else 'it'} again: {resume}", file=sys.stderr)


def _exit_code(results: Results) -> int:
    if results.stopped == "interrupted":
        return 130
    if results.stopped is not None:
        return 3
    return 1 if any(cell.errors or not cell.episodes for cell in results.cells) else 0
