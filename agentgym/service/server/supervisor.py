"""The process between server and zygote. It outlives both until all workers and environments have ended."""

import gc
import os
import select
import signal
import sys

from agentgym.processes.child_process import adopt_orphans, die_with, end_children, restore_default_signals

LEAVE_SECONDS = 20.0  # for the zygote to end all that it has forked, and remove the sandboxes of those


def main(argv: list[str]) -> int:
    """Run a zygote and clean up after it. `argv`: descriptors of socket and slots' memory, the server's pid."""
    server_fd, memory_fd, server = map(int, argv)
    restore_default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    adopt_orphans()
    watched = os.pidfd_open(server)
    if os.getppid() != server:
        return 1
    supervisor = os.getpid()
    gc.freeze()  # the zygote's collector writes to nothing that is here now, and so shares it
    zygote = os.fork()
    if zygote == 0:
        os.close(watched)
        die_with(supervisor)
        from agentgym.service.server.zygote import main as run_zygote

        return run_zygote(server_fd, memory_fd, supervisor)
    os.close(server_fd)
    os.close(memory_fd)
    try:
        return _wait(watched, zygote)
    finally:
        end_children()


def _wait(server: int, zygote: int) -> int:
    """Wait until the zygote ends; returns its exit code, or 1 if it takes too long once it should end."""
    child = os.pidfd_open(zygote)
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(tell)
    poll = select.poll()
    for handle in (server, told, child):
        poll.register(handle, select.POLLIN)
    if child not in {handle for handle, _ in poll.poll()}:
        os.kill(zygote, signal.SIGTERM)
    for handle in (server, told):
        poll.unregister(handle)
    if not poll.poll(1000 * LEAVE_SECONDS):
        return 1
    return os.waitstatus_to_exitcode(os.waitpid(zygote, 0)[1]) & 0x7F


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
