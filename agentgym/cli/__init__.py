"""The command `agentgym`. No command imports anything heavy before it runs, so help, wrong lines and completion are quick."""

import contextlib
import os
import sys
from collections.abc import Sequence

from agentgym.cli.parser import command_line
from agentgym.cli.shared import json_alone
from agentgym.core.usage_error import UsageError


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
