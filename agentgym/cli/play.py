"""The command `agentgym play`: a person plays an environment in the terminal, or watches an agent play it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import random
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, cast

from agentgym.cli.shared import ENVS, add_kwargs, print_json, set_run, spec_of
from agentgym.core.usage_error import UsageError, making, usage_errors

if TYPE_CHECKING:
    from rich.console import Console

    from agentgym.cli.terminal_text import Screen
    from agentgym.core.env import Env
    from agentgym.core.registration import EnvSpec
    from agentgym.core.tasks import Task
    from agentgym.core.trajectory import Trajectory
    from agentgym.evaluate.plan import AgentSpec
    from agentgym.policies.base import Policy

_ABOUT = """Each line that you type is an answer; /help shows commands. If standard input is not a terminal, its lines are the
answers. Exit codes: 0 the episode ended or you left it (/quit, Ctrl-D), 1 it failed, 2 your mistake, 130 Ctrl-C."""


def add_play(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("play", help="play an environment yourself, or watch an agent play it", epilog=_ABOUT)
    command.add_argument("env", metavar="ENV", help=ENVS)
    add = command.add_argument
    add("--task", metavar="ID", help="task id, or number from 0 (default: drawn by the seed)")
    add("--split", default="test", help="split of the task (default: test)")
    add("--seed", type=int, help="seed of the drawn task and the episode (default: random)")
    add_kwargs(command, "keyword arguments of the environment")
    add("--max-turns", type=int, metavar="N", help="most replies of the episode (default: the environment's)")
    players = ("human", "expert", "random", "null", "chat")
    add("--policy", choices=players, help="the player (default: human, or chat with --model)")
    add("--model", metavar="NAME", help="a model at an endpoint plays")
    add(
        "--base-url",
        metavar="URL",
        help="endpoint of the model, such as http://localhost:8000/v1; its key is in OPENAI_API_KEY",
    )
    add("--temperature", type=float, help="sampling temperature of the model (default: the endpoint's)")
    add("--max-tokens", type=int, help="maximum tokens of one answer (default: the endpoint's)")
    add("--agent", metavar="MODULE:NAME", help="your own agent plays: a Python function or class")
    add_kwargs(command, "keyword arguments of the agent", "--agent-kwargs")
    add("--watch", action="store_true", help="wait for Enter after each of the agent's turns")
    set_run(command, _play, "print the episode as JSON, everything else on standard error")


def _play(args: argparse.Namespace) -> int:
    from rich.console import Console

    from agentgym.cli.terminal_text import Screen

    agent = _agent(args)
    found = spec_of(args.env, args.kwargs)
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    screen = Screen(Console(stderr=args.json, highlight=False, soft_wrap=not sys.stdout.isatty()))
    with usage_errors(ValueError, TypeError, ImportError, OSError):
        with making(found.id):
            task, env = _task(found, args, seed), found.make()
        trajectory = asyncio.run(_played(found, env, task, seed, agent, screen, args))
    if args.json:
        print_json(trajectory.to_json())
    return 130 if trajectory.end == "interrupted" else int(trajectory.failed)


def _agent(args: argparse.Namespace) -> AgentSpec | None:
    from agentgym.agents.programs import plays_episodes
    from agentgym.evaluate import agents

    chosen = [option for option in ("model", "agent") if getattr(args, option)]
    if len(chosen) > 1 or (chosen and args.policy not in (None, "chat" if chosen == ["model"] else "")):
        raise UsageError("only one player: choose --policy, --model or --agent")
    with usage_errors(ValueError):
        if args.agent:
            if plays_episodes(args.agent):
                raise UsageError(
                    f"--agent {args.agent} plays whole episodes by itself: agentgym eval plays it, and agentgym view shows its turns"
                )
            agent = agents.python(args.agent, args.agent_kwargs)
        elif args.model or args.policy == "chat":
            base_url = args.base_url or os.environ.get("OPENAI_BASE_URL")
            if not (args.model and base_url):
                raise UsageError("a model needs --model and --base-url (or OPENAI_BASE_URL)")
            agent = agents.chat(args.model, base_url, temperature=args.temperature, max_tokens=args.max_tokens)
        elif args.policy in (None, "human"):
            return None
        else:
            agent = agents.AgentSpec(args.policy, args.policy)
        agents.policy_maker(agent)
    return agent


def _task(found: EnvSpec, args: argparse.Namespace, seed: int) -> Task:
    tasks = found.tasks(args.split)
    if not len(tasks):
        raise UsageError(f"{found.id}/{args.split} has no tasks")
    if args.task is None:
        return tasks[random.Random(seed).randrange(len(tasks))]
    if named := next((task for task in tasks if task.id == args.task), None):
        return named
    if args.task.isdecimal() and int(args.task) < len(tasks):
        return tasks[int(args.task)]
    has = f"it has {len(tasks)}, the first is {tasks[0].id!r}"
    raise UsageError(f"{found.id}/{args.split} has no task {args.task!r}; {has}")


async def _played(
    found: EnvSpec, made: Env, task: Task, seed: int, agent: AgentSpec | None, screen: Screen, args: argparse.Namespace
) -> Trajectory:
    from agentgym.cli.terminal_text import RewardedSteps, ShownPolicy
    from agentgym.evaluate.agents import check_plays, policy_maker
    from agentgym.policies.base import HumanPolicy
    from agentgym.rollout.episode import Episode, Limits, close_env, run_episode

    steps = RewardedSteps(made)
    env = cast("Env", steps)
    try:
        if agent is not None:
            check_plays(agent, env)
        screen.say(f"{found.id}, task {task.id}, seed {seed}", "bold")
        if agent is None:
            policy: Policy = HumanPolicy(lambda prompt: _read(prompt, screen.console), screen.say)
        else:
            policy = policy_maker(agent)(Episode(task, 0, seed))
        watched = agent is not None and args.watch and sys.stdin.isatty()
        pause = partial(_pause, screen.console) if watched else lambda: None
        shown = ShownPolicy(policy, screen, steps.rewards, replies=agent is not None, pause=pause)
        limits = Limits(max_turns=args.max_turns, act_timeout=None if agent is None else 600.0)
        trajectory = await run_episode(env, shown, task, seed=seed, limits=limits, env_id=found.id)
        screen.end(trajectory, shown.seen)
    finally:
        await close_env(env)
    return trajectory


def _pause(console: Console) -> None:
    from agentgym.policies.base import EndEpisode

    try:
        _read("[Enter]", console)
    except EOFError:
        raise EndEpisode("quit") from None
    except KeyboardInterrupt:
        raise EndEpisode("interrupted") from None


def _read(prompt: str, console: Console) -> str:
    from agentgym.cli.terminal_text import plain

    # Ctrl-C ends the reading at once; asyncio's own handler would wait for the line.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if sys.stdin.isatty() and sys.stdout.isatty() and not console.stderr:
            with contextlib.suppress(ImportError):  # what gives input() editing and history
                importlib.import_module("readline")
            return input(prompt)
        console.print(prompt, end="", markup=False, highlight=False)
        line = sys.stdin.buffer.readline().decode(errors="replace")
        if not sys.stdin.isatty():
            console.print(plain(line.rstrip("\r\n")), markup=False, highlight=False)  # as if it were typed
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")
    finally:
        signal.signal(signal.SIGINT, before)
