"""The process that forks workers. It has imported the environments, so workers start fast and share memory.

The server's orders come over a SOCK_SEQPACKET socket, with descriptors for the new process. The answers are {"forked":
key, "pid": n} with a descriptor of the process, and {"died": key, "status": n, "oom": bool}.
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
from collections.abc import Callable, Collection
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.processes import cgroups
from agentgym.processes.cgroups import ControlGroup
from agentgym.processes.child_process import adopt_orphans, children, die_with, end_children, kill
from agentgym.processes.subprocess_query import settle_memory
from agentgym.service.protocol import sandbox_frames
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds, Groups, keep_within, limit_memory
from agentgym.service.server.slots import map_memory
from agentgym.service.server.task_catalogue import tell_tasks
from agentgym.service.worker.protocol_handler import HANDLERS, handler_class
from agentgym.service.worker.session_worker import ENDED, NOT_MADE, Served, described, work

_MESSAGE = 1 << 16
_SETUP = 1 << 20  # names every process that died with the zygote before
# After a death the kernel's list of children is looked at for so long: it may miss some while others die.
_LOOK_SECONDS = 1.0
SWEEP_SECONDS = 3.0  # for sandboxes to end by themselves, and to collect more dead workers
LONGEST_SWEEP_SECONDS = 60


def main(server_fd: int, memory_fd: int) -> int:
    supervisor = os.getppid()  # which outlives this process until all workers and environments have ended
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
    # A pipe receives signal numbers: an exception from a handler could interrupt a fork.
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for which in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(which, lambda *_: None)
    die_with(supervisor, by=signal.SIGTERM)
    zygote = Zygote(server, served, bounds, groups, (wakes, wake))
    zygote.sweep_soon(setup["died"])
    server.send(json.dumps({"ready": os.getpid()}).encode())
    try:
        with contextlib.suppress(ConnectionError):  # the server is gone
            zygote.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
        groups.close()
        if _has_sandboxes():
            _sweep()
    return 0


def _prepared(setup: dict[str, Any], memory: memoryview) -> Served:
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
    for name in HANDLERS:  # imported once for all; each import makes every fork dearer
        if name != sandbox_frames.NAME or sandbox_frames.SERVED in specs:
            handler_class(name)
    return Served(specs, tasks, ServiceLimits(**setup["limits"]), memory)


class Zygote:
    """Forks processes and reports their ends."""

    def __init__(
        self, server: socket.socket, served: Served, bounds: Bounds, groups: Groups, wakes: tuple[int, int]
    ) -> None:
        self._server = server
        self._served = served
        self._bounds = bounds
        self._groups = groups
        self._wakes = wakes[0]
        self._unneeded = [server.fileno(), *wakes]  # by forked processes
        # Of children by process id; None: it is no worker, as those that environments started on import.
        self.keys: dict[int, str | None] = dict.fromkeys(children())
        self.unswept: set[int] = set()  # dead workers that may have left sandboxes
        self._sweep_at = 0.0

    def serve(self) -> None:
        """Fork what the server asks for and report deaths, until the server is gone or the supervisor sends SIGTERM."""
        look_until = 0.0
        poll = select.poll()  # select() refuses descriptors from 1024 on, which a server among many files has
        poll.register(self._server, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        while True:
            pause = max(0.0, self._sweep_at - time.monotonic()) if self.unswept else None
            if time.monotonic() < look_until:
                pause = _LOOK_SECONDS / 5
            ready = dict(poll.poll(None if pause is None else pause * 1000))
            if self._wakes in ready and signal.SIGTERM in os.read(self._wakes, 4096):
                return
            if self._tell_deaths():
                look_until = time.monotonic() + _LOOK_SECONDS
            if time.monotonic() < look_until:
                kill(children() - self.keys.keys())  # left by dead workers
                self._groups.sweep()
            if self.unswept and time.monotonic() >= self._sweep_at:
                with contextlib.suppress(OSError):  # the machine allows no more processes
                    self.keys[self._forked(functools.partial(_sweep, self.unswept))] = None
                self.unswept = set()
            if self._server.fileno() not in ready:
                continue
            data, fds, _, _ = socket.recv_fds(self._server, _MESSAGE, 4)
            if not data:
                return
            self._fork(json.loads(data), fds)

    def sweep_soon(self, pids: Collection[int]) -> None:
        """Remove the sandboxes of these dead workers in a while: most end with their owner."""
        if _has_sandboxes():
            if not self.unswept:
                self._sweep_at = time.monotonic() + SWEEP_SECONDS
            self.unswept.update(pids)

    def _fork(self, asked: dict[str, Any], fds: list[int]) -> None:
        told = {"forked": asked["key"]}
        is_worker, group = "waits" in asked, None
        try:
            group = self._groups.new() if is_worker else None
            with warnings.catch_warnings(action="ignore"):  # that a library has threads: they are not used in the child
                pid = self._forked(functools.partial(self._child, is_worker, fds, group))
            self.keys[pid] = asked["key"]
            self._groups.of[pid] = group
            handle = os.pidfd_open(pid)
            socket.send_fds(self._server, [json.dumps({**told, "pid": pid}).encode()], [handle])
            os.close(handle)
        except ConnectionError:
            raise  # the server is gone
        except OSError as error:
            if group is not None:
                cgroups.remove(group, patience=0.0)
            sys.stderr.write(f"agentgym serve: no process for one more session: {described(error)}\n")
            self._server.send(json.dumps({**told, "why": described(error)}).encode())
        for fd in fds:
            os.close(fd)

    def _tell_deaths(self) -> bool:
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
            if pid in self.keys:
                # Until it is collected, no other process gets its id.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if (key := self.keys.pop(pid, None)) is not None:
                if os.waitstatus_to_exitcode(status) not in (ENDED, NOT_MADE):
                    self.sweep_soon([pid])
                ran_out = self._groups.ended(pid)
                self._server.send(json.dumps({"died": key, "status": status, "oom": ran_out}).encode())

    def _forked(self, run: Callable[[], int | None]) -> int:
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
            for fd in self._unneeded:
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

    def _child(self, is_worker: bool, fds: list[int], group: ControlGroup | None) -> int:
        for folder in group.folders if group is not None else ():
            (folder / "cgroup.procs").write_text("0")
        keep_within(self._bounds)
        control = socket.socket(fileno=fds[0])
        control.set_inheritable(False)  # programs of the environment must not get it
        if is_worker:
            return work(control, self._served, limit_process=functools.partial(limit_memory, self._bounds))
        tell_tasks(control, self._served.specs, self._served.tasks)
        return ENDED


def _has_sandboxes() -> bool:
    return "agentgym.sandbox.api" in sys.modules


def _sweep(pids: Collection[int] | None = None) -> None:
    """Remove the sandboxes of these ended processes, else of all on this host, within a time limit.

    A worker that ended well may have left one, which its pool was still closing.
    """
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends.select import remove_sandbox, sandboxes

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST_SWEEP_SECONDS)
    for found in sandboxes()[0]:
        if not found.alive and (pids is None or found.pid in pids):
            try:
                remove_sandbox(found)
            except SandboxError as error:
                sys.stderr.write(f"agentgym serve: sandbox {found.id} of a worker that died stays: {error}\n")
    signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
