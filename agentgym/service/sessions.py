"""The table of sessions: who may open one, how long it may take for what, how it ends, and what is counted."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentgym.service import slots
from agentgym.service.forks import Forks
from agentgym.service.frames import (
    CAPACITY,
    CODES,
    DEADLINE,
    DRAINING,
    IDLE,
    NORMAL_CLOSE,
    RESUME_REFUSED,
    TOO_SLOW,
    WORKER_DIED,
    Refused,
    ServiceLimits,
)
from agentgym.service.slots import Slot
from agentgym.service.websocket import TEXT, close_frame, encoded
from agentgym.service.wires import wire_class
from agentgym.service.worker import ENDED, NOT_MADE

LOOK_SECONDS = 0.05
# A client's pings are answered within this, while its worker is in a call.
PING_SECONDS = 2.0
LINGER_SECONDS = 1.0
TOO_MANY = "TOO_MANY"  # sessions of one token; an HTTP refusal only
_CALL_NAMES = {slots.INIT: "init", slots.RESET: "reset", slots.STEP: "step", slots.CLOSE: "close"}


@dataclass
class Session:
    """One session and its process.

    Attributes:
        id: random; names it in the table and in the resume token.
        owner: the name of the token that opened it.
        client: a duplicate of the client's connection, for the last word; None while none is attached.
        control: where its worker is told things; None before it is forked.
        ending: why it is to end: code and message. None: it goes on.
        kill_at: when its process is killed, on the monotonic clock.
    """

    id: str
    env: str
    wire: str
    owner: str
    slot: int
    words: Slot
    resumable: bool
    opened: float = field(default_factory=time.monotonic)
    resume_digest: bytes = b""
    client: int | None = None
    control: socket.socket | None = None
    ending: tuple[str, str] | None = None
    kill_at: float | None = None
    killed: bool = False
    pinged_at: float = 0.0


class Sessions:
    """All sessions of a server.

    Args:
        limits: how long and how large.
        most: how many at a time.
        most_each: how many at a time for one token; None: as many as there are.
    """

    def __init__(self, limits: ServiceLimits, most: int, most_each: int | None = None):
        self.limits = limits
        self.most = most
        self.most_each = most_each
        self.memory = slots.make_memory(most)
        self._words = slots.map_memory(self.memory)
        self._free = list(range(most))[::-1]
        self.open: dict[str, Session] = {}
        self.draining = False
        self.opened = 0
        self.resumed = 0
        self.ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._past: Counter[str] = Counter()
        self._gone = select.epoll()
        self._by_client: dict[int, Session] = {}
        self._lingering: dict[int, Callable[[], None]] = {}
        self.forks: Forks | None = None
        self._empty = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._gone.fileno(), self._see_gone)
        self._looking = asyncio.create_task(self._look_on())

    def reserve(self, env: str, wire: str, owner: str) -> Session:
        """Take a slot for a new session.

        Raises:
            Refused: there is none, or the owner has all that it may have, or the server is ending.
        """
        if self.draining:
            raise self._refusal(DRAINING, "the server is ending")
        if self.forks is None or not self.forks.ready:
            raise self._refusal(CAPACITY, "the server is starting its workers")
        mine = sum(session.owner == owner for session in self.open.values()) if self.most_each is not None else 0
        if self.most_each is not None and mine >= self.most_each:
            raise self._refusal(TOO_MANY, f"this token has {mine} sessions open and may have no more")
        if not self._free:
            raise self._refusal(CAPACITY, f"all {self.most} sessions are in use")
        slot = self._free.pop()
        words = Slot(self._words, slot)
        words.enter(slots.INIT)
        session = Session(secrets.token_hex(8), env, wire, owner, slot, words, wire_class(wire).resumable)
        self.open[session.id] = session
        self._empty.clear()
        return session

    def _refusal(self, code: str, why: str) -> Refused:
        self.refused[code] += 1
        return Refused(code, why)

    def release(self, session: Session) -> None:
        """Give a reserved slot back, as its client left before the session began."""
        self._forget(session)

    def begin(self, session: Session, client: int) -> None:
        """Start the worker of a reserved session on a connection, whose descriptor is owned from here on."""
        if self.forks is None:
            raise RuntimeError("there are no forks yet: reserve() first")
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        session.control = control
        self.opened += 1
        start = {
            "session": session.id,
            "env": session.env,
            "wire": session.wire,
            "resume": self._new_token(session),
            "slot": session.slot,
        }
        self._take_client(session, client)
        self.forks.fork(session.id, {"start": start}, [theirs.detach(), os.dup(client)])

    def _take_client(self, session: Session, client: int) -> None:
        self._drop_client(session)
        session.client = client
        self._by_client[client] = session
        self._gone.register(client, select.EPOLLRDHUP)

    def _drop_client(self, session: Session) -> int | None:
        """Forget a session's connection; its descriptor is the caller's to close."""
        client, session.client = session.client, None
        if client is not None and self._by_client.pop(client, None) is not None:
            self._gone.unregister(client)
        return client

    def _new_token(self, session: Session) -> str:
        secret = secrets.token_urlsafe(32)
        session.resume_digest = hashlib.sha256(secret.encode()).digest()
        return f"{session.id}.{secret}"

    def claim(self, token: str, owner: str) -> Session:
        """The session of a resume token, which is used up by this.

        Raises:
            Refused: it is wrong, was used before, or its session has ended.
        """
        id, _, secret = token.partition(".")
        session = self.open.get(id)
        known = session.resume_digest if session is not None else b""
        fits = hmac.compare_digest(known, hashlib.sha256(secret.encode(errors="replace")).digest())
        if session is None or not known or not fits or session.ending is not None or session.owner != owner:
            raise self._refusal(RESUME_REFUSED, CODES[RESUME_REFUSED][0])
        session.resume_digest = b""
        return session

    def attach(self, session: Session, client: int) -> bool:
        """Give a claimed session its new connection, whose descriptor is owned from here on; whether it is still there."""
        if session.id not in self.open or session.ending is not None:
            os.close(client)
            return False
        self.resumed += 1
        before = self._drop_client(session)
        if before is not None:
            os.close(before)
        message = {"do": "attach", "resume": self._new_token(session)}
        self._take_client(session, client)
        return self._tell(session, message, [client])

    def _tell(self, session: Session, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        if session.control is None:
            return False
        try:
            socket.send_fds(session.control, [json.dumps(message).encode()], fds or [])
        except OSError:  # it is dying, which is heard of elsewhere; or it takes nothing, and will be killed
            return False
        return True

    def end(self, session: Session, code: str, message: str, deaf: bool = False) -> None:
        """End a session in good order; one that does not follow is killed.

        Args:
            session: which.
            code: one of `CODES`.
            message: the client's last.
            deaf: whether the client takes nothing, not even that.
        """
        if session.ending is None:
            session.ending = (code, message)
            session.kill_at = time.monotonic() + self.limits.close_seconds + 1.0
            if not self._tell(session, {"do": "end", "code": code, "message": message[:2000], "deaf": deaf}):
                self._kill(session)

    def _kill(self, session: Session) -> None:
        if not session.killed and self.forks is not None:
            session.killed = True
            self.forks.kill(session.id)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for session in list(self.open.values()):
                self._look(session, now)

    def _look(self, session: Session, now: float) -> None:
        """See how long a session has been at what it is doing."""
        state, seconds = session.words.look()
        if session.kill_at is not None and now >= session.kill_at:
            self._kill(session)
            return
        limits = self.limits
        if state in slots.CALLING:
            allowed = (limits.init_seconds, limits.reset_seconds, limits.step_seconds, limits.close_seconds)[state - 1]
            if seconds > allowed and not session.killed:
                word = _CALL_NAMES[state]
                session.ending = session.ending or (DEADLINE, f"{word} took longer than its limit of {allowed:g} s")
                self._kill(session)
            elif seconds > PING_SECONDS and now > session.pinged_at + PING_SECONDS and session.client is not None:
                session.pinged_at = now
                self._tell(session, {"do": "pings"})
        elif session.ending is not None:
            return
        elif state == slots.WAITING and seconds > limits.idle_seconds:
            self.end(session, IDLE, f"nothing was asked for {limits.idle_seconds:g} s")
        elif state == slots.DETACHED and seconds > limits.resume_seconds:
            self.end(session, IDLE, f"the client did not come back within {limits.resume_seconds:g} s")
        elif state == slots.READING and seconds > limits.message_seconds:
            self.end(session, TOO_SLOW, f"a message took longer than {limits.message_seconds:g} s to arrive")
        elif state == slots.WRITING and seconds > limits.message_seconds:
            self.end(session, TOO_SLOW, f"an answer was not taken within {limits.message_seconds:g} s", deaf=True)

    def _see_gone(self) -> None:
        """Clients that left. One that may come back is waited for; of others nothing more is wanted."""
        for client, _ in self._gone.poll(0, 64):
            session = self._by_client.get(client)
            if session is None:
                continue
            self._drop_client(session)
            os.close(client)
            if not session.resumable and session.kill_at is None:
                session.kill_at = time.monotonic() + self.limits.close_seconds

    def died(self, id: str, status: int | None) -> None:
        """A worker ended, with this wait status; None: it is not known, or was never there."""
        session = self.open.get(id)
        if session is None:
            return
        code, message = session.ending or (WORKER_DIED, _how(status))
        clean = status is not None and os.waitstatus_to_exitcode(status) in (ENDED, NOT_MADE)
        state, _ = session.words.look()
        reason = "closed" if clean and session.ending is None else code
        if clean and (why := session.words.words[slots.WHY]):
            reason = list(CODES)[why - 1]
        elif session.killed and session.ending is None:
            reason = "left"
        self.ended[reason] += 1
        client = self._drop_client(session)
        if client is not None:
            # Half a message may have been sent: whatever comes after it would be read as its rest.
            said = clean or state == slots.WRITING
            self._let_go(client, None if said else _last_bytes(session.wire, code, message))
        self._forget(session)

    def _let_go(self, client: int, last: bytes | None) -> None:
        """Say the last word and close, but not before the client has read it: closing on what it still sends would take it
        from it."""
        sock = socket.socket(fileno=client)
        sock.setblocking(False)
        try:
            if last is not None:
                sock.send(last)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return

        def stop() -> None:
            del self._lingering[client]
            timer.cancel()
            self._loop.remove_reader(client)
            sock.close()

        def discard() -> None:
            try:
                rest = sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                rest = b""
            if not rest:
                stop()

        timer = self._loop.call_later(LINGER_SECONDS, stop)
        self._lingering[client] = stop
        self._loop.add_reader(client, discard)

    def _forget(self, session: Session) -> None:
        self.open.pop(session.id, None)
        if session.control is not None:
            session.control.close()
        self._past.update(session.words.counters())
        session.words.clear()
        self._free.append(session.slot)
        if not self.open:
            self._empty.set()

    def counters(self) -> dict[str, int]:
        """What all workers have counted, those that ended as well."""
        total = Counter(self._past)
        for session in self.open.values():
            total.update(session.words.counters())
        return {name: total[name] for name in slots.COUNTERS}

    def states(self) -> dict[str, int]:
        """How many workers are in what."""
        found = Counter(slots.STATE_NAMES[session.words.look()[0]] for session in self.open.values())
        return {name: found[name] for name in slots.STATE_NAMES[1:]}

    async def drain(self, seconds: float) -> None:
        """Take no new sessions and no new episodes; wait for those that run, and end what is left after `seconds`."""
        self.draining = True
        for session in self.open.values():
            self._tell(session, {"do": "drain"})
        await self._wait_until_empty(seconds)
        for session in list(self.open.values()):
            self.end(session, DRAINING, "the server has ended")
        await self._wait_until_empty(self.limits.close_seconds + 2.0)

    async def _wait_until_empty(self, seconds: float) -> None:
        if not self.open:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Stop looking, and let go of everything. The workers are gone by now."""
        self._looking.cancel()
        await asyncio.wait({self._looking})
        self._loop.remove_reader(self._gone.fileno())
        for session in list(self.open.values()):
            self.died(session.id, None)
        for stop in list(self._lingering.values()):
            stop()
        self._gone.close()
        os.close(self.memory)


def _how(status: int | None) -> str:
    if status is None:
        return "the process of the session could not be started, or died with its parent"
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process of the session {how}; its episode is lost"


def _last_bytes(wire: str, code: str, message: str) -> bytes:
    word = wire_class(wire).last_word(code, message)
    said = b"" if word is None else encoded(TEXT, word.encode())
    return said + close_frame(CODES[code][1] or NORMAL_CLOSE)
