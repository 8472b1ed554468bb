"""Run a command that dies when the process that asked for it does, even by SIGKILL.

`python -m agent_train.engine.child PARENT_PID COMMAND...` asks the kernel (Linux) to end this process together with its
parent, then becomes the command. It is a process of its own because code between fork and exec is unsafe in a parent
with threads. The kernel ties it to the parent's *thread*: start it from one that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from agentgym.processes.signals import become

WORKER_MARK = "AGENT_TRAIN_ENGINE_WORKER"
"""Environment variable set for a server, by which its own children know to die with it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which must be its parent now, ends. Does nothing off Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def command_of(parent: int, command: list[str]) -> list[str]:
    """The command line that runs `command` tied to `parent`."""
    return [sys.executable, "-m", "agent_train.engine.child", str(parent), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    become(sys.argv[2:])
