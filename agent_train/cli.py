"""`agent-train`: settings in, a trained policy out. Everything that can be refused is refused before anything starts."""

import argparse
import contextlib
import dataclasses
import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from agentgym import __version__
from agentgym.core.install import pip_install

USAGE = (
    "agent-train {+env=NAME | mode=sft|dpo|rm data.train=FILE | replay RUN step=N} [key=value ...] [--dry-run] [--list]"
)
HELP = """\
Train a language-model agent in an environment by reinforcement learning, or a model on files.

  agent-train +env=frozen_lake                             a tiny model, built from scratch, on this machine
  agent-train +env=frozen_lake engine=embedded             without vLLM
  agent-train +env=gsm8k model.path=DIR trainer.steps=3    a Hugging Face folder
  agent-train +env=my_pkg.envs:MyEnv env.kwargs.size=8     any environment that can be imported
  agent-train +env=gsm8k --dry-run                         print the plan of the run and every setting
  agent-train mode=sft data.train=FILE model.path=DIR      imitation; mode=dpo: preferences, mode=rm: a reward model
  agent-train trainer.resume=runs/NAME                     resume a stopped run
  agent-train replay runs/NAME step=12                     train a recorded step again and compare
  agent-train plan +env=gsm8k --model 4B --gpus 8,64       estimate memory, links and time on 8 and on 64 GPUs

A setting is a dotted key: trainer.steps=3, learner.lr=1e-4, trainer.seed=1. --dry-run prints them all.
Exit code: 0 done, 1 failed while running, 2 refused before the start.
"""
COLLECT_AFTER = (50_000, 20, 100)  # thresholds of the garbage collector in a run
T = TypeVar("T", int, float)


class _TrainParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"agent-train: error: {message}\nusage: {self.usage}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, 2 if the settings are refused."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for environments and functions of the user's own files, as `python -m` would find them
    if words[:1] == ["plan"]:
        return _plan(words[1:])
    parser = _TrainParser(
        "agent-train", usage=USAGE, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = "+env=NAME, a choice such as engine=embedded, or a dotted key"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=told)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan of the run and all settings; start nothing"
    )
    parser.add_argument("--list", action="store_true", help="print environments and other choices; start nothing")
    parser.add_argument("--version", action="version", version=f"agentgym {__version__}")
    arguments = parser.parse_intermixed_args(words)
    with _ends_at_once():
        return _refuse_or_run(arguments)


def _refuse_or_run(arguments: argparse.Namespace) -> int:
    try:
        from agent_train.config.combinations import unusual
        from agent_train.config.compose import compose
        from agent_train.config.schema import ConfigError
        from agent_train.config.validation import validate
    except ModuleNotFoundError as error:
        return _refuse([f"{error.name} is not installed: {pip_install('agentgym-toolkit[train]')}"])
    try:
        if arguments.list:
            print(_choices())
            return 0
        if arguments.settings[:1] == ["replay"]:
            from agent_train.trainer.replay import replay

            return replay(arguments.settings[1:])
        config = compose(arguments.settings)
        validate(config)
    except ConfigError as error:
        return _refuse(error.problems)
    for line in unusual(config):
        print(f"agent-train: warning: {line}", file=sys.stderr)
    if arguments.dry_run:
        from agent_train.config.dry_run import as_text, documented, what_runs

        with contextlib.suppress(BrokenPipeError):  # the reader of our output, `head` say, has left
            print(f"Would run:\n{as_text(what_runs(config))}\n\nSettings:\n{documented(config)}", flush=True)
        return 0
    gc.disable()  # collecting while a million objects are imported that all stay takes a second
    from agent_train.trainer.run import run

    gc.freeze()
    gc.enable()
    # Thousands of episodes live long: at the defaults a third of a turn's CPU time is the collector's (benchmarks/generator.py).
    gc.set_threshold(*COLLECT_AFTER)
    return run(config)


def _plan(words: Sequence[str]) -> int:
    """`agent-train plan`: print a table of what a run takes on many GPUs."""
    try:
        from agent_train.config.schema import ConfigError
        from agent_train.plan.formulas import Assumptions
        from agent_train.plan.table import scaling_table, sizes
    except ModuleNotFoundError as error:
        return _refuse([f"{error.name} is not installed: {pip_install('agentgym-toolkit[train]')}"])
    about = "Estimate memory, links and time of a run on GPUs, by the formulas of docs/scaling.md. Starts nothing."
    usage = "agent-train plan +env=NAME {--model SIZE | model.path=DIR} [--gpus N,...] [key=value ...]"
    parser = _TrainParser("agent-train plan", usage=usage, description=about)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run, as for `agent-train`")
    parser.add_argument("--model", choices=sizes(), help="a model of Qwen3 in place of model.path")
    parser.add_argument("--gpus", default="8", type=_counts, metavar="N,...", help="numbers of GPUs (default: 8)")
    for known in dataclasses.fields(Assumptions):
        doc = f"{known.metadata['doc']} (default: {known.default:g})"
        kind = partial(_positive, kind=type(known.default))
        parser.add_argument(
            f"--{known.name.replace('_', '-')}", default=known.default, type=kind, metavar="X", help=doc
        )
    arguments = vars(parser.parse_intermixed_args(words))
    size, gpus, settings = (arguments.pop(name) for name in ("model", "gpus", "settings"))
    try:
        print(scaling_table(size, gpus, settings, Assumptions(**arguments)))
    except ConfigError as error:
        return _refuse(error.problems)
    return 0


def _counts(text: str) -> list[int]:
    return [_positive(word, int) for word in text.split(",")]


def _positive(text: str, kind: Callable[[str], T]) -> T:
    with contextlib.suppress(ValueError):
        if 0 < (number := kind(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive {'whole ' if kind is int else ''}number")


@contextlib.contextmanager
def _ends_at_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process: torch's import takes seconds, and swallows a KeyboardInterrupt. `run` sets handlers of its own."""

    def end(number: int, _: object) -> NoReturn:
        os._exit(128 + number)  # nothing has been started that would have to be stopped

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"agent-train: error: {problem}", file=sys.stderr)
    return 2


def _choices() -> str:
    from agent_train.config.compose import GROUPS, choices, environment_names
    from agentgym.core.registration import registry

    told = {name: registry[name].description if name in registry else "" for name in environment_names()}
    lines = ["env (write +env=NAME)", *(f"  {name:<16}{text}".rstrip() for name, text in told.items())]
    for group in GROUPS[1:]:
        lines += [f"{group} (write {group}=NAME)", *(f"  {name}" for name in choices(group))]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
