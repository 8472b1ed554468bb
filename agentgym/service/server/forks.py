"""The server's handle on the zygote: starts it, asks it for processes, starts it again when it dies."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.processes.child_process import end_supervised, supervised
from agentgym.service.server.settings import ServeSettings

START_SECONDS = 120.0
LEAVE_SECONDS = 20.0  # for the zygote to end all that it has forked, and remove the sandboxes of those
_MESSAGE = 1 << 16
# Libraries of numbers start threads for every CPU in every process otherwise.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ZygoteFailed(RuntimeError):
    """The environments could not be imported in time."""


@dataclass
class Fork:
    """A process that was asked for. Once it is forked, `handle` is its descriptor, unless no file is left to open."""

    pid: int | None = None
    handle: int | None = None
    doomed: bool = False

    def kill(self) -> None:
        self.doomed = True
        if self.handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)


Died = Callable[[str, int | None, bool], None]  # told the key, the wait status if it is known, and if memory ran out


class Forks:
    """Processes forked by a zygote."""

    def __init__(self, settings: ServeSettings, served: Mapping[str, EnvSpec], memory: int, died: Died):
        self._setup: dict[str, Any] = {
            "envs": {id: spec.to_json() for id, spec in served.items()},
            "limits": vars(settings.limits),
            "bounds": vars(settings.bounds.times(settings.sessions_per_worker)),
            "path": sys.path,
            "died": [],
        }
        self._memory = memory
        self._died = died
        self.process: subprocess.Popen[bytes] | None = None
        self.packets: Packets | None = None
        self._ready: asyncio.Future[None] | None = None
        self.forks: dict[str, Fork] = {}
        self._numbers = itertools.count()
        self._restarting: asyncio.Task[None] | None = None
        self._most_spares = settings.workers
        self.spares: OrderedDict[str, socket.socket] = OrderedDict()  # control sockets of those that wait for a session
        self.closing = False

    @property
    def ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self.packets is not None

    async def start(self) -> None:
        """Start the zygote and wait until it has imported everything. Raises `ZygoteFailed`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**dict.fromkeys(_THREADS, "1"), **os.environ}
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            fds = (theirs.fileno(), self._memory)
            words = [sys.executable, "-m", "agentgym.service.server.zygote", *map(str, fds)]
            self.process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own needs a child watcher
                supervised(words, fds=fds, stop=LEAVE_SECONDS),
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
                env=environ,
            )
        self._ready = asyncio.get_running_loop().create_future()
        self.packets = Packets(ours, self._heard, self._lost)
        self.packets.send(self._setup)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ready
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise ZygoteFailed(f"importing the environments took longer than {START_SECONDS:g} s") from None
            raise

    def fork(self, kind: str, message: dict[str, Any], fds: Sequence[int]) -> str:
        """Ask for a process, and return its key. It gets the descriptors, which are closed here."""
        key = f"{kind} {next(self._numbers)}"
        self.forks[key] = Fork()
        if self.packets is None:
            for fd in fds:
                os.close(fd)
            asyncio.get_running_loop().call_soon(self._end, key, None)
        else:
            self.packets.send({**message, "key": key}, fds)
        return key

    def fill(self) -> None:
        """Fork missing spare workers. Not called when one died: if all die at once, that would never end."""
        while len(self.spares) < self._most_spares and self.ready:
            try:
                key, control = self.fresh_worker()
            except OSError:  # this process may open no more files; it is tried again
                return
            self.spares[key] = control

    def fresh_worker(self) -> tuple[str, socket.socket]:
        """A newly forked worker: its key, and its control socket. Raises OSError if no files are left."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        return self.fork("spare", {"waits": True}, [theirs.detach()]), control

    def worker(self) -> tuple[str, socket.socket]:
        """The spare worker that has waited longest, or a fresh one."""
        return self.spares.popitem(last=False) if self.spares else self.fresh_worker()

    def pids(self) -> tuple[int | None, dict[str, int]]:
        """The process ids of the supervisor, whose child is the zygote, and of all forks by their keys."""
        forks = {key: fork.pid for key, fork in self.forks.items() if fork.pid is not None}
        return None if self.process is None else self.process.pid, forks

    def pid_of(self, key: str) -> int | None:
        """The process id of a fork, also during `died`; None: it was never forked."""
        return self.forks[key].pid if key in self.forks else None

    def kill(self, key: str) -> None:
        if key in self.forks:
            self.forks[key].kill()

    async def close(self) -> None:
        """End the zygote and all that it forked."""
        self.closing = True
        if self._restarting is not None:
            self._restarting.cancel()
        await self._stop()
        for key in list(self.forks):
            self._end(key, None)

    async def _stop(self) -> None:
        if self.packets is not None:
            self.packets.close()
            self.packets = None
        if self.process is not None:
            await asyncio.to_thread(end_supervised, self.process, LEAVE_SECONDS)

    def _heard(self, said: dict[str, Any], fds: list[int]) -> None:
        if "ready" in said and self._ready is not None:
            self._ready.set_result(None)
        elif "failed" in said and self._ready is not None:
            self._ready.set_exception(ZygoteFailed(said["failed"]))
        elif "died" in said:
            self._end(said["died"], said["status"], said["oom"])
        elif "pid" not in said:
            self._end(said["forked"], None)
        else:
            fork = self.forks[said["forked"]]
            fork.pid = said["pid"]
            if not fds:  # this process may open no more files, and could not end that one
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork.pid, signal.SIGKILL)
                return
            fork.handle = fds[0]
            if fork.doomed:
                fork.kill()

    def _end(self, key: str, status: int | None, out_of_memory: bool = False) -> None:
        if (fork := self.forks.get(key)) is None:
            return
        handle, fork.handle = fork.handle, None
        if handle is not None:
            os.close(handle)
        if (control := self.spares.pop(key, None)) is not None:
            control.close()
        self._died(key, status, out_of_memory)
        del self.forks[key]

    def _lost(self) -> None:
        self.packets = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(ZygoteFailed("the process that imports the environments died"))
            return
        self._setup["died"] = list(self.pids()[1].values())  # the next zygote removes their sandboxes
        for key in list(self.forks):
            self._end(key, None)
        if not self.closing:
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        pause = 0.1
        while not self.closing:
            if self.process is not None:
                await asyncio.to_thread(self.process.wait)
            try:
                await self.start()
                return
            except (ZygoteFailed, OSError):
                await asyncio.sleep(pause)
                pause = min(10.0, 2 * pause)


class Packets:
    """JSON messages with file descriptors over a SOCK_SEQPACKET socket, in an event loop and without blocking."""

    def __init__(
        self, sock: socket.socket, heard: Callable[[dict[str, Any], list[int]], None], ended: Callable[[], object]
    ):
        sock.setblocking(False)
        self._socket = sock
        self._heard = heard
        self._ended = ended
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock, self._read)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, now or as soon as there is room. The descriptors are closed here once it is sent."""
        self._waiting.append((json.dumps(message).encode(), list(fds)))
        self._write()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._write()

    def _write(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                if self._open:
                    socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError:  # the other side is gone; its end is read next
                pass
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        if self._open:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        # A bounded number, so that a storm of deaths does not hold the loop.
        for _ in range(64):
            try:
                data, fds, _flags, _address = socket.recv_fds(self._socket, _MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                self._ended()
                return
            self._heard(json.loads(data), fds)
            if not self._open:
                return
