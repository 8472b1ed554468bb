"""Child processes: start them with default signals, tie them to their parent, find and end everything that they started.

Children inherit ignored and blocked signals: `nohup`, a shell's `&` and service managers ignore SIGINT or SIGHUP, Ray's workers
block SIGINT. This file is also the program that the command lines below run, so it imports only the standard library.
"""

import contextlib
import ctypes
import functools
import glob
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

STOP_SECONDS = 2.0  # between SIGTERM and SIGKILL
GONE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def with_default_signals(command: Sequence[str]) -> list[str]:
    """The command line that runs a command with default handling of every signal."""
    return [sys.executable, "-I", "-S", __file__, "exec", *command]


def supervised(
    command: Sequence[str], stdin: bool = False, fds: Sequence[int] = (), stop: float = STOP_SECONDS
) -> list[str]:
    """The command line that runs a command until this process ends, with default handling of every signal.

    A supervisor process starts it in a new session. When the command or this process ends, or the supervisor gets SIGTERM,
    the command's process group gets SIGTERM. Once it has ended, or after `stop` seconds, all its descendants get SIGKILL. The
    supervisor ends as the command did, with the same exit code or signal. If it is killed itself, the kernel kills the command
    (Linux only). The command reads nothing, or with `stdin` what the supervisor is given. It alone has the descriptors `fds`.
    """
    how = "feed" if stdin else "supervise"
    return [sys.executable, "-I", "-S", __file__, how, str(os.getpid()), ",".join(map(str, fds)), str(stop), *command]


def end_supervised(supervisor: subprocess.Popen[bytes], stop: float = STOP_SECONDS) -> None:
    """End a supervisor and all that its command has started, and wait for it."""
    supervisor.terminate()
    try:
        supervisor.wait(stop + GONE_SECONDS + 1.0)
    except subprocess.TimeoutExpired:  # something of it is in the kernel's hands
        supervisor.kill()  # the kernel then kills the command
        supervisor.wait()


def restore_default_signals() -> None:
    """Unblock all signals and restore Python's handling of ignored ones. Call it first in a process's main thread."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *_IGNORED_BY_PYTHON}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _supervise(parent: int, fds: Sequence[int], stop: float, command: Sequence[str], stdin: int | None) -> int:
    adopt_orphans()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    tie = functools.partial(die_with, os.getpid())
    # This process has one thread, so code between fork and exec is safe.
    child = subprocess.Popen(command, stdin=stdin, pass_fds=fds, start_new_session=True, preexec_fn=tie)  # noqa: PLW1509
    for fd in fds:
        os.close(fd)
    while child.poll() is None and os.getppid() == parent and not stopped:
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
    end = time.monotonic() + stop
    while (child.poll() is None or _group_lives(child.pid)) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    child.kill()
    child.wait()
    end_children()
    return child.returncode


def _group_lives(group: int) -> bool:
    """True while a process lives in the group of a command that was waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """The kernel sends this process a signal when its parent, or the thread there that started it, ends or has just ended."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        _libc.prctl(option, value, 0, 0, 0)


def children() -> set[int]:
    """The children of this process, including those that ended and were not waited for."""
    found: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as listed:
                found.update(map(int, listed.readall().split()))
    except OSError:  # a kernel without these lists, or a thread that has just ended
        own = os.getpid()
        for name in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError), open(name) as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == own:
                    found.add(int(name.split("/")[2]))
    return found


def kill(pids: set[int]) -> None:
    """Kill children. Their ids cannot have been reused: this process has not waited for them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_children(seconds: float = GONE_SECONDS) -> bool:
    """Kill all children, and the orphans that this process adopts as they die. Returns whether all ended in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kill(children())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return True
        time.sleep(0.005)
    return False


def _main(how: str, *rest: str) -> None:
    command = rest if how == "exec" else rest[3:]
    restore_default_signals()
    try:
        if how == "exec":
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)
        fds = [int(fd) for fd in rest[1].split(",") if fd]
        code = _supervise(int(rest[0]), fds, float(rest[2]), command, None if how == "feed" else subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # the handling of SIGKILL cannot be set, nor need it be
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
