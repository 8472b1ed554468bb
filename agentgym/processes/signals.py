"""Default signal handling for the processes that the project starts.

A process inherits ignored and blocked signals: `nohup`, a shell's `&` and many service managers ignore SIGINT or SIGHUP, and Ray
blocks SIGINT in its workers. What such a process starts could then be neither interrupted nor stopped as documented.

Run as a program, this file becomes the command that it is given: `command_of`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def restore_default_signals() -> None:
    """Unblock every signal, and give those that are ignored Python's default handling. For a main thread, before its work."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *_IGNORED_BY_PYTHON}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def command_of(command: Sequence[str]) -> list[str]:
    """The command line that runs a command with default handling of every signal. Costs the start of an interpreter, 10 ms."""
    return [sys.executable, "-I", "-S", __file__, *command]


def become(command: Sequence[str]) -> None:
    """Replace this process by a command that ignores and blocks no signal. The program is looked up in PATH.

    Raises:
        OSError: it cannot be run.
    """
    restore_default_signals()
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    try:
        become(sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")
