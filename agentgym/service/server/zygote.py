"""The process that forks workers. It has imported the environments, so workers start fast and share memory.

The server sends orders over a SOCK_SEQPACKET socket, with descriptors for the new process. Answers are {"forked":
key, "pid": n} with a descriptor of the process, and {"died": pid, "status": n}. The supervisor ends the zygote and
all its children.
"""

import contextlib
import functools
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.processes.cgroups import Group
from agentgym.processes.child_process import adopt_orphans, children, die_with, end_children, kill
from agentgym.processes.subprocess_query import settle_memory
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds, Groups, enter, keep_within, limit_memory
from agentgym.service.server.sandbox_gc import Sweeps, may_be, sweep
from agentgym.service.server.slots import map_memory
from agentgym.service.server.task_catalogue import tell_tasks
from agentgym.service.worker.protocol_handler import HANDLERS, handler_class
from agentgym.service.worker.session_worker import ENDED, NOT_MADE, Served, described, work

RunChild = Callable[[dict[str, Any], list[int], Group | None], int]
_MESSAGE = 1 << 16
_SETUP = 1 << 20  # names every process that died with the zygote before
# After a death the kernel's list of children is looked at for so long: it may miss some while others die.
_LOOK_SECONDS = 1.0


def main(server_fd: int, memory_fd: int, parent: int) -> int:
    """Run the zygote; returns the exit code."""
    os.dup2(2, 1)  # what environments print is not the command's output
    server = socket.socket(fileno=server_fd)
    server.set_inheritable(False)
    setup = json.loads(server.recv(_SETUP))
    try:
        served = _prepared(setup, map_memory(memory_fd))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        server.send(json.dumps({"failed": described(error)}).encode())
        return 1
    bounds = Bounds(**setup["bounds"])
    groups = Groups(bounds)
    if groups.why_not:
        sys.stderr.write(
            f"agentgym serve: no control groups for sessions ({groups.why_not}): --session-memory counts each process"
            " alone and no shared memory, and --session-pids does not hold\n"
        )
    os.close(memory_fd)
    settle_memory()
    adopt_orphans()
    wakes = _hear_signals()
    die_with(parent, by=signal.SIGTERM)
    # Children that environments started on import are not workers.
    forked = Children(server, dict.fromkeys(children(), False), Sweeps(setup["died"]), groups)
    server.send(json.dumps({"ready": os.getpid()}).encode())
    try:
        with contextlib.suppress(ConnectionError):  # the server is gone
            _fork_for(forked, functools.partial(_child, served, bounds), wakes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
        groups.close()
        left = forked.sweeps.pids | {pid for pid, is_worker in forked.own.items() if is_worker}
        if left and may_be():
            sweep(left)
    return 0


def _prepared(setup: dict[str, Any], memory: memoryview) -> Served:
    """Import the served environments and load their train tasks."""
    sys.path[:] = setup["path"]
    specs = {id: EnvSpec.from_json(record) for id, record in setup["envs"].items()}
    tasks = {}
    for id, spec in specs.items():
        spec.load()
        try:
            tasks[id] = spec.tasks("train")
        except ValueError:  # it has no tasks: clients call init(task)
            continue
        except Exception as error:  # its data are not here
            sys.stderr.write(f"agentgym serve: {id}: no tasks to draw from: {described(error)}\n")
    handlers = {name: handler_class(name) for name in HANDLERS}
    return Served(specs, tasks, handlers, ServiceLimits(**setup["limits"]), memory)


@dataclass(frozen=True)
class Children:
    """The processes that the zygote forked."""

    server: socket.socket
    own: dict[int, bool]
    sweeps: Sweeps
    groups: Groups


def _hear_signals() -> tuple[int, int]:
    """A pipe that receives signal numbers. An exception from a handler could interrupt a fork."""
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for which in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(which, lambda *_: None)
    return wakes, wake


def _fork_for(forked: Children, run: RunChild, pipe: tuple[int, int]) -> None:
    """Fork what the server asks for and report deaths, until the server is gone or the supervisor sends SIGTERM."""
    server, own = forked.server, forked.own
    wakes = pipe[0]
    unneeded = [server.fileno(), *pipe]
    look_until = 0.0
    while True:
        pause = _LOOK_SECONDS / 5 if time.monotonic() < look_until else forked.sweeps.seconds()
        ready, _, _ = select.select([server.fileno(), wakes], [], [], pause)
        if wakes in ready and signal.SIGTERM in os.read(wakes, 4096):
            return
        if _tell_deaths(forked):
            look_until = time.monotonic() + _LOOK_SECONDS
        if time.monotonic() < look_until:
            kill(children() - own.keys())  # left by dead workers
            forked.groups.sweep()
        if pids := forked.sweeps.take():
            with contextlib.suppress(OSError):  # the machine allows no more processes
                own[_forked(functools.partial(sweep, pids), unneeded)] = False
        if server.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(server, _MESSAGE, 4)
        if not data:
            return
        _fork(forked, json.loads(data), fds, run, unneeded)


def _fork(forked: Children, asked: dict[str, Any], fds: list[int], run: RunChild, unneeded: list[int]) -> None:
    told = {"forked": asked["key"]}
    group = None
    try:
        group = forked.groups.new() if "waits" in asked else None
        with warnings.catch_warnings(action="ignore"):  # that a library has threads: they are not used in the child
            pid = _forked(functools.partial(run, asked, fds, group), unneeded)
        forked.own[pid] = True
        forked.groups.keep(pid, group)
        handle = os.pidfd_open(pid)
        socket.send_fds(forked.server, [json.dumps({**told, "pid": pid}).encode()], [handle])
        os.close(handle)
    except ConnectionError:
        raise  # the server is gone
    except OSError as error:
        forked.groups.drop(group)
        sys.stderr.write(f"agentgym serve: no process for one more session: {described(error)}\n")
        forked.server.send(json.dumps({**told, "why": described(error)}).encode())
    for fd in fds:
        os.close(fd)


def _tell_deaths(forked: Children) -> bool:
    """Collect ended children and kill what is left in their process groups; returns whether there were any."""
    any_ended = False
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return any_ended
        if ended is None:
            return any_ended
        any_ended = True
        pid = ended.si_pid
        is_worker = forked.own.get(pid)
        if is_worker is not None:
            # Until it is collected, no other process gets its id.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        forked.own.pop(pid, None)
        if is_worker:
            if os.waitstatus_to_exitcode(status) not in (ENDED, NOT_MADE):
                forked.sweeps.add(pid)
            ran_out = forked.groups.ended(pid)
            forked.server.send(json.dumps({"died": pid, "status": status, "oom": ran_out}).encode())


def _forked(run: Callable[[], int | None], unneeded: list[int]) -> int:
    """Fork a child that only calls `run`; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in both processes: either may be first
        return pid
    code = 1
    try:
        die_with(parent)
        adopt_orphans()  # so its descendants stay below the zygote
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for which in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(which, signal.SIG_DFL)
        for fd in unneeded:
            os.close(fd)
        random.seed()
        code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _child(served: Served, bounds: Bounds, asked: dict[str, Any], fds: list[int], group: Group | None) -> int:
    if group is not None:
        enter(group)
    keep_within(bounds)
    control = socket.socket(fileno=fds[0])
    control.set_inheritable(False)  # programs of the environment must not get it
    if "waits" not in asked:
        tell_tasks(control, served.specs, served.tasks)
        return ENDED
    return work(control, served, limit_process=functools.partial(limit_memory, bounds))
