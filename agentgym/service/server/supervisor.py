"""The process between the front and the zygote. It outlives both, however they die, for as long as it takes to end whatever
workers and their environments have started; then it ends too. It imports little.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys

from agentgym.processes.child_process import adopt_orphans, die_with, end_children, restore_default_signals

LEAVE_SECONDS = 20.0  # for the zygote to end all that it has forked, and remove the sandboxes of those


def main(argv: list[str]) -> int:
    """Keep a zygote.

    Args:
        argv: descriptors of the front's socket and of the slots' memory, which are the zygote's, and the front's process id.

    Returns:
        The zygote's exit code.
    """
    front_fd, memory_fd, front = map(int, argv)
    restore_default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's
    adopt_orphans()
    watched = os.pidfd_open(front)
    if os.getppid() != front:
        return 1
    keeper = os.getpid()
    gc.freeze()  # the zygote's collector writes to nothing that is here now, and so shares it
    zygote = os.fork()
    if zygote == 0:
        os.close(watched)
        return _be_zygote(front_fd, memory_fd, keeper)
    os.close(front_fd)
    os.close(memory_fd)
    try:
        return _wait(watched, zygote)
    finally:
        end_children()


def _be_zygote(front_fd: int, memory_fd: int, keeper: int) -> int:
    die_with(keeper)
    from agentgym.service.server import zygote

    return zygote.main(front_fd, memory_fd, keeper)


def _wait(front: int, zygote: int) -> int:
    """Wait until the zygote ends; it has little time for that once the front is gone, or wants it to end.

    Returns:
        The exit code.
    """
    child = os.pidfd_open(zygote)
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(tell)
    poll = select.poll()
    for handle in (front, told, child):
        poll.register(handle, select.POLLIN)
    if child not in {handle for handle, _ in poll.poll()}:
        os.kill(zygote, signal.SIGTERM)
    for handle in (front, told):
        poll.unregister(handle)
    if not poll.poll(1000 * LEAVE_SECONDS):
        return 1
    return os.waitstatus_to_exitcode(os.waitpid(zygote, 0)[1]) & 0x7F


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
