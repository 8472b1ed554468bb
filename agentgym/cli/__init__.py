"""The command `agentgym`. No command imports anything heavy before it runs, so help, wrong lines and completion are quick.

The module of a command has `add_COMMAND(commands)`, which adds the command's parser and sets `run=function(args) -> exit code`;
`args.words` is the whole command line.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from agentgym import __version__
from agentgym.cli.shared import json_alone
from agentgym.core.usage_error import UsageError, instead, nearest

# By use, as `agentgym --help` shows them: each command and its module of `agentgym.cli`.
COMMANDS = {
    "evaluate": {"eval": "evaluate", "compare": "runs", "rescore": "runs", "play": "play"},
    "look": {"view": "runs", "list": "environments"},
    "serve": {"serve": "serve", "gateway": "gateway"},
    "write environments": dict.fromkeys(("init", "check", "validate", "export"), "environments"),
    "this machine": {"doctor": "machine", "sandbox": "machine", "data": "machine", "completion": "completion"},
}
_WIDTH = 12  # of the column of commands
# Other toolkits' names of our options that no rule of spelling would find.
_ELSEWHERE = {
    **dict.fromkeys(("--episodes", "--limit", "--samples"), "-n"),
    **dict.fromkeys(("--epochs", "--repeats", "--rollouts", "--rollouts-per-example"), "-k"),
    **dict.fromkeys(("--env-args", "--env-kwargs"), "--kwargs"),
}
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
_EXIT_CODES = """exit codes:
  0    done
  1    incomplete: a check failed, episodes failed or could not be played, an image was not built
  2    usage error, printed in one line: an unknown name, wrong arguments, a missing package
  3    stopped by a limit that you set (tokens, cost, time); with the same folder (--out), the command resumes
  130  interrupted; with the same folder (--out), the command resumes

Every command has --help, and --json for programs. Nothing is uploaded."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and suggest the nearest name. Options are not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but the command whose options were meant refuses unknown ones."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # before anything else: a misspelt option is often also a missing one
            options = itertools.takewhile(lambda word: word != "--", words)
            self._refuse([word for word in options if self._unknown(word)])
        found, rest = super().parse_known_args(words, namespace)
        self._refuse(rest)
        return found, rest

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown(self, word: str) -> bool:
        option = word.partition("=")[0]
        return word.startswith("--") and " " not in word and option not in self._option_string_actions

    def _refuse(self, rest: list[str]) -> None:
        if rest and rest[0].startswith("-"):
            option = rest[0].partition("=")[0]
            ours = _ELSEWHERE.get(option)
            meant = f": did you mean {ours}?" if ours in self._option_string_actions else ""
            self.error(f"no option {option}{meant or nearest(option, self._option_string_actions)}")
        if rest:
            self.error(f"one argument too many: {rest[0]!r}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _NUMBERS:
                raise
            raise argparse.ArgumentError(action, f"{_NUMBERS[action.type]}, not {arg_string!r}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        there_are = f"{value!r}{instead(value, action.choices)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"no command {there_are}")
        raise argparse.ArgumentError(action, f"no {there_are}")


def command_line(words: Sequence[str] = ()) -> Parser:
    """The parser of the whole command line. If `words` begin with a command, only that one is imported."""
    whole = Parser(
        prog="agentgym",
        description="Text environments for language-model agents.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="agentgym [--help] [--version] COMMAND ...",
    )
    whole.add_argument("--version", action="version", version=f"agentgym {__version__}")
    # Suppressed in argparse's own part of the help: the groups below have them.
    commands = whole.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser, help=argparse.SUPPRESS, prog="agentgym"
    )
    groups = []
    known = [name for names in COMMANDS.values() for name in names]
    wanted = words[:1] if words and words[0] in known else known
    for use, names in COMMANDS.items():
        before = len(commands._choices_actions)
        for name, module in names.items():
            if name in wanted:
                getattr(importlib.import_module(f"agentgym.cli.{module}"), f"add_{name}")(commands)
        lines = [f"  {action.dest:<{_WIDTH}}{action.help}" for action in commands._choices_actions[before:]]
        groups.append("\n".join([f"{use}:", *lines]))
    whole.epilog = "\n\n".join([*groups, _EXIT_CODES])
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from agentgym.cli.completion import answer_shell

        answer_shell(command_line())
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        print(command_line().format_help(), file=sys.stderr, end="")
        return 2
    if words[0] == "help":
        words = [*words[1:], "--help"]
    try:
        args = command_line(words).parse_args(words)
        args.words = words
        with json_alone() if getattr(args, "json", False) else contextlib.nullcontext():
            code: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that has left can be met
        return code
    except KeyboardInterrupt:
        print("agentgym: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except UsageError as mistake:
        print(f"agentgym {args.command}: {mistake}", file=sys.stderr)
        return 2
    except Exception as error:
        from agentgym.service.client.address import RemoteError, Unavailable  # here: they cost every command's start

        if not isinstance(error, RemoteError):
            raise
        print(f"agentgym {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unavailable) else 1
