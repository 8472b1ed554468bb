"""The command `agentgym`: its commands are the modules of `agentgym.cli` that `COMMANDS` names.

A command module has `add(commands)`, which adds its parser and sets `run=function(args) -> exit code`; `args.words` is the whole
command line. Nothing heavy is imported before a command runs, so that `--help`, wrong command lines and shell completion are
quick.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from agentgym.cli.output import json_alone
from agentgym.core.usage_error import UsageError, instead, nearest

# By use, as `agentgym --help` shows them; each name is a module of `agentgym.cli`.
COMMANDS = {
    "evaluate": ["eval", "compare", "rescore", "play"],
    "look": ["view", "list"],
    "serve": ["serve"],
    "write environments": ["init", "check", "validate", "export"],
    "this machine": ["doctor", "sandbox", "data", "completion"],
}
_WIDTH = 12  # of the column of commands
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
EXIT_CODES = """exit codes:
  0    done
  1    not all was done: a check failed, episodes failed or could not be played, an image was not built
  2    a usage error, printed in one line: an unknown name, wrong arguments, a package that is not installed
  3    stopped by a limit that you set (tokens, cost, time); started again, it goes on
  130  interrupted; started again, it goes on

Every command has --help, and --json for programs. Nothing is ever uploaded anywhere."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and suggest the nearest name. Options are not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._has_commands = False

    def add_subparsers(self, **kwargs: Any) -> Any:
        self._has_commands = True
        return super().add_subparsers(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but the command whose options were meant refuses unknown ones."""
        words = sys.argv[1:] if args is None else [*args]  # `list` is the command's module here once that is imported
        if not self._has_commands:  # before anything else: a misspelt option is often also a missing one
            self._refuse([word for word in words[: _end_of_options(words)] if self._unknown(word)])
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
            self.error(f"no option {option}{nearest(option, self._option_string_actions)}")
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


def _end_of_options(words: Sequence[str]) -> int:
    return words.index("--") if "--" in words else len(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from agentgym.cli.completion import answer_shell

        answer_shell(parser())
    words = sys.argv[1:] if argv is None else [*argv]
    if not words:
        print(parser().format_help(), file=sys.stderr, end="")
        return 2
    if words[0] == "help":
        words = [*words[1:], "--help"]
    try:
        args = parser(words).parse_args(words)
        args.words = words
        code: int = _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that has left can be met
        return code
    except KeyboardInterrupt:
        print("agentgym: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _run(args: argparse.Namespace) -> int:
    try:
        with json_alone() if getattr(args, "json", False) else contextlib.nullcontext():
            return args.run(args)
    except UsageError as mistake:
        print(f"agentgym {args.command}: {mistake}", file=sys.stderr)
        return 2
    except Exception as error:
        from agentgym.service.client.address import RemoteError, Unavailable  # here: they cost every command's start

        if not isinstance(error, RemoteError):
            raise
        print(f"agentgym {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unavailable) else 1


def parser(words: Sequence[str] = ()) -> Parser:
    """The parser of the whole command line; where `words` begin with a command, of that one, and the others cost nothing."""
    from agentgym import __version__

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
    wanted = words[0] if words and any(words[0] in modules for modules in COMMANDS.values()) else None
    for use, modules in COMMANDS.items():
        before = len(commands._choices_actions)
        for module in modules if wanted is None else [wanted] if wanted in modules else []:
            importlib.import_module(f"agentgym.cli.{module}").add(commands)
        lines = [f"  {action.dest:<{_WIDTH}}{action.help}" for action in commands._choices_actions[before:]]
        groups.append("\n".join([f"{use}:", *lines]))
    whole.epilog = "\n\n".join([*groups, EXIT_CODES])
    return whole
