"""A session on a server, from the client's side: calls in order, over as many connections as it takes.

A connection that drops is opened again with the resume token of the last hello, and whatever was not answered is sent again
with its id: the server runs no request twice. What cannot be mended ends the session with an error that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentgym import endpoints
from agentgym.jsonl import line_of
from agentgym.service import frames
from agentgym.service.address import Address, RemoteEnvError, RemoteError, SessionLost

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = 20.0
CLOSE_SECONDS = 2.0
# A policy may think for longer than a server waits for a client that dropped: an idle session looks after its connection.
LOOK_SECONDS = 5.0
LARGEST_ANSWER = 64 << 20
# Connections in a row over which no answer came: a server that takes a session back and drops it does not get for ever.
FRUITLESS = 8
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}

_dice = random.Random()  # the global one is the episodes'
_tasks: set[asyncio.Task[Any]] = set()  # a loop holds its tasks only weakly

Request = tuple[str, Mapping[str, Any]]


class NotOpened(Exception):
    """A server gave no session.

    Attributes:
        wait: seconds that it asked to be left alone, where it is only full; None: it failed.
        lasting: whether trying again will not help: a wrong token, an environment that it does not serve.
    """

    def __init__(self, why: str, wait: float | None = None, lasting: bool = False):
        super().__init__(why)
        self.wait = wait
        self.lasting = lasting


class _Dropped(Exception):
    """The connection is gone, with nothing said."""


@dataclass
class Hello:
    """What a server said first."""

    session: str
    resume: str
    env: dict[str, Any]
    limits: frames.ServiceLimits

    @classmethod
    def read(cls, text: str) -> Hello:
        """The hello of a text.

        Raises:
            NotOpened: it is a refusal, or no hello.
        """
        try:
            record = json.loads(text)
            if "error" in record:
                raise _refusal(str(record["error"].get("code")), str(record["error"].get("message")))
            if record["protocol"] != frames.PROTOCOL:
                raise NotOpened(
                    f"it speaks protocol {record['protocol']!r:.20}, this client {frames.PROTOCOL}: update the older one",
                    lasting=True,
                )
            env = record["env"]
            if not isinstance(env, dict) or not isinstance(env.get("tools", []), list):
                raise TypeError("env is no record")
            return cls(str(record["session"]), str(record["resume"]), env, _limits_of(record.get("limits")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotOpened(f"its hello is not that of {frames.NAME} ({error!r:.100}): {text!r:.100}") from error


def _limits_of(record: Any) -> frames.ServiceLimits:
    known = frames.ServiceLimits()
    given = record if isinstance(record, dict) else {}
    usable = {
        name: given[name]
        for name in vars(known)
        if isinstance(given.get(name), int | float) and given[name] > 0 and math.isfinite(given[name])
    }
    return frames.ServiceLimits(**usable)


def _refusal(code: str, message: str) -> NotOpened:
    full = code in (frames.CAPACITY, frames.DRAINING)
    return NotOpened(f"{code}: {message}", wait=1.0 if full else None, lasting=code == frames.RESUME_REFUSED)


@dataclass
class Session:
    """An open session. One call at a time.

    Attributes:
        address: of the environment.
        server: `http://host:port` of the server that has the session.
        hello: what the server said last when a connection began.
        lost: why it has ended; "" while it goes on.
        reconnects: how often a connection had to be opened again.
    """

    address: Address
    server: str
    hello: Hello
    ws: aiohttp.ClientWebSocketResponse | None
    loop: asyncio.AbstractEventLoop
    lost: str = ""
    reconnects: int = 0
    _last: int = field(default=0, repr=False)
    _in_use: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _next_look: asyncio.TimerHandle | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._look_later()

    @classmethod
    async def open(cls, address: Address, server: str) -> Session:
        """A new session on one server.

        Raises:
            NotOpened: it gave none.
        """
        ws, hello = await _connect(address, server, None)
        return cls(address, server, hello, ws, asyncio.get_running_loop())

    async def call(self, name: str, **fields: Any) -> Any:
        """The result of one call.

        Raises:
            RemoteEnvError: the environment raised; the session goes on.
            RemoteError: the server refused the call, or it is too large; the session goes on.
            SessionLost: the session has ended.
        """
        return (await self.calls([(name, fields)]))[0]

    async def calls(self, requests: Sequence[Request]) -> list[Any]:
        """The results of several calls, which go in one message and are run one after another. Raises as `call`."""
        if self.lost:
            raise SessionLost(self.lost)
        batch = {
            self._last + number: {"id": self._last + number, "call": name, **fields}
            for number, (name, fields) in enumerate(requests, 1)
        }
        texts = {id: line_of(request)[:-1] for id, request in batch.items()}
        self._check_size(batch, texts)
        self._last += len(batch)
        answers: dict[int, Any] = {}
        if self.loop is not asyncio.get_running_loop():
            self._in_use = asyncio.Lock()  # who held the other waits in a loop that is left
        try:
            async with self._in_use:
                await self._answered(batch, texts, answers)
        except BaseException:
            # Cancelled, or lost: nobody knows what has been run, so the session is of no more use.
            self.abandon("a call was given up before its answer came")
            raise
        return [self._result(answers[id]) for id in batch]

    async def close(self) -> None:
        """End the session in good order: the environment is closed when this returns, and its slot free soon after."""
        if self.lost:
            return
        try:
            async with asyncio.timeout(self.hello.limits.close_seconds + CLOSE_SECONDS):
                await self.call("close")
        except TimeoutError:
            raise RemoteError(f"{self._who()}: close took longer than {self.hello.limits.close_seconds:g} s") from None
        finally:
            self.abandon("it was closed")

    def abandon(self, why: str) -> None:
        """Give the session up without waiting: the server hears of it if it can."""
        self.lost = self.lost or f"{self._who()}: the session has ended: {why}"
        ws, self.ws = self.ws, None
        self._look_no_more()
        if ws is None:
            return
        try:
            if self.loop is asyncio.get_running_loop():
                farewell = self.loop.create_task(_farewell(ws))
                _tasks.add(farewell)
                farewell.add_done_callback(_tasks.discard)
                return
        except RuntimeError:  # no loop runs here
            pass
        _cut(ws)

    async def _answered(self, batch: Mapping[int, Any], texts: Mapping[int, str], answers: dict[int, Any]) -> None:
        """Send what is not answered and take the answers, on new connections where one drops."""
        fruitless = 0
        while len(answers) < len(batch):
            before = len(answers)
            try:
                if self.ws is None or self.loop is not asyncio.get_running_loop():
                    await self._come_back()
                await self._exchange(batch, texts, answers)
            except _Dropped as drop:
                if self.ws is not None:
                    _cut(self.ws)
                    self.ws = None
                fruitless = 0 if len(answers) > before else fruitless + 1
                if fruitless > FRUITLESS:
                    raise self._end(f"its connection dropped {fruitless} times without an answer ({drop})") from drop

    async def _exchange(self, batch: Mapping[int, Any], texts: Mapping[int, str], answers: dict[int, Any]) -> None:
        from aiohttp import ClientError

        ws = self.ws
        if ws is None:
            raise _Dropped("no connection")
        waiting = [id for id in batch if id not in answers]
        text = texts[waiting[0]] if len(waiting) == 1 else f"[{','.join(texts[id] for id in waiting)}]"
        try:
            async with asyncio.timeout(self._patience([batch[id]["call"] for id in waiting])):
                try:
                    await ws.send_str(text)
                except (OSError, ClientError):
                    # It may have said why it closed before: that is still to be read.
                    while True:
                        self._take(await self._receive(ws), batch, answers)
                while len(answers) < len(batch):
                    self._take(await self._receive(ws), batch, answers)
        except TimeoutError:
            raise _Dropped("the server is silent for longer than its own limits") from None

    async def _receive(self, ws: aiohttp.ClientWebSocketResponse) -> str:
        from aiohttp import ClientError, WSMsgType

        try:
            message = await ws.receive()
        except (OSError, ClientError) as error:
            raise _Dropped(_said(error)) from error
        if message.type is WSMsgType.TEXT:
            return str(message.data)
        if message.type is WSMsgType.BINARY:
            raise self._end("it sent a binary message, which is not of the protocol")
        if ws.close_code == 1009:  # our own: the answer is larger than LARGEST_ANSWER
            raise self._end(f"it sent more than {LARGEST_ANSWER >> 20} MiB in one answer")
        raise _Dropped(f"closed with {ws.close_code}" if ws.close_code else "the connection was reset")

    def _take(self, text: str, batch: Mapping[int, Any], answers: dict[int, Any]) -> None:
        """Take the answers out of a message."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as wrong:
            raise self._end(f"it sent no JSON: {text!r:.100}") from wrong
        for answer in value if isinstance(value, list) else [value]:
            error = answer.get("error") if isinstance(answer, dict) else None
            id = answer.get("id") if isinstance(answer, dict) else None
            if isinstance(error, dict) and (error.get("fatal") or id is None):
                raise self._end(f"{error.get('code')}: {error.get('message')}", str(error.get("code")))
            if type(id) is not int or id > self._last or ("result" not in answer and not isinstance(error, dict)):
                raise self._end(f"it sent what is no answer: {text!r:.100}")
            if id in batch and id not in answers:  # an older one was given up
                answers[id] = answer

    def _result(self, answer: Mapping[str, Any]) -> Any:
        if "error" not in answer:
            return answer["result"]
        code, message = answer["error"].get("code"), answer["error"].get("message")
        if code == frames.ENV_ERROR:
            raise RemoteEnvError(f"{self._who()}: {message}")
        raise RemoteError(f"{self._who()}: {code}: {message}")

    async def _come_back(self) -> None:
        """Open a connection to this session again.

        Raises:
            SessionLost: the server does not have it any more, or did not answer in time.
        """
        if self.ws is not None:  # it belongs to another event loop
            _cut(self.ws)
            self.ws = None
        loop = asyncio.get_running_loop()
        until = loop.time() + min(self.hello.limits.resume_seconds, RECONNECT_SECONDS)
        tries = 0
        while True:
            tries += 1
            try:
                ws, hello = await _connect(self.address, self.server, self.hello.resume)
                break
            except NotOpened as refusal:
                if refusal.lasting or loop.time() >= until:
                    raise self._end(f"its connection dropped and could not be opened again: {refusal}") from refusal
            await asyncio.sleep(min(0.05 * 2**tries, 1.0) * _dice.uniform(0.5, 1.0))
        if hello.session != self.hello.session:
            self.ws, self.loop = ws, loop
            raise self._end("the server gave another session than the one that was asked for")
        self._look_no_more()
        self.ws, self.loop, self.hello = ws, loop, hello
        self.reconnects += 1
        self._look_later()

    def _look_later(self) -> None:
        self._next_look = self.loop.call_later(LOOK_SECONDS, self._look)

    def _look_no_more(self) -> None:
        look, self._next_look = self._next_look, None
        if look is not None and not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it closes just now
                self.loop.call_soon_threadsafe(look.cancel)

    def _look(self) -> None:
        """Open the connection again where it dropped while nothing was asked."""
        if self.lost:
            return
        if not self._in_use.locked() and _is_gone(self.ws):
            mending = self.loop.create_task(self._mend())
            _tasks.add(mending)
            mending.add_done_callback(_tasks.discard)
        self._look_later()

    async def _mend(self) -> None:
        async with self._in_use:
            if self.lost or not _is_gone(self.ws):
                return
            self.ws = None
            # What cannot be mended is in `lost`, and raised by the next call; a loop that is ending opens nothing any more.
            with contextlib.suppress(RuntimeError):
                await self._come_back()

    def _end(self, why: str, code: str = "") -> SessionLost:
        """The error of a session that has ended."""
        self.lost = f"{self._who()}: the session is lost: {why}"
        return SessionLost(self.lost, code)

    def _patience(self, waiting: Sequence[str]) -> float:
        """Seconds in which the server answers these calls or says that one took too long, if it is alive."""
        limits = self.hello.limits
        by_call = {"init": limits.init_seconds, "reset": limits.reset_seconds, "close": limits.close_seconds}
        calls = sum(by_call.get(call, limits.step_seconds) for call in waiting)
        return calls + limits.message_seconds + CONNECT_SECONDS

    def _check_size(self, batch: Mapping[int, Any], texts: Mapping[int, str]) -> None:
        largest = self.hello.limits.message_bytes
        letters = sum(map(len, texts.values())) + 2 * len(texts)
        if 4 * letters <= largest or (size := sum(len(t.encode()) for t in texts.values()) + 2 * len(texts)) <= largest:
            return
        call = next(iter(batch.values()))["call"]
        raise RemoteError(
            f"{self._who()}: {call} would send {size:,} bytes, and the server takes {largest:,}: send less, or let it take more"
        )

    def _who(self) -> str:
        return f"{self.address.env} at {self.server}"


async def _connect(address: Address, server: str, resume: str | None) -> tuple[aiohttp.ClientWebSocketResponse, Hello]:
    """A connection and its hello.

    Raises:
        NotOpened: no connection, or no session.
        Unavailable: the token or the certificates cannot be read.
    """
    import aiohttp

    headers = address.headers()
    if resume is not None:
        headers[frames.RESUME_HEADER] = resume
    tls = address.tls()
    ws: aiohttp.ClientWebSocketResponse | None = None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            http = await endpoints.session()
            ws = await http.ws_connect(
                f"{server}{address.path}/session",
                headers=headers,
                max_msg_size=LARGEST_ANSWER,
                ssl=True if tls is None else tls,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),  # type: ignore[call-arg]
            )
            _keep_alive(ws)
            message = await ws.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise NotOpened(f"it closed without a hello ({ws.close_code or 'reset'})")
            return ws, Hello.read(message.data)
    except aiohttp.WSServerHandshakeError as error:
        raise _of_status(error, address, resume) from error
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
        raise NotOpened(
            f"TLS failed: {_said(error)}: a certificate of your own needs ca_file=", lasting=True
        ) from error
    except TimeoutError:
        _cut(ws)
        raise NotOpened(f"no session within {CONNECT_SECONDS:g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        raise NotOpened(_said(error)) from error
    except BaseException:
        _cut(ws)
        raise


def _of_status(error: aiohttp.WSServerHandshakeError, address: Address, resume: str | None) -> NotOpened:
    """What a refusal over HTTP means."""
    if error.status in (429, 503):
        wait = endpoints.retry_after(error.headers.get("Retry-After") if error.headers else None)
        what = "this token has all the sessions that it may have" if error.status == 429 else "it is full or draining"
        return NotOpened(f"{what} ({error.status})", wait=1.0 if wait is None else wait)
    if error.status in (401, 403):
        what = "the resume token or the bearer token" if resume else "the bearer token"
        return NotOpened(f"it refuses {what} ({error.status}): set AGENTGYM_TOKEN or token_file=", lasting=True)
    if resume is not None and error.status < 500:
        return NotOpened(f"it does not have the session any more ({error.status})", lasting=True)
    if error.status == 404:
        return NotOpened(f"it serves no environment {address.env!r} (404): GET /envs lists them", lasting=True)
    return NotOpened(f"it answered {error.status} {error.message}", lasting=error.status < 500)


async def _farewell(ws: aiohttp.ClientWebSocketResponse) -> None:
    """A close frame, which tells the server that nobody will come back."""
    with contextlib.suppress(Exception):  # it is gone already, or does not answer: either way nothing is left to do
        await asyncio.wait_for(ws.close(), CLOSE_SECONDS)


def _cut(ws: aiohttp.ClientWebSocketResponse | None) -> None:
    """End a connection from any thread, also where its event loop runs no more."""
    connection = None if ws is None else ws.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _is_gone(ws: aiohttp.ClientWebSocketResponse | None) -> bool:
    """Whether the connection has ended, told without reading from it."""
    connection = None if ws is None else ws.get_extra_info("socket")
    return connection is None or connection.fileno() < 0


def _keep_alive(ws: aiohttp.ClientWebSocketResponse) -> None:
    """Let the kernel notice a host that is gone: an environment that thinks is silent as well, so the protocol cannot."""
    connection = ws.get_extra_info("socket")
    if connection is None:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
