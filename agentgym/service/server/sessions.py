"""The table of sessions: opens, watches, resumes, ends and counts them."""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import select
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import Refused
from agentgym.service.server import slots
from agentgym.service.server.bounds import MORE_MEMORY
from agentgym.service.server.forks import Forks, Packets
from agentgym.service.server.session import CLOSED, LEFT, ServedSession, overdue
from agentgym.service.server.settings import ServeSettings
from agentgym.service.server.slots import Delays, SessionCounts, Slot
from agentgym.service.worker.protocol_handler import handler_class
from agentgym.service.worker.session_worker import ENDED, NOT_MADE, NOT_SHARED, SessionStart
from agentgym.service.worker.websocket import contains_close

LOOK_SECONDS = 0.05
_PEEKED_BYTES = 1 << 16  # of unread input, when a client has left
# A client's pings are answered within this, while its worker is in a call.
PING_SECONDS = 2.0
FILL_SECONDS = 1.0
LINGER_SECONDS = 1.0  # for a client to read its last message
TOO_MANY = "TOO_MANY"  # sessions of one token; an HTTP refusal only


class Sessions:
    def __init__(self, settings: ServeSettings, served: Mapping[str, EnvSpec]):
        self.limits = settings.limits
        self.most = settings.max_sessions
        self._most_each = settings.max_sessions_per_token
        self._per_worker = settings.sessions_per_worker
        self._memory = slots.make_memory(self.most)
        self._words = slots.map_memory(self._memory)
        self.free = list(range(self.most))[::-1]
        self.forks = Forks(settings, served, self._memory, self._died)
        self.open: dict[str, ServedSession] = {}
        self.draining = False
        self.refused: Counter[str] = Counter()
        self.slot_returns = Delays()  # from the end of a broken limit until the slot is free
        self.lags = Delays()  # of the event loop
        self._past: defaultdict[str, SessionCounts] = defaultdict(SessionCounts)
        self._gone = select.epoll()
        self._by_client: dict[int, ServedSession] = {}
        self._by_process: dict[str, list[ServedSession]] = {}
        self._shared: dict[str, Packets] = {}  # the control sockets of processes that sessions share
        self._shared_at_least = max(1, settings.workers)
        self._not_shared: set[str] = set()  # environments that turned out to need a process for each session
        self._lingering: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._gone.fileno(), self._see_gone)
        self._looking = asyncio.create_task(self._look_on())

    async def start(self) -> None:
        """Import the environments and fork the first processes. Raises `ZygoteFailed`."""
        await self.forks.start()
        self.forks.fill()

    def reserve(self, env: str, protocol: str, owner: str) -> ServedSession:
        """Take a slot for a new session. Raises `Refused`."""
        if self.draining:
            raise self._refusal(frames.DRAINING, "the server is ending")
        if not self.forks.ready:
            raise self._refusal(frames.CAPACITY, "the server is starting its workers")
        if self._most_each is not None:
            mine = sum(session.owner == owner for session in self.open.values())
            if mine >= self._most_each:
                raise self._refusal(TOO_MANY, f"this token has {mine} sessions open and may have no more")
        if not self.free:
            raise self._refusal(frames.CAPACITY, f"all {self.most} sessions are in use")
        resumable = handler_class(protocol).resumable
        slot = self.free.pop()
        words = Slot(self._words, slot)
        words.enter(slots.INIT)
        session = ServedSession(secrets.token_hex(8), env, protocol, owner, slot, words, resumable)
        self.open[session.id] = session
        self._empty.clear()
        return session

    def _refusal(self, code: str, why: str) -> Refused:
        self.refused[code] += 1
        return Refused(code, why)

    def begin(self, session: ServedSession, client: int) -> None:
        """Give a reserved session a worker and its client's connection, whose descriptor is owned from here on."""
        past = self._past[session.env]
        past.opened += 1
        try:
            self._start_worker(session, client)
        except OSError as error:  # this process may open no more files
            why = f"no process for one more session: {error.strerror}"
            past.ended[frames.CAPACITY] += 1
            past.count_error(frames.CAPACITY)
            self._say_last(client, handler_class(session.protocol).last_frames(frames.CAPACITY, why))
            self.release(session)
            return
        self._take_client(session, client)
        self._loop.call_soon(self.forks.fill)

    def _start_worker(self, session: ServedSession, client: int) -> None:
        token = session.new_token()
        told = (session.id, session.env, session.protocol, token, session.slot, session.owner, self.draining)
        start = vars(SessionStart(*told))
        if self._per_worker > 1 and session.env not in self._not_shared:
            session.process, session.shared = self._shared_worker()
            if not self._tell(session, {"start": start, "shared": True}, [client]):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        else:
            session.process, session.control = self.forks.worker()
            if not self._tell(session, {"start": start}, [client]):
                # It died as it waited, and the report comes later.
                session.control.close()
                session.process, session.control = self.forks.fresh_worker()
                self._tell(session, {"start": start}, [client])
        self._by_process.setdefault(session.process, []).append(session)

    def _shared_worker(self) -> tuple[str, Packets]:
        """The shared process with the fewest sessions; a new one up to `workers`, or if all are full."""
        if len(self._shared) >= self._shared_at_least:
            process = min(self._shared, key=lambda key: len(self._by_process.get(key, ())))
            if len(self._by_process.get(process, ())) < self._per_worker:
                return process, self._shared[process]
        process, control = self.forks.worker()

        def heard(said: dict[str, Any], fds: list[int]) -> None:
            session = self.open.get(said["ended"])
            if session is not None and said["code"] == NOT_SHARED:
                self._give_own_process(session)
            elif session is not None:
                self._ended(session, said["code"] << 8)

        # Its end is found here; the ends of its sessions are heard of elsewhere.
        self._shared[process] = Packets(control, heard, lambda: self._shared.pop(process, None))
        return process, self._shared[process]

    def _give_own_process(self, session: ServedSession) -> None:
        """Begin a session again in its own process: the worker found that the environment cannot share one."""
        self._not_shared.add(session.env)
        self._leave_process(session)
        session.shared = None
        session.words.enter(slots.INIT)
        session.connections = 0  # the new process counts its own
        try:
            if session.client is None:  # it has left
                raise ConnectionError
            self._start_worker(session, session.client)
        except OSError:
            self._ended(session, None)

    def _leave_process(self, session: ServedSession) -> None:
        if session in (sharing := self._by_process.get(session.process, [])):
            sharing.remove(session)
        if not sharing:
            self._by_process.pop(session.process, None)

    def _take_client(self, session: ServedSession, client: int) -> None:
        session.client = client
        self._by_client[client] = session
        self._gone.register(client, select.EPOLLRDHUP)

    def _drop_client(self, session: ServedSession) -> int | None:
        client, session.client = session.client, None
        if client is not None and self._by_client.pop(client, None) is not None:
            self._gone.unregister(client)
        return client

    def claim(self, token: str, env: str, protocol: str, owner: str) -> ServedSession:
        """The session of a resume token; uses the token up. Raises `Refused`."""
        id, _, secret = token.partition(".")
        session = self.open.get(id)
        asked = (env, protocol, owner)
        if session is None or (session.env, session.protocol, session.owner) != asked or not session.claim(secret):
            raise self._refusal(frames.RESUME_REFUSED, frames.CODES[frames.RESUME_REFUSED][0])
        return session

    def attach(self, session: ServedSession, client: int) -> None:
        """Give a claimed session its new connection, whose descriptor is owned from here on."""
        if session.id not in self.open or session.ending is not None:
            os.close(client)
            return
        self._past[session.env].resumed += 1
        session.kill_at = None  # it has not left for good
        if (before := self._drop_client(session)) is not None:
            os.close(before)
        self._take_client(session, client)
        self._tell(session, {"do": "attach", "resume": session.new_token()}, [client])

    def _tell(self, session: ServedSession, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        try:
            if session.shared is not None:
                session.shared.send({**message, "session": session.id}, [os.dup(fd) for fd in fds or []])
                return True
            if session.control is None:
                return False
            socket.send_fds(session.control, [json.dumps(message).encode()], fds or [])
        except OSError:  # it is dying, as the zygote reports; or it reads nothing, and will be killed
            return False
        return True

    def end(self, session: ServedSession, code: str, message: str, deaf: bool = False) -> None:
        """End a session in good order; kill one that does not follow. `deaf`: the client reads nothing."""
        if session.ending is None:
            session.ending = (code, message)
            session.kill_at = time.monotonic() + self.limits.close_seconds + 1.0
            if not self._tell(session, {"do": "end", "code": code, "message": message[:2000], "deaf": deaf}):
                self._kill(session)

    def _kill(self, session: ServedSession) -> None:
        if not session.killed:
            session.killed = True
            self.forks.kill(session.process)

    async def _look_on(self) -> None:
        filled = time.monotonic()
        while True:
            due = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self.lags.add(max(0.0, now - due))
            for session in list(self.open.values()):
                self._look(session, now)
            if now > filled + FILL_SECONDS:
                self.forks.fill()
                filled = now

    def _look(self, session: ServedSession, now: float) -> None:
        if session.kill_at is not None and now >= session.kill_at:
            self._kill(session)
            return
        state, seconds = session.words.look()
        calling = state in slots.CALLING
        broken = overdue(state, seconds, self.limits)
        if broken is None:
            if calling and seconds > PING_SECONDS and now > session.pinged_at + PING_SECONDS:
                session.pinged_at = now
                self._tell(session, {"do": "pings"})
            return
        code, message, late = broken
        if calling and not session.killed:  # only the end of its process ends a call
            session.due = now - late
            session.ending = session.ending or (code, message)
            self._kill(session)
        elif not calling and session.ending is None:
            session.due = now - late
            self.end(session, code, message, deaf=state == slots.WRITING)

    def _see_gone(self) -> None:
        """Wait for clients that may resume; end the sessions of the others."""
        for client, _ in self._gone.poll(0, 64):
            session = self._by_client.get(client)
            if session is None:
                continue
            self._drop_client(session)
            took_leave = False
            with socket.socket(fileno=client) as sock, contextlib.suppress(OSError):
                # A close frame that its worker, in a call, has not read and may never read. One that reads a message
                # finds it by itself, and what it has not read yet may begin in the middle of a frame.
                if session.words.look()[0] != slots.READING:
                    took_leave = contains_close(sock.recv(_PEEKED_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            comes_back = session.resumable and not took_leave
            if not comes_back and session.kill_at is None and session.shared is None:  # else the call's own limit holds
                session.kill_at = time.monotonic() + self.limits.close_seconds

    def _died(self, process: str, status: int | None, out_of_memory: bool = False) -> None:
        """A process ended, with this wait status (None: unknown)."""
        if (shared := self._shared.pop(process, None)) is not None:
            shared.close()
        sessions = self._by_process.get(process, [])
        guilty = next((session for session in sessions if session.killed), None)
        for session in list(sessions):
            if guilty is not None and not session.killed and session.ending is None:
                _, why = guilty.ending or ("", "it left")
                why = f"the process was killed for another session that shared it: {why}"
                session.ending = (frames.SHARED_WORKER_KILLED, why)
            self._ended(session, status, out_of_memory)

    def _ended(self, session: ServedSession, status: int | None, out_of_memory: bool = False) -> None:
        """A session ended, with the wait status of its process; a session that shares one reports what it would be."""
        if out_of_memory and status == signal.SIGKILL and session.ending is None and not session.killed:
            session.ending = (frames.OUT_OF_MEMORY, f"the session ran out of memory: {MORE_MEMORY}")
        exit_code = None if status is None else os.waitstatus_to_exitcode(status)
        clean = exit_code in (ENDED, NOT_MADE)
        if clean and session.ending is not None and session.ending[0] == frames.DEADLINE:
            session.ending = session.due = None  # it ended before the kill
        if exit_code is None:
            how = "could not be started, or died with its parent"
        else:
            how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
            how += "; its episode is lost"
        code, message = session.ending or (frames.WORKER_DIED, f"the process of the session {how}")
        past = self._past[session.env]
        codes, why = list(frames.CODES), session.words.words[slots.WHY]
        if clean and 0 < why <= len(codes):  # an environment can write there, too
            reason = codes[why - 1]
        elif session.ending is not None:
            reason = session.ending[0]
        else:
            reason = CLOSED if clean else LEFT if session.killed else frames.WORKER_DIED
        past.ended[reason] += 1
        if not self.forks.closing:  # else all end with their server
            session.log_end(self.forks.pid_of(session.process), reason, message, status)
        if not clean and (session.ending is not None or not session.killed):
            past.count_error(code)
        if (client := self._drop_client(session)) is not None:
            # Half a message may have been sent: whatever comes after it would be read as its rest.
            said = clean or session.words.look()[0] == slots.WRITING
            self._say_last(client, None if said else handler_class(session.protocol).last_frames(code, message))
        self.release(session)

    def _say_last(self, client: int, last: bytes | None) -> None:
        """Send the last frames, and close once the client has read them: unread input would reset the connection."""
        sock = socket.socket(fileno=client)
        sock.setblocking(False)
        try:
            if last is not None:
                sock.send(last)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return

        def over(task: asyncio.Task[None]) -> None:
            sock.close()
            self._lingering.discard(task)

        reading = self._loop.create_task(_read_out(sock))
        self._lingering.add(reading)
        reading.add_done_callback(over)

    def release(self, session: ServedSession) -> None:
        """Free the slot of a session that has ended or did not begin."""
        self.open.pop(session.id, None)
        self._leave_process(session)
        if session.control is not None:
            session.control.close()
        self._past[session.env].add(session.words)
        session.words.clear()
        self.free.append(session.slot)
        if session.due is not None:
            self.slot_returns.add(time.monotonic() - session.due)
        if not self.open:
            self._empty.set()

    def tallies(self) -> defaultdict[str, SessionCounts]:
        found: defaultdict[str, SessionCounts] = defaultdict(SessionCounts)
        for env, counts in [*self._past.items(), *((session.env, session.words) for session in self.open.values())]:
            found[env].add(counts)
        return found

    def envs_by_process(self) -> dict[str, str]:
        """The environment of each worker process by its key; of a shared one, that of its first session."""
        return {process: sessions[0].env for process, sessions in self._by_process.items()}

    def states(self) -> dict[str, int]:
        found = Counter(session.words.look()[0] for session in self.open.values())
        states = {name: found[state] for state, name in enumerate(slots.STATE_NAMES) if state}
        return {**states, "spare": len(self.forks.spares)}

    async def drain(self, seconds: float) -> None:
        """Refuse new sessions and episodes, wait up to `seconds` for running ones, then end the rest."""
        self.draining = True
        for session in self.open.values():
            self._tell(session, {"do": "drain"})
        await self._wait_until_empty(seconds)
        for session in list(self.open.values()):
            self.end(session, frames.DRAINING, "the server has ended")
        await self._wait_until_empty(self.limits.close_seconds + 2.0)

    async def _wait_until_empty(self, seconds: float) -> None:
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)

    async def close(self) -> None:
        """End all processes and sessions at once."""
        self.draining = True
        await self.forks.close()
        self._loop.remove_reader(self._gone.fileno())
        for session in list(self.open.values()):
            self._died(session.process, None)
        for task in (tasks := {self._looking, *self._lingering}):
            task.cancel()
        await asyncio.wait(tasks)
        for shared in self._shared.values():
            shared.close()
        self._gone.close()
        os.close(self._memory)


async def _read_out(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                pass
