"""The worker process: it holds the environments of one or more sessions and speaks on the clients' own sockets.

A session's thread receives a message, lets the protocol handler answer it, and sends the answer. Another thread takes
the server's orders. The worker enforces no time limit: it writes its state into its slot, and the server kills it.
"""

import _thread
import atexit
import contextlib
import json
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import TaskSet
from agentgym.service.protocol.frames import CODES, DRAINING, ENV_ERROR, NORMAL_CLOSE, Refused, ServiceLimits
from agentgym.service.server import slots
from agentgym.service.server.events import EnvErrors
from agentgym.service.server.slots import Slot
from agentgym.service.worker.protocol_handler import CallRunner, ProtocolHandler, SessionInfo, described, handler_class
from agentgym.service.worker.websocket import Connection, close_frame

# Exit codes, by which the server knows how a session ended.
ENDED, NOT_MADE = 80, 81  # no program exits with these
NOT_SHARED = 82  # of a session alone: it has not begun, and needs a process to itself
_LARGEST_ORDER = 1 << 16


@dataclass(frozen=True)
class SessionStart:
    session: str
    env: str
    protocol: str
    resume: str
    slot: int
    token: str
    draining: bool  # the server has begun to, since the session was reserved


@dataclass(frozen=True)
class Served:
    """The environments of a server, as its worker processes share them."""

    specs: dict[str, EnvSpec]
    tasks: dict[str, TaskSet]
    limits: ServiceLimits
    memory: memoryview


class WorkerSession:
    """One session in its worker. Its thread calls `run`; the server's orders come to `hear`, from another thread."""

    def __init__(self, start: SessionStart, served: Served):
        self._start = start
        self._served = served
        self._slot = Slot(served.memory, start.slot)
        self._handler_class = handler_class(start.protocol)
        self._handler: ProtocolHandler | None = None
        self._attached: queue.SimpleQueue[tuple[Connection, str] | None] = queue.SimpleQueue()  # None: it is to end
        self._connection: Connection | None = None
        self._ending: tuple[str, str] | None = None
        self._draining = start.draining

    def hear(self, said: dict[str, Any], client: socket.socket | None) -> None:
        """Follow one order. Never waits."""
        if said["do"] == "attach" and client is not None:
            self._offer(client, said["resume"])
        elif said["do"] == "pings" and self._connection is not None:
            self._connection.answer_pings()
        elif said["do"] == "drain":
            self._draining = True
            if self._handler is not None:
                self._handler.draining = True
                if self._handler.clean:
                    self._end(DRAINING, "the server is ending", False)
        elif said["do"] == "end":
            self._end(said["code"], said["message"], said["deaf"])

    def _offer(self, client: socket.socket, resume: str) -> None:
        """Serve this connection, with this resume token in its hello, instead of the one before."""
        if self._connection is not None:
            self._connection.shut(socket.SHUT_RDWR)
        self._connection = Connection(client, self._slot, self._served.limits.message_bytes)
        self._attached.put((self._connection, resume))

    def _end(self, code: str, message: str, deaf: bool) -> None:
        self._ending = (code, message)
        if self._connection is not None:
            # A client that takes nothing would not take the last word either.
            self._connection.shut(socket.SHUT_RDWR if deaf else socket.SHUT_RD)
        self._attached.put(None)

    def run(self, client: socket.socket, shared: bool = False) -> int:
        """Serve the session to its end; returns the exit code of a process that does nothing else."""
        start, slot, id = self._start, self._slot, self._start.env
        spec = self._served.specs[id]
        asked = slot.words[slots.SINCE]
        slot.enter(slots.INIT)
        self._offer(client, start.resume)
        calls = CallRunner(slot, EnvErrors(id, start.session, start.token).log)
        try:
            env = calls.call("init", self._handler_class.make, spec, self._served.tasks.get(id))
        except (Exception, SystemExit) as error:
            if (attached := self._attached.get()) is not None:
                code = error.code if isinstance(error, Refused) else ENV_ERROR
                self._say_last(attached[0], code, f"making the environment failed: {described(error)}")
            calls.stop()
            return NOT_MADE
        try:
            if shared and self._handler_class.has_sandbox(env):
                # A back end ties its processes to a thread, and counts their resources for the whole process.
                if (attached := self._attached.get()) is not None:
                    attached[0].close()
                return NOT_SHARED
            handler = self._handler_class(env, calls, SessionInfo(start.session, id, spec, self._served.limits))
            slot.count_time("open", time.monotonic_ns() - asked)
            self._handler = handler
            handler.draining = self._draining
            while (attached := self._attached.get()) is not None and self._serve(*attached, handler):
                slot.enter(slots.DETACHED)
            return ENDED
        finally:
            with contextlib.suppress(Exception, SystemExit):  # it is in the log, and the client is gone
                calls.call("close", env.close)
            slot.enter(slots.CLOSE)  # which lasts until this thread or process has ended
            calls.stop()

    def _serve(self, connection: Connection, resume: str, handler: ProtocolHandler) -> bool:
        """Serve one connection until it is over; returns whether the client may come back."""
        words = self._slot.words
        words[slots.REQUESTS_THEN] = words[slots.REQUESTS]
        words[slots.CONNECTION] += 1
        try:
            if (hello := handler.hello(resume if handler.resumable else None)) is not None:
                connection.send(hello)
            while (text := connection.receive()) is not None and self._ending is None:
                words[slots.REQUESTS] += 1
                if (answer := handler.answer(text)) is not None:
                    connection.send(answer)
                if handler.ended:
                    connection.end(close_frame(NORMAL_CLOSE))
                    return False
            last = self._ending
        except Refused as refused:
            last = refused.code, str(refused)
        if last is not None:
            self._say_last(connection, *last)
            return False
        connection.close()
        return handler.resumable and not connection.closed

    def _say_last(self, connection: Connection, code: str, message: str) -> None:
        self._slot.words[slots.WHY] = 1 + list(CODES).index(code)
        if code != ENV_ERROR:  # which was counted as it was raised
            self._slot.count_error(code)
        connection.end(self._handler_class.last_frames(code, message))


def receive_order(control: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """The server's next order, and the client connection with it. Raises EOFError once the server is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(control, _LARGEST_ORDER, 1)
    except OSError:
        data, fds = b"", []
    if not data:
        raise EOFError
    for fd in fds:
        os.set_inheritable(fd, False)  # programs of an environment must not get it
    return json.loads(data), socket.socket(fileno=fds[0]) if fds else None


def work(control: socket.socket, served: Served, *, limit_process: Callable[[], None]) -> int:
    """Serve the server's first order: one session in the main thread, or, if it says "shared", many in threads.

    `limit_process` is called before any code of an environment runs. Returns the exit code.
    """
    try:
        said, client = receive_order(control)
    except EOFError:  # the process was not needed
        return 0
    if client is None:
        return 1
    limit_process()
    if said.get("shared"):
        _share(control, said, client, served)
    session = WorkerSession(SessionStart(**said["start"]), served)

    def listen() -> None:
        while True:
            try:
                session.hear(*receive_order(control))
            except EOFError:
                os._exit(1)

    _thread.start_new_thread(listen, ())  # a third of what `threading` takes, in every session
    try:
        return session.run(client)
    finally:
        atexit._run_exitfuncs()  # of the environment's libraries


def _share(control: socket.socket, said: dict[str, Any], client: socket.socket | None, served: Served) -> NoReturn:
    """Serve many sessions, each in a thread, until the server closes `control`. Reports each that ended."""
    sessions: dict[str, WorkerSession] = {}

    def run(id: str, client: socket.socket) -> None:
        code = 1
        try:
            code = sessions[id].run(client, shared=True)
        except BaseException:
            traceback.print_exc()
        del sessions[id]
        with contextlib.suppress(OSError):  # the server is gone, as the main thread hears, too
            control.send(json.dumps({"ended": id, "code": code}).encode())

    while True:
        if "start" in said and client is not None:
            start = SessionStart(**said["start"])
            sessions[start.session] = WorkerSession(start, served)
            _thread.start_new_thread(run, (start.session, client))
        elif session := sessions.get(said.get("session", "")):
            session.hear(said, client)
        elif client is not None:  # its session has just ended
            client.close()
        try:
            said, client = receive_order(control)
        except EOFError:
            os._exit(ENDED)
