"""The command `agentgym gateway`: an endpoint in front of a model, which records the calls of any agent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.cli.shared import print_json, set_run
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.gateway import Gateway, Upstream

ADMIN_VARIABLE = "AGENTGYM_GATEWAY_KEY"
_LIMITS = (
    ("--max-turns", int, "turns", "answered calls of an episode"),
    ("--max-episode-tokens", int, "tokens", "tokens of all prompts and answers of an episode"),
    ("--max-seconds", float, "seconds", "seconds of an episode"),
    ("--max-cost", float, "cost", "US dollars of an episode; needs --prices"),
)


def add_gateway(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "gateway",
        help="serve an endpoint in front of a model, and record agents' calls",
        description="Serve OpenAI's chat completions, completions and Responses and Anthropic's messages in front of a model, until"
        " Ctrl-C. Each episode has its own key, and every call is on disk before its answer is sent. The admin key, which opens"
        f" episodes, is {ADMIN_VARIABLE}, or a new one.",
    )
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="OpenAI-compatible endpoint of the model, up to and with /v1")
    add("--model", metavar="NAME", help="name of the model (default: the first that the endpoint lists)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8100, help="port to listen on; 0 takes a free one (default: 8100)")
    add(
        "--out",
        type=Path,
        default=Path("runs/gateway"),
        metavar="FOLDER",
        help="folder of the record; an existing record is continued",
    )
    policies = ("strict", "override", "mask")
    unusable = (
        "if an agent's sampling settings make its tokens untrainable: refuse the call (strict), use the run's settings"
        " (override), or do not train on the tokens (mask); only with --temperature (default: override)"
    )
    add("--settings", choices=policies, default="override", help=unusable)
    add("--temperature", type=float, metavar="T", help="sampling temperature of a run that trains on the tokens")
    for option, kind, name, what in _LIMITS:
        add(option, dest=name, type=kind, metavar="N", help=f"most {what}")
    add("--prices", type=Path, metavar="FILE", help="table of prices, as for agentgym eval")
    passed = (
        "send requests for the model NAME to another endpoint; KEY is the variable with its API key; may be repeated"
    )
    add("--pass", dest="passed", action="append", default=[], metavar="NAME=URL[,KEY]", help=passed)
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one answer of the engine (default: 600)")
    add("--one-key", action="store_true", help="open an episode and print the variables that agents need")
    set_run(parser, _gateway, "print the address and the keys, as JSON")


def _gateway(args: argparse.Namespace) -> int:
    from agentgym.evaluate.budget import Prices
    from agentgym.gateway import Gateway, Limits, Passed, Settings, Upstream

    given = {name: value for _, _, name, _ in _LIMITS if (value := getattr(args, name)) is not None}
    with usage_errors(ValueError):
        limits, settings = Limits(**given), Settings(args.settings, args.temperature)
        prices = Prices.load(args.prices) if args.prices else None
        engine = Upstream(args.engine, args.model, timeout=args.timeout)
        passed = dict(Passed.named(text) for text in args.passed)
    if args.cost is not None and prices is None:
        raise UsageError("--max-cost needs --prices")
    gateway = Gateway(
        engine,
        args.out,
        settings=settings,
        limits=limits,
        host=args.host,
        port=args.port,
        admin_key=os.environ.get(ADMIN_VARIABLE),
        passed=passed,
        cost_of=prices.cost if prices else None,
    )
    return asyncio.run(_served(gateway, engine, args))


async def _served(gateway: Gateway, engine: Upstream, args: argparse.Namespace) -> int:
    from agentgym.policies.base import EndpointError

    with usage_errors(EndpointError):
        await engine.start()
    if args.cost is not None and gateway.cost_of(engine.models[0], {}) is None:
        raise UsageError(f"--max-cost needs a price of {engine.models[0]!r}, and {args.prices} has none")
    leaving = asyncio.Event()
    for how in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(how, leaving.set)
    async with contextlib.AsyncExitStack() as running:
        try:
            await running.enter_async_context(gateway)
        except (OSError, OverflowError, ValueError) as error:  # OverflowError: the port is too large
            raise UsageError(f"the gateway cannot start: {error}") from error
        await _say(gateway, engine, args)
        await leaving.wait()
    return 0


async def _say(gateway: Gateway, engine: Upstream, args: argparse.Namespace) -> None:
    told: dict[str, Any] = {"url": gateway.url, "model": engine.models[0], "record": str(gateway.record.path)}
    told["exact_tokens"] = engine.exact
    if not os.environ.get(ADMIN_VARIABLE):
        told["admin_key"] = gateway.admin_key
    if args.one_key:
        episode, key = await gateway.open()
        told |= {"episode": episode.id, "key": key}
    if args.json:
        print_json(told)
        return
    exact = "" if engine.exact else " (without token ids, which the engine does not return)"
    print(f"{engine.models[0]} at {gateway.url}, recorded in {gateway.record.path}{exact} (Ctrl-C ends it)")
    if "admin_key" in told:
        print(f"{ADMIN_VARIABLE}={gateway.admin_key}")
    if args.one_key:
        variables = {"OPENAI_BASE_URL": f"{gateway.url}/v1", "OPENAI_API_KEY": told["key"]}
        variables |= {"ANTHROPIC_BASE_URL": gateway.url, "ANTHROPIC_API_KEY": told["key"]}
        print("\n".join(f"export {name}={value}" for name, value in variables.items()))
    sys.stdout.flush()
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        print("agentgym gateway: without TLS, others on the network can read keys and answers", file=sys.stderr)
