"""`agent-train`: settings in, a trained policy out. Everything that can be refused is refused before anything starts."""

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from agentgym import __version__

USAGE = "agent-train {+env=NAME | mode=sft|dpo|rm data.train=FILE} [key=value ...] [--dry-run] [--list]"
HELP = """\
Train a language-model agent in an environment by reinforcement learning, or a model on files.

  agent-train +env=frozen_lake                             a tiny policy, built by code, on this machine
  agent-train +env=frozen_lake engine=embedded             without vLLM
  agent-train +env=gsm8k model.path=DIR trainer.steps=3    a Hugging Face folder
  agent-train +env=my_pkg.envs:MyEnv env.kwargs.size=8     any environment that can be imported
  agent-train +env=gsm8k --dry-run                         what would run, and every setting
  agent-train mode=sft data.train=FILE model.path=DIR      imitation; mode=dpo: preferences, mode=rm: a reward model
  agent-train trainer.resume=runs/NAME                     go on with a run that was stopped

A setting is a dotted key: trainer.steps=3, learner.lr=1e-4, trainer.seed=1. --dry-run prints them all.
Exit code: 0 done, 1 failed while running, 2 refused before anything started.
"""


class _TrainParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"agent-train: error: {message}\nusage: {USAGE}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, 2 if the settings are refused."""
    parser = _TrainParser(
        "agent-train", usage=USAGE, description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = "+env=NAME, a choice such as engine=embedded, or a dotted key"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=told)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and all settings; start nothing")
    parser.add_argument("--list", action="store_true", help="print environments and other choices; start nothing")
    parser.add_argument("--version", action="version", version=f"agentgym {__version__}")
    arguments = parser.parse_intermixed_args(argv)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for environments and functions of the user's own files, as `python -m` would find them
    with _ends_at_once():
        return _refuse_or_run(arguments)


def _refuse_or_run(arguments: argparse.Namespace) -> int:
    try:
        from agent_train.config.combinations import unusual
        from agent_train.config.compose import compose
        from agent_train.config.schema import ConfigError
        from agent_train.config.validation import validate
    except ModuleNotFoundError as error:
        return _refuse([f"{error.name} is not installed: pip install 'agentgym-toolkit[train]'"])
    try:
        if arguments.list:
            print(_choices())
            return 0
        config = compose(arguments.settings)
        validate(config)
    except ConfigError as error:
        return _refuse(error.problems)
    for line in unusual(config):
        print(f"agent-train: warning: {line}", file=sys.stderr)
    if arguments.dry_run:
        from agent_train.config.plan import as_text, documented, plan

        with contextlib.suppress(BrokenPipeError):  # the reader of our output, `head` say, has left
            print(f"Would run:\n{as_text(plan(config))}\n\nSettings:\n{documented(config)}", flush=True)
        return 0
    gc.disable()  # collecting while a million objects are imported that all stay takes a second
    from agent_train.trainer.run import run

    gc.freeze()
    gc.enable()
    return run(config)


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
