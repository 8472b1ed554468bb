"""The command `agentgym eval`: its options, the suite made of them, and the run."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.agents.named import NAMES
from agentgym.cli.shared import ENVS, add_kwargs, find_modules, print_json, print_table, spec_of
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.evaluate.plan import AgentSpec
    from agentgym.evaluate.results import Results
    from agentgym.evaluate.suite import Suite

_SAY_SECONDS = 10.0
_SUITES = (".yaml", ".yml")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EXTENT = ("split", "n", "k", "seed", "max_turns", "shuffle")
_LIMITS = {
    "episode_limit": "episodes",
    "token_limit": "tokens",
    "cost_limit": "cost",
    "time_limit": "seconds",
    "max_episode_tokens": "episode_tokens",
    "episode_timeout": "episode_seconds",
    "answer_timeout": "answer_seconds",
    "step_timeout": "step_seconds",
}
_ASKING = ("system", "temperature", "max_tokens", "send_reasoning", "stream", "timeout")
_EXTRA = ("top_p", "reasoning_effort", "stop")
_AGENTS = ("policy", "model", "serve", "agent", "script")


def add_eval(commands: argparse._SubParsersAction) -> None:
    """None stands for an option that is not given, so that a suite's own value holds."""
    command = commands.add_parser(
        "eval",
        help="evaluate models, agents and policies on environments",
        usage="agentgym eval ENV... --model M --base-url URL [options]\n       agentgym eval SUITE.yaml [options]",
    )
    command.set_defaults(run=_eval)
    add = command.add_argument
    add("envs", nargs="*", metavar="ENV", help=f"{ENVS}; or one file of a suite, NAME.yaml")
    add("--suite", type=Path, metavar="FILE", help="a YAML file with agents, environments and limits")
    add("--resume", type=Path, metavar="RUN", help="resume the run in this folder with its original options")
    _add_agents(command)
    group = command.add_argument_group("tasks")
    add = group.add_argument
    add("--split", help="split of the tasks (default: test)")
    add("-n", "--n", type=_count, metavar="N", help="number of tasks of each environment, or all (default: 100)")
    add("--task", action="append", metavar="ID", help="play only this task instead of the first N; repeatable")
    shuffle = "shuffle the split by --seed before taking the first N"
    add("--shuffle", action="store_true", default=None, help=shuffle)
    add("-k", "--k", type=int, metavar="K", help="episodes of each task (default: 1)")
    add("--seed", type=int, help="seed of episodes and sampling (default: 0)")
    add_kwargs(group, "keyword arguments of the environments")
    add = command.add_argument_group("limits of an episode").add_argument
    add("--max-turns", type=int, metavar="N", help="most replies of an episode (default: the environment's)")
    add("--max-episode-tokens", type=int, metavar="N", help="tokens of all prompts and answers of an episode")
    add("--episode-timeout", type=_seconds, metavar="TIME", help="time limit of an episode: seconds, 90s, 10m, 2h")
    add(
        "--answer-timeout",
        type=_seconds,
        metavar="TIME",
        help="time limit of one answer with its retries (default: 300s)",
    )
    add(
        "--step-timeout",
        type=_seconds,
        metavar="TIME",
        help="time limit of one environment step (default: the environment's, at least 60s)",
    )
    add("--retries", type=int, help="retries of a failed episode (default: 1)")
    about = "a limit that is reached ends the run with exit code 3; with the same --out, the run resumes"
    add = command.add_argument_group("limits of the whole run", about).add_argument
    add("--episode-limit", type=int, metavar="N", help="episodes")
    add("--token-limit", type=int, metavar="N", help="tokens of all prompts and answers, as endpoints count them")
    add("--cost-limit", type=float, metavar="USD", help="US dollars; needs --prices")
    add("--time-limit", type=_seconds, metavar="TIME", help="time of this start of the run: seconds, 90s, 10m, 2h")
    add("--prices", type=Path, metavar="FILE", help="prices of tokens: a YAML or JSON table by model")
    add("--concurrency", type=int, metavar="N", help="episodes at a time (default: 64)")
    add = command.add_argument_group("output").add_argument
    out = "the run's folder (default: a new one in runs/); an existing run is resumed"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--no-store", action="store_true", help="store nothing")
    add("--no-probe", action="store_true", help="do not check endpoints and models before the start")
    add("--parts", action="store_true", help="also print tables by tag and by difficulty")
    add("--quiet", action="store_true", help="print only the results, no progress")
    add("--json", action="store_true", help="print the results as JSON")


def _add_agents(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("agents", "each option may be repeated; all agents play all environments")
    add = group.add_argument
    policies = ("chat", "expert", "random", "null")
    add("--policy", action="append", choices=policies, help="chat: a --model (default); null: empty replies")
    add("--model", action="append", metavar="NAME", help="a model at an endpoint")
    base_url = "endpoint of the model, such as http://localhost:8000/v1; one for all models, or one for each"
    add("--base-url", action="append", metavar="URL", help=base_url)
    add("--serve", action="append", metavar="DIR", help="a model folder, served by vLLM for this run")
    add("--serve-args", metavar="ARGS", help="extra arguments of the vLLM server, as one quoted string")
    own = (
        "your own agent: a Python function or class; or one that plays by itself and calls the --model: a function, a command, "
        f"or a name (installed at its first use): {', '.join(NAMES)}"
    )
    add("--agent", action="append", metavar="MODULE:NAME|command:WORDS|NAME", help=own)
    image = "run the agent's command in a sandbox of this image, which reaches only its model and its environment"
    add("--agent-image", metavar="IMAGE", help=image)
    add_kwargs(group, "keyword arguments of the agent", "--agent-kwargs")
    add("--script", action="append", metavar="FILE", help="a file of fixed answers, one per line, or JSON")
    add("--name", help="name of the agent in the results, if there is only one")
    group = command.add_argument_group("requests to models (default: the endpoint's)")
    add = group.add_argument
    add("--system", metavar="TEXT", help="a system message, placed before the environment's own")
    add("--stop", action="append", metavar="TEXT", help="stop sequence of answers; repeatable")
    add("--temperature", type=float, help="sampling temperature")
    add("--top-p", type=float, help="nucleus sampling: keep the most likely tokens up to this total probability")
    add("--max-tokens", type=int, help="maximum tokens of one answer")
    add("--reasoning-effort", metavar="LEVEL", help="low, medium or high; sent as reasoning_effort")
    send_reasoning = "send the reasoning of earlier turns back to the model"
    add("--send-reasoning", action="store_true", default=None, help=send_reasoning)
    add_kwargs(group, "extra fields of every request", "--extra")
    stream = "stream answers; --timeout then limits the time between two chunks"
    add("--stream", action="store_true", default=None, help=stream)
    add("--timeout", type=_seconds, metavar="TIME", help="time limit of one request (default: 120s)")
    add("--request-retries", type=int, metavar="N", help="retries of one request (default: 5)")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _suite(args: argparse.Namespace) -> Suite:
    from agentgym.evaluate.suite import read_suite, suite_of

    file = args.suite
    if file is None and len(args.envs) == 1 and args.envs[0].endswith(_SUITES):
        file, args.envs = Path(args.envs[0]), []
    with usage_errors(ValueError):
        if args.resume is not None:
            return _resumed(args)
        if file is None:
            return suite_of(_record(args), spec_of)
        record = read_suite(file)
        if args.envs or args.kwargs or args.task:
            given = "--kwargs" if args.kwargs else "--task" if args.task else args.envs[0]
            raise ValueError(f"{given}: the suite {file} sets the environments: leave {given} out")
        try:
            return suite_of(_over(record, args), spec_of)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{file}: {error}") from error


def _record(args: argparse.Namespace) -> dict[str, Any]:
    if not args.envs:
        raise UsageError("name an environment (`agentgym list` shows all), or a suite NAME.yaml")
    if suites := [name for name in args.envs if name.endswith(_SUITES)]:
        raise UsageError(f"{suites[0]}: a suite has its own environments: give one suite and no other ENV")
    if args.task and (args.n is not None or args.shuffle):
        raise UsageError("--task names the tasks: leave out -n and --shuffle")
    envs = [{"id": id, "kwargs": args.kwargs, "tasks": args.task} for id in dict.fromkeys(args.envs)]
    more = f"+{len(envs) - 1}" if len(envs) > 1 else ""
    record = _over({"envs": envs, "name": f"{args.envs[0]}{more}"}, args)
    if not record.get("agents"):
        players = "--policy expert, random or null, --agent, --script, --serve"
        raise UsageError(f"--model and --base-url are needed, or {players}")
    return record


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _over(record: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The suite with values of the command line in place of those in the file."""
    given = _given(args, _EXTENT)
    if agents := _agents(args):
        given["agents"] = agents
    envs = record.get("envs")
    if isinstance(envs, list):
        own = [{k: v for k, v in env.items() if k not in given} if isinstance(env, dict) else env for env in envs]
        record = {**record, "envs": own}
    given |= _given(args, ("concurrency", "retries"))
    if args.prices is not None:
        given["prices"] = str(args.prices)
    if limits := _limits(args):
        stored = record.get("limits")
        given["limits"] = {**stored, **limits} if isinstance(stored, dict) else limits
    return {**record, **given}


def _resumed(args: argparse.Namespace) -> Suite:
    from agentgym.evaluate.budget import Prices
    from agentgym.evaluate.suite import limits_of, suite_in

    of_agents = (*_AGENTS, "agent_image", "agent_kwargs", "base_url", "extra", "request_retries", "name")
    fixed = (*_EXTENT, *of_agents, "kwargs", "task", "suite", "out")
    asked = args.envs or [_option(name) for name, value in _given(args, fixed).items() if value not in ([], {})]
    if asked := asked or [_option(name) for name in _given(args, (*_ASKING, *_EXTRA))]:
        told = f"leave out {asked[0]}, or repeat the whole command with --out {args.resume} in place of --resume"
        raise UsageError(f"--resume uses the options stored in the folder: {told}")
    find_modules(args.resume)
    given = _given(args, ("concurrency", "retries"))
    if args.prices is not None:
        given["prices"] = Prices.load(args.prices)
    suite = suite_in(args.resume, **given)
    limits, budget = limits_of(_limits(args), suite.limits, suite.budget)
    return replace(suite, limits=limits, budget=budget)


def _limits(args: argparse.Namespace) -> dict[str, float]:
    return {_LIMITS[option]: value for option, value in _given(args, _LIMITS).items()}


def _agents(args: argparse.Namespace) -> list[dict[str, Any]]:
    from agentgym.agents.programs import plays_episodes

    entries = [{"policy": policy} for policy in args.policy or () if policy != "chat"]
    asking = _given(args, _ASKING)
    if args.request_retries is not None:
        asking["retries"] = args.request_retries
    if extra := args.extra | _given(args, _EXTRA):
        asking["extra"] = extra
    models = [{"model": model, **url, **asking} for model, url in zip(args.model or (), _urls(args), strict=True)]
    models += [{"serve": folder, **asking} for folder in args.serve or ()]
    kwargs = {"kwargs": args.agent_kwargs} if args.agent_kwargs else {}
    image = {"image": args.agent_image} if args.agent_image else {}
    playing = [target for target in args.agent or () if plays_episodes(target)]
    if playing and not models:
        raise UsageError(f"--agent {playing[0]} plays by itself: it needs --model and --base-url, or --serve")
    if kwargs and playing and playing == args.agent:
        raise UsageError(f"--agent-kwargs: --agent {playing[0]} plays by itself, and gets an episode alone")
    # A model that such an agent asks does not play itself.
    entries += [{"agent": target, **image, **model} for target in playing for model in models] if playing else models
    entries += [{"agent": target, **image, **kwargs} for target in args.agent or () if target not in playing]
    entries += [{"script": file} for file in args.script or ()]
    needs = {"agent_kwargs": "agent", "agent_image": "agent", "serve_args": "serve", "base_url": "model"}
    for option, needed in needs.items():
        if getattr(args, option) and not getattr(args, needed):
            raise UsageError(f"{_option(option)} needs --{needed}")
    if asking and not (args.model or args.serve):
        raise UsageError(f"{', '.join(asking)}: only with --model or --serve")
    if args.name:
        if len(entries) != 1:
            raise UsageError(f"--name names one agent, but there are {len(entries)}: name them in a suite's file")
        entries[0]["name"] = args.name
    return entries


def _urls(args: argparse.Namespace) -> list[dict[str, str]]:
    models, urls = args.model or [], args.base_url or []
    if models and not urls and not os.environ.get("OPENAI_BASE_URL"):
        raise UsageError("--model and --base-url are needed (or OPENAI_BASE_URL in the environment)")
    if len(urls) not in (0, 1, len(models)):
        raise UsageError(f"{len(urls)} --base-url for {len(models)} --model: give one, or one for each")
    if len(urls) == 1:
        urls = urls * len(models)
    return [{"base_url": url} for url in urls] if urls else [{} for _ in models]


def _count(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or all, not {text!r}") from None


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"a time: 90, 90s, 10m, 2h, not {text!r}")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _eval(args: argparse.Namespace) -> int:
    from agentgym.evaluate.prepare import check_agents, check_endpoints, check_envs, check_prices

    suite = _suite(args)
    agents = list({cell.agent.name: cell.agent for cell in suite.cells}.values())
    if args.no_store and (args.out or args.resume):
        raise UsageError("--no-store stores nothing: leave out --out and --resume")
    with usage_errors(ValueError):
        notes = check_envs(suite.cells)
        check_agents(agents, _serve_args(args))  # which installs those by name
        if suite.budget.cost is not None:
            check_prices(agents, suite.prices)
        if not args.no_probe:
            notes += asyncio.run(check_endpoints(agents))
    for note in notes:
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


def _new_folder(suite: Suite, agents: list[AgentSpec]) -> Path:
    who = agents[0].name if len(agents) == 1 else f"{len(agents)}-agents"
    name = re.sub(r"[^\w.@+-]+", "-", f"{suite.name}-{who}").strip("-.")[:120]
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = (Path(stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in paths if not path.exists())


def _run(suite: Suite, agents: list[AgentSpec], out: Path, args: argparse.Namespace) -> int:
    """Play the agents that need no server, then those of each model folder while it is served: one folder at a time, as they share a GPU."""
    from agentgym.evaluate.serving import ServingError
    from agentgym.evaluate.store import StoreError
    from agentgym.rollout.calls import leaving

    served = [agent for agent in agents if "serve" in agent.settings]
    others = {agent.name: agent for agent in agents if agent not in served}
    starts: list[AbstractContextManager[dict[str, AgentSpec]]] = [contextlib.nullcontext(others)] if others else []
    for folder in dict.fromkeys(agent.settings["serve"] for agent in served):
        starts.append(_served([agent for agent in served if agent.settings["serve"] == folder], out, args))
    begun = time.monotonic()
    try:
        for start in starts:
            with start as ready:
                results = asyncio.run(leaving(_play(suite, out, ready, begun, args)))
            if results.stopped is not None:
                break
    except (StoreError, ServingError) as error:
        print(f"agentgym eval: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    _show(results, out, args)
    if results.stopped is not None:
        return 130 if results.stopped == "interrupted" else 3
    return 1 if any(cell.errors or not cell.episodes for cell in results.cells) else 0


@contextlib.contextmanager
def _served(agents: Sequence[AgentSpec], out: Path, args: argparse.Namespace) -> Iterator[dict[str, AgentSpec]]:
    """The agents of one model folder by their names, while it is served."""
    from agentgym.evaluate.agents import located
    from agentgym.evaluate.serving import serve_model

    folder, named = agents[0].settings["serve"], ", ".join(agent.name for agent in agents)
    name = re.sub(r"[^\w.-]+", "-", agents[0].name)
    log = out / f"serve-{name}.log"
    told = 0.0

    def say(seconds: float, line: str) -> None:
        nonlocal told
        if seconds - told >= _SAY_SECONDS:
            told = seconds
            _tell(args, f"{named}: starting for {seconds:.0f} s: {line}")

    _tell(args, f"{named}: starting vLLM on {folder}; its log is {log}")
    with serve_model(folder, log=log, args=_serve_args(args), say=say) as place:
        yield {agent.name: located(agent, *place) for agent in agents}


def _serve_args(args: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(args.serve_args or "")
    except ValueError as error:
        raise UsageError(f"--serve-args: {error}: {args.serve_args}") from error


async def _play(
    suite: Suite, out: Path, playing: Mapping[str, AgentSpec], begun: float, args: argparse.Namespace
) -> Results:
    from rich.console import Console

    from agentgym.evaluate.agents import behind, policy_maker
    from agentgym.evaluate.display import LiveDisplay
    from agentgym.evaluate.run import run_plan

    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as around:
        ready = {}
        for name, agent in playing.items():
            folder = out / "gateway" / re.sub(r"[^\w.@+-]+", "-", name)
            ready[name] = await around.enter_async_context(behind(agent, folder, suite.prices))
        display = None if args.quiet else around.enter_context(LiveDisplay(Console(stderr=True)))
        around.enter_context(_stopping(stop))
        return await run_plan(
            suite,
            out,
            make=lambda agent: policy_maker(ready[agent.name]) if agent.name in ready else None,
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
    if limit := next((name for name, of in _LIMITS.items() if of == results.stopped), None):
        option = _option(limit)
        more = "" if results.stopped == "seconds" else f" {option} MORE"
        print(f"stopped by the limit of {results.stopped} ({option}); to go on: {resume}{more}", file=sys.stderr)
    elif results.stopped is not None:
        print(f"{results.stopped}; to go on: {resume}", file=sys.stderr)
    elif errors:
        many = errors > 1
        failed = f"{errors:,} episodes failed, and are" if many else "1 episode failed, and is"
        print(f"{failed} in no mean; to play {'them' if many else 'it'} again: {resume}", file=sys.stderr)
