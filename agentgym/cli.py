"""The command `agentgym`: list, check, eval, sandbox, data. Its exit codes are in `EXIT_CODES`, for people in `--help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agentgym.commands.data import add_data_commands
from agentgym.commands.sandbox import add_sandbox_commands
from agentgym.mistake import Mistake

if TYPE_CHECKING:
    from agentgym.evaluate import Report
    from agentgym.policy import Policy
    from agentgym.registration import EnvSpec
    from agentgym.rollout import Episode


EXIT_CODES = """exit codes:
  0    done
  1    not all was done: a check failed, an evaluation could play nothing, an image could not be built, a sandbox not be
       removed, a data set not be fetched
  2    your mistake, told in one line: an unknown name, wrong arguments, a package that is not installed
  130  interrupted"""
_ENVS = "id, module:Class, or prefix:NAME of another package's"


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except Mistake as mistake:
        print(f"agentgym {args.command}: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has left
        sys.stdout = None  # type: ignore[assignment]
        return 0


def _parser() -> argparse.ArgumentParser:
    from agentgym import __version__

    parser = _Parser(
        prog="agentgym",
        description="Text environments for language-model agents.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agentgym {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    listing = commands.add_parser("list", help="the environments that there are")
    listing.add_argument("--json", action="store_true", help="as JSON, without those of other packages")
    listing.set_defaults(run=_list)

    check = commands.add_parser("check", help="check environments before publishing them")
    check.add_argument("envs", nargs="+", metavar="ENV", help=_ENVS)
    check.set_defaults(run=_check)

    evaluation = commands.add_parser("eval", help="evaluate a model or a policy on environments")
    evaluation.add_argument("envs", nargs="+", metavar="ENV", help=_ENVS)
    add = evaluation.add_argument
    add("--policy", choices=("chat", "expert", "random"), default="chat", help="what plays (default: chat)")
    add("--model", help="name of the model at the endpoint")
    add("--base-url", help="OpenAI-compatible endpoint, http://localhost:8000/v1; key in OPENAI_API_KEY")
    add("--temperature", type=float, help="of sampling (default: the endpoint's)")
    add("--max-tokens", type=int, help="of one answer (default: the endpoint's)")
    add("--split", default="test", help="which tasks (default: test)")
    add("-n", type=int, default=100, help="how many tasks (default: 100)")
    add("-k", type=int, default=1, help="episodes of each task (default: 1)")
    add("--max-turns", type=int, help="replies after which an episode is ended (default: the environment's)")
    add("--concurrency", type=int, default=64, help="episodes at a time (default: 64)")
    add("--retries", type=int, default=1, help="of an episode that failed (default: 1)")
    add("--seed", type=int, default=0, help="of episodes and sampling (default: 0)")
    add("--kwargs", default="{}", metavar="JSON", help="what the environments are made with")
    add("--out", type=Path, metavar="DIR", help="store trajectories and report in DIR/ENV")
    add("--json", action="store_true", help="print the reports as JSON")
    evaluation.set_defaults(run=_eval)

    add_sandbox_commands(commands.add_parser("sandbox", help="images and sandboxes of environments that act"))
    add_data_commands(commands.add_parser("data", help="the data sets that environments can use"))
    return parser


def _list(args: argparse.Namespace) -> int:
    from agentgym.registration import adapters, registry

    specs = [registry[id] for id in sorted(registry)]
    if args.json:
        rows = [{"id": s.id, "description": s.description, "tags": list(s.tags)} for s in specs]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    width = max((len(name) for name in (*registry, *(f"{prefix}:NAME" for prefix in adapters))), default=0)
    for s in specs:
        print(f"{s.id:<{width}}  {s.description}{'  [' + ', '.join(s.tags) + ']' if s.tags else ''}".rstrip())
    for prefix, a in sorted(adapters.items()):
        print(f"{prefix + ':NAME':<{width}}  {a.description}, as {prefix}:{a.example} (pip install {a.install!r})")
    return 0


def _check(args: argparse.Namespace) -> int:
    from agentgym.checker import check_env
    from agentgym.registration import UnknownEnvError

    specs = [_spec(id) for id in args.envs]
    code = 0
    for s in specs:
        try:
            problems = check_env(s)
        except (ImportError, UnknownEnvError) as error:  # what another package has, or what it needs, is only seen here
            print(f"agentgym check: {s.id}: {error}", file=sys.stderr)
            code = 2
            continue
        except (TypeError, ValueError) as error:
            problems = [f"cannot be made: {error}"]
        print(f"{s.id}: {'ok' if not problems else f'{len(problems)} problem(s)'}", flush=True)
        for problem in problems:
            print(f"  - {problem}")
        code = max(code, 1 if problems else 0)
    return code


def _spec(id: str) -> EnvSpec:
    from agentgym.registration import spec

    try:
        found = spec(id)
        found.load()
    except (ValueError, ImportError, TypeError) as error:
        raise Mistake(str(error)) from error
    return found


def _eval(args: argparse.Namespace) -> int:
    specs = [_prepared(id, args) for id in args.envs]
    make_policy = _policy_maker(args)
    reports = [_evaluate(s, make_policy, args) for s in specs]
    if args.json:
        print(json.dumps([r.to_json() for r in reports], indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from agentgym.evaluate import table_of

        Console().print(table_of(reports))
        for report in reports:
            for text, count in report.error_texts.items():
                print(f"{report.env}: {count} x {text}", file=sys.stderr)
    return 0 if all(r.episodes for r in reports) else 1


def _prepared(id: str, args: argparse.Namespace) -> EnvSpec:
    """The spec with the command line's kwargs, after everything that can be wrong with it was tried."""
    import asyncio
    from dataclasses import replace

    from agentgym.rollout import close_env
    from agentgym.sandbox import SandboxError, describe

    found = _spec(id)
    try:
        kwargs = json.loads(args.kwargs)
    except ValueError as error:
        raise Mistake(f"--kwargs is no JSON: {error}: {args.kwargs}") from error
    if not isinstance(kwargs, dict):
        raise Mistake(f"--kwargs must be a JSON object, not {args.kwargs}")
    found = replace(found, kwargs={**found.kwargs, **kwargs})
    try:
        env = found.make()
        if args.policy != "chat":
            _player(args, 0).attach(env, None)
        image = getattr(env.unwrapped, "sandbox_image", None)
        asyncio.run(close_env(env))
        if source := found.tasks(args.split).source:
            print(f"{found.id}: tasks: {source}", file=sys.stderr)
        if image:
            print(f"{found.id}: sandbox: {describe(found.kwargs.get('sandbox'), image)}", file=sys.stderr)
    except (ValueError, TypeError, ImportError, OSError, SandboxError) as error:
        raise Mistake(str(error)) from error
    return found


def _player(args: argparse.Namespace, seed: int | str) -> Any:
    from random import Random

    from agentgym.policy import ExpertPolicy, RandomPolicy

    return ExpertPolicy() if args.policy == "expert" else RandomPolicy(rng=Random(seed))


def _policy_maker(args: argparse.Namespace) -> Callable[[Episode], Policy]:
    if args.policy != "chat":
        # A seed of its own for every episode, or random play would repeat itself.
        return lambda episode: _player(args, f"{args.seed} {episode.task.id} {episode.sample}")
    if not args.model or not args.base_url:
        raise Mistake("--model and --base-url are needed, or --policy expert or random")
    from agentgym.policy import ChatPolicy

    def chat(seed: int) -> ChatPolicy:
        return ChatPolicy(
            args.model, args.base_url, temperature=args.temperature, max_tokens=args.max_tokens, seed=seed
        )

    try:
        chat(0)
    except ValueError as error:
        raise Mistake(str(error)) from error
    return lambda episode: chat(args.seed + episode.sample)


def _evaluate(spec: EnvSpec, make_policy: Callable[[Episode], Policy], args: argparse.Namespace) -> Report:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from agentgym.evaluate import evaluate
    from agentgym.rollout import Limits

    total = min(args.n, len(spec.tasks(args.split))) * args.k
    out = args.out / spec.id.replace("/", "_").replace(":", "_") if args.out else None
    try:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task(spec.id, total=total)
            return asyncio.run(
                evaluate(
                    spec,
                    make_policy,
                    split=args.split,
                    n=args.n,
                    k=args.k,
                    seed=args.seed,
                    concurrency=args.concurrency,
                    retries=args.retries,
                    limits=Limits(max_turns=args.max_turns),
                    out=out,
                    on_end=lambda _: progress.advance(bar),
                )
            )
    except (ValueError, OSError) as error:
        raise Mistake(str(error)) from error


if __name__ == "__main__":
    raise SystemExit(main())
