"""Run a command, and all that it starts, for as long as the process that asked for it lives.

`python -m agentgym.processes.tied PARENT COMMAND...` runs the command in a session of its own and ends that session when its
standard input is closed, which the kernel does however the parent ends, or when the parent is gone. SIGTERM, a few seconds, then
SIGKILL. It ends with the command's exit code. Should it be killed itself, the kernel (Linux) kills the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

from agentgym.processes.signals import restore_default_signals

GRACE = 5.0
_PR_SET_PDEATHSIG = 1


def command_of(command: list[str]) -> list[str]:
    """The command line that runs a command tied to this process. Its standard input must be a pipe that only we hold."""
    return [sys.executable, "-m", "agentgym.processes.tied", str(os.getpid()), *command]


def run(parent: int, command: list[str]) -> int:
    """Run the command; returns its exit code, negative for a signal, as `subprocess` does."""
    restore_default_signals()
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def die_with_us() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # This process has one thread, so that code between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_us)  # noqa: PLW1509
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _end(child))
    while child.poll() is None and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 0.2)
        if readable and not os.read(0, 1024):
            break
    _end(child)
    return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and everything of its session, also what it left behind."""
    _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    code = run(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
