"""The process between the front and the zygote. It outlives both, however they die, for as long as it takes to end whatever
workers and their environments have started; then it ends too. It imports nothing but this.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType

from agentgym.service.orphans import adopt_orphans, die_with, end_children


def main(argv: list[str]) -> int:
    """Keep a zygote.

    Args:
        argv: descriptors of the front's socket and of the slots' memory, which are the zygote's, and the front's process id.

    Returns:
        The zygote's exit code.
    """
    front_fd, memory_fd, front = map(int, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's
    adopt_orphans()
    watched = os.pidfd_open(front)
    if os.getppid() != front:
        return 1
    keeper = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        os.close(watched)
        return _be_zygote(front_fd, memory_fd, keeper)
    os.close(front_fd)
    os.close(memory_fd)
    signal.signal(signal.SIGTERM, _leave)
    code = 1
    try:
        code = _wait(watched, zygote)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
    return code


def _be_zygote(front_fd: int, memory_fd: int, keeper: int) -> int:
    die_with(keeper)
    from agentgym.service import zygote

    return zygote.main(front_fd, memory_fd, keeper)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _wait(front: int, zygote: int) -> int:
    """Wait until the front or the zygote ends. Orphans that come meanwhile are none of a living worker."""
    child = os.pidfd_open(zygote)
    poll = select.poll()
    for handle in (front, child):
        poll.register(handle, select.POLLIN)
    ended = {handle for handle, _ in poll.poll()}
    if child not in ended:
        return 1
    return os.waitstatus_to_exitcode(os.waitpid(zygote, 0)[1]) & 0x7F


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
