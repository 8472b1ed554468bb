"""The client's side of a session: calls in order, over as many connections as needed; no request is run twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentgym.service.client.address import Address, RemoteEnvError, RemoteError, SessionLost
from agentgym.service.client.connection import (
    CLOSE_SECONDS,
    CONNECT_SECONDS,
    LARGEST_ANSWER,
    Hello,
    NotOpened,
    close_in_order,
    connect,
    cut,
    get,
    in_background,
    is_gone,
    said,
    shared,
)
from agentgym.service.protocol import frames

if TYPE_CHECKING:
    import aiohttp

RECONNECT_SECONDS = 20.0
# Sessions end with their server: if nothing listens at its port they are gone, unless the network says so in error.
ABSENT_SECONDS = 3.0
# A policy may think for longer than a server waits for a client that dropped: idle sessions mend their connections.
LOOK_SECONDS = 5.0
SILENT_SECONDS = 15.0
# Connections in a row over which no answer came: a server that takes a session back and drops it does not get for ever.
FRUITLESS = 8

_dice = random.Random()  # the global one is the episodes'

Request = tuple[str, Mapping[str, Any]]
_Pending = dict[int, tuple[str, str]]  # call and text of each request that is not answered yet, by its id


class _Dropped(Exception):
    """The connection was lost without a message."""


@dataclass
class RemoteSession:
    """An open session. One call at a time. `give_back` is called once, when it is abandoned."""

    address: Address
    server: str
    expects: Mapping[str, Any]
    hello: Hello
    ws: aiohttp.ClientWebSocketResponse | None
    loop: asyncio.AbstractEventLoop
    lost: str = ""
    reconnects: int = 0
    give_back: Callable[[], None] | None = None
    _last: int = field(default=0, repr=False)
    _in_use: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _next_look: asyncio.TimerHandle | None = field(default=None, repr=False)
    _seen: int = field(default=0, repr=False)  # the last request at the last look
    _silent: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self._look_later()

    @classmethod
    async def open(cls, address: Address, server: str, expects: Mapping[str, Any]) -> RemoteSession:
        """A new session on one server. Raises `NotOpened`."""
        ws, hello = await connect(address, server, None, expects)
        return cls(address, server, expects, hello, ws, asyncio.get_running_loop())

    async def calls(self, requests: Sequence[Request]) -> list[Any]:
        if self.lost:
            raise SessionLost(self.lost)
        ids = range(self._last + 1, self._last + 1 + len(requests))
        pending: _Pending = {
            id: (call, frames.text_of_json({"id": id, "call": call, **fields}))
            for id, (call, fields) in zip(ids, requests, strict=True)
        }
        self._check_size(pending)
        self._last += len(pending)
        answers: dict[int, Any] = {}
        if self.loop is not asyncio.get_running_loop():
            self._in_use = asyncio.Lock()  # the other's holder waits in a loop that has ended
        try:
            async with self._in_use:
                await self._answered(pending, answers)
        except BaseException:
            # Cancelled, or lost: it is unknown which requests have run, so the session is useless.
            self.abandon("a call was given up before its answer came")
            raise
        return [self._result(answers[id]) for id in ids]

    async def close(self) -> None:
        """End the session in good order: the environment is closed when this returns, and its slot free soon after."""
        if self.lost:
            return
        try:
            async with asyncio.timeout(self.hello.limits.close_seconds + CLOSE_SECONDS):
                await self.calls([("close", {})])
        except TimeoutError:
            raise RemoteError(f"{self._who()}: close took longer than {self.hello.limits.close_seconds:g} s") from None
        finally:
            self.abandon("it was closed")

    def abandon(self, why: str) -> None:
        """Give the session up without waiting."""
        self.lost = self.lost or f"{self._who()}: the session has ended: {why}"
        ws, self.ws = self.ws, None
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()
        self._look_no_more()
        if ws is None:
            return
        try:
            if self.loop is asyncio.get_running_loop():
                in_background(close_in_order(ws))
                return
        except RuntimeError:  # no loop runs here
            pass
        cut(ws)

    async def _answered(self, pending: _Pending, answers: dict[int, Any]) -> None:
        fruitless = 0
        while pending:
            before = len(pending)
            try:
                if self.ws is None or self.loop is not asyncio.get_running_loop():
                    await self._come_back([call for call, _ in pending.values()])
                await self._exchange(pending, answers)
            except _Dropped as drop:
                if self.ws is not None:
                    cut(self.ws)
                    self.ws = None
                if self._silent:
                    silent = f"it answers neither the call nor GET /health within {SILENT_SECONDS:g} s"
                    raise self._end(f"the server hangs: {silent}") from drop
                fruitless = 0 if len(pending) < before else fruitless + 1
                if fruitless > FRUITLESS:
                    raise self._end(f"its connection dropped {fruitless} times without an answer ({drop})") from drop

    async def _exchange(self, pending: _Pending, answers: dict[int, Any]) -> None:
        from aiohttp import ClientError

        ws = self.ws
        if ws is None:
            raise _Dropped("no connection")
        calls, texts = zip(*pending.values(), strict=True)
        try:
            async with asyncio.timeout(self._patience(calls)):
                with contextlib.suppress(OSError, ClientError):  # why it closed before may still be there to be read
                    await ws.send_str(texts[0] if len(texts) == 1 else f"[{','.join(texts)}]")
                while pending:
                    self._take(await self._receive(ws), pending, answers)
        except TimeoutError:
            raise _Dropped("the server is silent for longer than its own limits") from None

    async def _receive(self, ws: aiohttp.ClientWebSocketResponse) -> str:
        from aiohttp import ClientError, WSMsgType

        try:
            message = await ws.receive()
        except (OSError, ClientError) as error:
            raise _Dropped(said(error)) from error
        if message.type is WSMsgType.TEXT:
            return str(message.data)
        if message.type is WSMsgType.BINARY:
            raise self._end("it sent a binary message, which is not of the protocol")
        if ws.close_code == 1009:  # our own: the answer is larger than LARGEST_ANSWER
            raise self._end(f"it sent more than {LARGEST_ANSWER >> 20} MiB in one answer")
        raise _Dropped(f"closed with {ws.close_code}" if ws.close_code else "the connection was reset")

    def _take(self, text: str, pending: _Pending, answers: dict[int, Any]) -> None:
        try:
            value = frames.decoded(text)
        except (ValueError, RecursionError) as wrong:
            raise self._end(f"it sent no JSON: {text!r:.100}") from wrong
        for answer in value if isinstance(value, list) else [value]:
            error = answer.get("error") if isinstance(answer, dict) else None
            id = answer.get("id") if isinstance(answer, dict) else None
            if isinstance(error, dict) and (error.get("fatal") or id is None):
                raise self._end(f"{error.get('code')}: {error.get('message')}", str(error.get("code")))
            if type(id) is not int or id > self._last or ("result" not in answer and not isinstance(error, dict)):
                raise self._end(f"it sent an invalid answer: {text!r:.100}")
            if pending.pop(id, None):  # an older one was given up
                answers[id] = answer

    def _result(self, answer: Mapping[str, Any]) -> Any:
        if "error" not in answer:
            return answer["result"]
        code, message = answer["error"].get("code"), answer["error"].get("message")
        if code == frames.ENV_ERROR:
            raise RemoteEnvError(f"{self._who()}: {message}")
        raise RemoteError(f"{self._who()}: {code}: {message}")

    async def _come_back(self, waiting: Sequence[str] = ()) -> None:
        """Open a connection to this session again, in which these calls may run. Raises `SessionLost`."""
        if self.ws is not None:  # it belongs to another event loop
            cut(self.ws)
            self.ws = None
        loop = asyncio.get_running_loop()
        begun, patience = loop.time(), min(self.hello.limits.resume_seconds, RECONNECT_SECONDS)
        pause = 0.1
        while True:
            try:
                running = self._patience(waiting)
                ws, hello = await connect(self.address, self.server, self.hello.resume, self.expects, running)
                break
            except NotOpened as refusal:
                most = min(patience, ABSENT_SECONDS) if refusal.absent else patience
                if refusal.lasting or loop.time() >= begun + most:
                    raise self._end(f"its connection dropped and could not be opened again: {refusal}") from refusal
            await asyncio.sleep(pause * _dice.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)
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
        """Reopen a connection that dropped between calls; check that the server lives during a long call."""
        if self.lost:
            return
        if not self._in_use.locked():
            if is_gone(self.ws):
                in_background(self._mend())
        elif self._seen == self._last:
            in_background(self._feel(self._last))
        self._seen = self._last
        self._look_later()

    async def _feel(self, request: int) -> None:
        alive = await shared((self.address, self.server), lambda: still_answers(self.address, self.server))
        if not alive and self._last == request and self._in_use.locked():
            self._silent = True
            cut(self.ws)  # which ends the waiting call

    async def _mend(self) -> None:
        async with self._in_use:
            if self.lost or not is_gone(self.ws):
                return
            self.ws = None
            # `lost` says what cannot be mended, and the next call raises it; a loop that is ending opens nothing.
            with contextlib.suppress(RuntimeError):
                await self._come_back()

    def _end(self, why: str, code: str = "") -> SessionLost:
        self.lost = f"{self._who()}: the session is lost: {why}"
        return SessionLost(self.lost, code)

    def _patience(self, waiting: Sequence[str]) -> float:
        """Seconds in which a living server answers these calls or says that one took too long."""
        limits = self.hello.limits
        by_call = {"init": limits.init_seconds, "reset": limits.reset_seconds, "close": limits.close_seconds}
        calls = sum(by_call.get(call, limits.step_seconds) for call in waiting)
        return calls + limits.message_seconds + CONNECT_SECONDS

    def _check_size(self, pending: _Pending) -> None:
        largest = self.hello.limits.message_bytes
        texts = [text for _, text in pending.values()]
        if 4 * sum(map(len, texts)) + 2 * len(texts) <= largest:  # however they are encoded
            return
        size = sum(len(text.encode()) + 2 for text in texts)
        if size > largest:
            call, _ = next(iter(pending.values()))
            why = f"{call} would send {size:,} bytes, and the server takes {largest:,}"
            raise RemoteError(f"{self._who()}: {why}: send less, or let it take more")

    def _who(self) -> str:
        return f"{self.address.env} at {self.server}"


async def still_answers(address: Address, server: str) -> bool:
    """False if a server is silent. One that refuses, or whose machine does, is for the connection to find out."""
    from aiohttp import ClientError

    try:
        await get(address, server, "/health", SILENT_SECONDS)
    except TimeoutError:
        return False
    except (OSError, ClientError, RemoteError):
        pass
    return True
