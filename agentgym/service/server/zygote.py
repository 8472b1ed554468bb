"""The process that workers are forked from: it has imported the served environments once, so a worker costs milliseconds and
shares their memory.

It is told by the front, over a socket that keeps messages apart, what to fork, and passes the descriptors on. It answers
{"forked": key, "pid": n} with a descriptor of the process, and {"died": pid, "status": n}. It is the child of a keeper
(`keeper.py`), which ends it, all workers and whatever they have started when the front or the zygote dies.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
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
from agentgym.core.tasks import TaskSet
from agentgym.processes.cgroups import Group
from agentgym.processes.child_process import adopt_orphans, children, die_with, end_children, kill
from agentgym.processes.gc_freeze import settle_memory
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds, keep_within, limit_memory
from agentgym.service.server.sandbox_gc import Sweeps, may_be, sweep
from agentgym.service.server.session_groups import Groups, enter
from agentgym.service.server.slots import map_memory
from agentgym.service.server.task_catalogue import tell_tasks
from agentgym.service.worker.handlers import WIRES, wire_class
from agentgym.service.worker.session_worker import ENDED, NOT_MADE, SessionStart, described, work

_MESSAGE = 1 << 16
_SETUP = 1 << 20  # names every process that died with the zygote before
# After a death the kernel's list of children is looked at for so long: it may miss some while others die.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Nursery:
    """What every worker shares.

    Attributes:
        specs: the served environments by the ids that they are served as.
        tasks: the sets that they draw from, where they have one.
        wires: the classes of the wires.
        limits: of the service.
        bounds: what every process is kept within.
        memory: of the slots.
        groups: that the workers go into.
    """

    specs: dict[str, EnvSpec]
    tasks: dict[str, TaskSet]
    wires: dict[str, Any]
    limits: ServiceLimits
    bounds: Bounds
    memory: memoryview
    groups: Groups


def main(front_fd: int, memory_fd: int, parent: int) -> int:
    """Run the zygote.

    Args:
        front_fd: descriptor of the front's socket.
        memory_fd: of the slots' memory.
        parent: the keeper's process id.

    Returns:
        The exit code.
    """
    os.dup2(2, 1)  # what environments print is not the command's output
    front = socket.socket(fileno=front_fd)
    front.set_inheritable(False)
    setup = json.loads(front.recv(_SETUP))
    try:
        nursery = _prepared(setup, map_memory(memory_fd))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        front.send(json.dumps({"failed": described(error)}).encode())
        return 1
    os.close(memory_fd)
    settle_memory()
    adopt_orphans()
    wakes = _hear_signals()
    die_with(parent, by=signal.SIGTERM)
    # What the environments have started as they were imported is none of a worker.
    brood = Children(front, dict.fromkeys(children(), False), Sweeps(setup["died"]), nursery.groups)
    try:
        with contextlib.suppress(ConnectionError):  # the front is gone
            _fork_for(brood, nursery, wakes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
        nursery.groups.close()
        left = brood.sweeps.pids | {pid for pid, is_worker in brood.own.items() if is_worker}
        if left and may_be():
            sweep(left)
    return 0


def _prepared(setup: dict[str, Any], memory: memoryview) -> Nursery:
    """Import what is served, and load the tasks that it draws from."""
    sys.path[:] = setup["path"]
    specs = {id: EnvSpec.from_json(record) for id, record in setup["envs"].items()}
    tasks = {}
    for id, spec in specs.items():
        spec.load()
        try:
            tasks[id] = spec.tasks("train")
        except ValueError:  # it has none of its own: init(task) is what works
            continue
        except Exception as error:  # its data are not here
            sys.stderr.write(f"agentgym serve: {id}: no tasks to draw from: {described(error)}\n")
    wires = {}
    for name, where in WIRES.items():
        if importlib.util.find_spec(where.partition(":")[0]) is not None:
            wires[name] = wire_class(name)
    bounds = Bounds(**setup["bounds"])
    groups = Groups(bounds)
    if groups.why_not:
        sys.stderr.write(
            f"agentgym serve: no control groups for sessions ({groups.why_not}): --session-memory counts each process"
            " alone and no shared memory, and --session-pids does not hold\n"
        )
    return Nursery(specs, tasks, wires, ServiceLimits(**setup["limits"]), bounds, memory, groups)


@dataclass(frozen=True)
class Children:
    """What the zygote has forked.

    Attributes:
        front: who asks for it.
        own: by process id, whether it is a worker; others below the zygote are what workers left.
        sweeps: for those that died.
        groups: that workers are in.
    """

    front: socket.socket
    own: dict[int, bool]
    sweeps: Sweeps
    groups: Groups


def _hear_signals() -> tuple[int, int]:
    """A pipe in which the numbers of signals come. An exception out of a handler might come in the middle of a fork."""
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for which in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(which, lambda *_: None)
    return wakes, wake


def _fork_for(brood: Children, nursery: Nursery, pipe: tuple[int, int]) -> None:
    """Fork what the front asks for, and tell it who died, until it is gone or the keeper wants an end."""
    front, own = brood.front, brood.own
    wakes = pipe[0]
    front.send(json.dumps({"ready": os.getpid()}).encode())
    unneeded = [front.fileno(), *pipe]
    look_until = 0.0
    while True:
        pause = _LOOK_SECONDS / 5 if time.monotonic() < look_until else brood.sweeps.seconds()
        ready, _, _ = select.select([front.fileno(), wakes], [], [], pause)
        if wakes in ready and signal.SIGTERM in os.read(wakes, 4096):
            return
        if _tell_deaths(brood):
            look_until = time.monotonic() + _LOOK_SECONDS
        if time.monotonic() < look_until:
            kill(children() - own.keys())  # what a dead worker has left
            brood.groups.sweep()
        if pids := brood.sweeps.take():
            with contextlib.suppress(OSError):  # no more processes are to be had
                own[_forked(functools.partial(sweep, pids), unneeded)] = False
        if front.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(front, _MESSAGE, 4)
        if not data:
            return
        _fork(brood, json.loads(data), fds, nursery, unneeded)


def _fork(brood: Children, asked: dict[str, Any], fds: list[int], nursery: Nursery, unneeded: list[int]) -> None:
    """Fork one process and tell the front of it."""
    told = {"forked": asked["key"]}
    group = None
    try:
        group = brood.groups.new() if "waits" in asked else None
        with warnings.catch_warnings(action="ignore"):  # that a library has threads: they are not used in the child
            pid = _forked(functools.partial(_child, asked, fds, nursery, group), unneeded)
        brood.own[pid] = True
        brood.groups.keep(pid, group)
        handle = os.pidfd_open(pid)
        socket.send_fds(brood.front, [json.dumps({**told, "pid": pid}).encode()], [handle])
        os.close(handle)
    except ConnectionError:
        raise  # the front is gone: nobody is to be told
    except OSError as error:
        brood.groups.drop(group)
        sys.stderr.write(f"agentgym serve: no process for one more session: {described(error)}\n")
        brood.front.send(json.dumps({**told, "why": described(error)}).encode())
    for fd in fds:
        os.close(fd)


def _tell_deaths(brood: Children) -> bool:
    """Collect the children that ended, with whatever they left in their groups; whether there were any."""
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
        is_worker = brood.own.get(pid)
        if is_worker is not None:
            # Before it is collected, its id is nobody else's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        brood.own.pop(pid, None)
        if is_worker:
            if os.waitstatus_to_exitcode(status) not in (ENDED, NOT_MADE):
                brood.sweeps.add(pid)
            ran_out = brood.groups.ended(pid)
            brood.front.send(json.dumps({"died": pid, "status": status, "oom": ran_out}).encode())


def _forked(run: Callable[[], int | None], unneeded: list[int]) -> int:
    """Fork a child that does `run` and nothing else; its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too: who comes first does not matter
        return pid
    code = 1
    try:
        die_with(parent)
        adopt_orphans()  # what it leaves behind is found below the zygote by that
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


def _child(asked: dict[str, Any], fds: list[int], nursery: Nursery, group: Group | None) -> int:
    if group is not None:
        enter(group)
    keep_within(nursery.bounds)
    control = socket.socket(fileno=fds[0])
    if "waits" not in asked:
        tell_tasks(control, nursery.specs, nursery.tasks)
        return ENDED
    data, clients, _, _ = socket.recv_fds(control, _MESSAGE, 1)
    if not data:  # it was not needed
        return 0
    start = SessionStart(**json.loads(data)["start"])
    spec, tasks = nursery.specs[start.env], nursery.tasks.get(start.env)
    client = socket.socket(fileno=clients[0])
    for sock in (
        control,
        client,
    ):  # which are received inheritable; what an environment starts has no business with them
        sock.set_inheritable(False)
    limit_memory(nursery.bounds)
    return work(start, spec, tasks, nursery.wires[start.wire], nursery.limits, nursery.memory, control, client)
