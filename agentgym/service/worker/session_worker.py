"""The worker process: it holds the environments of one or more sessions and speaks on the clients' own sockets.

A session's thread receives a message, lets the protocol handler answer it, and sends the answer. Another thread takes
the server's orders. The worker enforces no time limit: it writes its state into its slot, and the server kills it.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any, NoReturn

from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import TaskSet
from agentgym.service.protocol.frames import CODES, DRAINING, ENV_ERROR, NORMAL_CLOSE, Refused, ServiceLimits
from agentgym.service.server import slots
from agentgym.service.server.events import EnvErrors
from agentgym.service.server.slots import Slot
from agentgym.service.worker.protocol_handler import CallRunner, ProtocolHandler, SessionInfo, described, handler_class
from agentgym.service.worker.websocket import Connection

if TYPE_CHECKING:  # the server reads this module for its codes, and needs no Gymnasium
    from agentgym.core.env import Env

# Exit codes, by which the server knows how a session ended.
ENDED, NOT_MADE = 80, 81  # no program exits with these
NOT_SHARED = 82  # of a session alone: it has not begun, and needs a process to itself
_LARGEST_ORDER = 1 << 16


@dataclass(frozen=True)
class SessionStart:
    """The server's order to begin a session."""

    session: str
    env: str
    protocol: str
    resume: str
    slot: int
    token: str = ""


class ServerLink:
    """The server's orders for one session: connections to serve, pings to answer, the end."""

    def __init__(self, slot: Slot, limit: int):
        self.slot = slot
        self._limit = limit
        self._attached: queue.SimpleQueue[tuple[Connection, str] | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self.ending: tuple[str, str] | None = None
        self.handler: ProtocolHandler | None = None
        self.draining = False

    def next(self) -> tuple[Connection, str] | None:
        """Wait for a connection and the resume token of its hello. None: the session is to end."""
        return self._attached.get()

    def offer(self, client: socket.socket, resume: str) -> None:
        """Serve this connection instead of the one before."""
        if self._connection is not None:
            self._connection.shut(socket.SHUT_RDWR)
        self._connection = Connection(client, self.slot, self._limit)
        self._attached.put((self._connection, resume))

    def hear(self, said: dict[str, Any], client: socket.socket | None) -> None:
        """Follow one order, in another thread than the session's. Never waits."""
        if said["do"] == "attach" and client is not None:
            self.offer(client, said["resume"])
        elif said["do"] == "pings" and self._connection is not None:
            self._connection.answer_pings()
        elif said["do"] == "drain":
            self.draining = True
            if self.handler is not None:
                self.handler.draining = True
                if self.handler.clean:
                    self._end(DRAINING, "the server is ending", False)
        elif said["do"] == "end":
            self._end(said["code"], said["message"], said["deaf"])

    def _end(self, code: str, message: str, deaf: bool) -> None:
        self.ending = (code, message)
        if self._connection is not None:
            # A client that takes nothing would not take the last word either.
            self._connection.shut(socket.SHUT_RDWR if deaf else socket.SHUT_RD)
        self._attached.put(None)


@dataclass(frozen=True)
class Served:
    """The environments of a server, as its worker processes share them."""

    specs: dict[str, EnvSpec]
    tasks: dict[str, TaskSet]
    limits: ServiceLimits
    memory: memoryview


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

    def listen() -> None:
        while True:
            try:
                link.hear(*receive_order(control))
            except EOFError:
                os._exit(1)

    start, link = _begun(said, served)
    _thread.start_new_thread(listen, ())  # a third of what `threading` takes, in every session
    try:
        return _run_session(start, client, link, served)
    finally:
        atexit._run_exitfuncs()  # of the environment's libraries


def _begun(said: dict[str, Any], served: Served) -> tuple[SessionStart, ServerLink]:
    start = SessionStart(**said["start"])
    return start, ServerLink(Slot(served.memory, start.slot), served.limits.message_bytes)


def _share(control: socket.socket, said: dict[str, Any], client: socket.socket | None, served: Served) -> NoReturn:
    """Serve many sessions, each in a thread, until the server closes `control`. Reports each that ended."""
    links: dict[str, ServerLink] = {}

    def run(start: SessionStart, client: socket.socket) -> None:
        code = 1
        try:
            code = _run_session(start, client, links[start.session], served, shared=True)
        except BaseException:
            traceback.print_exc()
        del links[start.session]
        with contextlib.suppress(OSError):  # the server is gone, as the main thread hears, too
            control.send(json.dumps({"ended": start.session, "code": code}).encode())

    while True:
        if "start" in said and client is not None:
            start, link = _begun(said, served)
            links[start.session] = link
            _thread.start_new_thread(run, (start, client))
        elif known := links.get(said.get("session", "")):
            known.hear(said, client)
        elif client is not None:  # its session has just ended
            client.close()
        try:
            said, client = receive_order(control)
        except EOFError:
            os._exit(ENDED)


def _run_session(
    start: SessionStart, client: socket.socket, link: ServerLink, served: Served, shared: bool = False
) -> int:
    """Serve one session to its end; returns the exit code of a process that does nothing else."""
    slot, spec = link.slot, served.specs[start.env]
    speaks = handler_class(start.protocol)
    asked = slot.words[slots.SINCE]
    slot.enter(slots.INIT)
    link.offer(client, start.resume)
    calls = CallRunner(slot, EnvErrors(start.env, start.session, start.token).log)
    try:
        env = calls.call("init", speaks.make, spec, served.tasks.get(start.env))
    except (Exception, SystemExit) as error:
        connection, _ = link.next() or (None, "")
        if connection is not None:
            code = error.code if isinstance(error, Refused) else ENV_ERROR
            _say_last(connection, slot, speaks, code, f"making the environment failed: {described(error)}")
        calls.stop()
        return NOT_MADE
    if shared and speaks.has_sandbox(env):
        # A back end ties its processes to a thread, and counts their resources for the whole process.
        _close(env, calls)
        if (attached := link.next()) is not None:
            attached[0].close()
        return NOT_SHARED
    handler = speaks(env, calls, SessionInfo(start.session, start.env, spec, served.limits))
    slot.count_time("open", time.monotonic_ns() - asked)
    link.handler = handler
    handler.draining = link.draining
    try:
        while (attached := link.next()) is not None and _serve(*attached, handler, link, slot):
            slot.enter(slots.DETACHED)
    finally:
        _close(env, calls)
    return ENDED


def _close(env: Env, calls: CallRunner) -> None:
    with contextlib.suppress(Exception, SystemExit):  # it is in the log, and the client is gone
        calls.call("close", env.close)
    calls.stop()


def _serve(connection: Connection, resume: str, handler: ProtocolHandler, server: ServerLink, slot: Slot) -> bool:
    """Serve one connection until it is over; returns whether the client may come back."""
    words = slot.words
    words[slots.REQUESTS_THEN] = words[slots.REQUESTS]
    words[slots.CONNECTION] += 1
    try:
        if (hello := handler.hello(resume if handler.resumable else None)) is not None:
            connection.send(hello)
        while (text := connection.receive()) is not None and server.ending is None:
            slot.words[slots.REQUESTS] += 1
            if (answer := handler.answer(text)) is not None:
                connection.send(answer)
            if handler.ended:
                connection.end(NORMAL_CLOSE)
                return False
        last = server.ending
    except Refused as refused:
        last = refused.code, str(refused)
    if last is not None:
        _say_last(connection, slot, type(handler), *last)
        return False
    connection.close()
    return handler.resumable and not connection.closed


def _say_last(connection: Connection, slot: Slot, speaks: type[ProtocolHandler], code: str, message: str) -> None:
    slot.words[slots.WHY] = 1 + list(CODES).index(code)
    if code != ENV_ERROR:  # which was counted as it was raised
        slot.count_error(code)
    connection.end(CODES[code][1] or NORMAL_CLOSE, speaks.last_word(code, message))
