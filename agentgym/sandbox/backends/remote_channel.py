"""Calls to the guest of a sandbox on a server, as `Channel` makes them to a local one. See `agentgym/service/protocol/sandbox_frames.py`.

A connection that drops is opened again, and the request whose answer did not arrive is sent again with its id: the server runs
it once.
"""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Mapping
from typing import Any

from agentgym.sandbox.api import BackendDown, SandboxError
from agentgym.sandbox.guest.channel import Header
from agentgym.service.client.address import Address, RemoteError
from agentgym.service.client.blocking_websocket import BlockingWebSocket, HandshakeRefused
from agentgym.service.protocol.frames import CAPACITY, DRAINING, RESUME_HEADER, Refused, ServiceLimits
from agentgym.service.protocol.sandbox_frames import PART, PATH, PROTOCOL

CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = 20.0
# Sandboxes end with their server: one at whose port nothing listens has no more of them, unless the network says so in error.
ABSENT_SECONDS = 3.0
# Connections in a row over which no answer came.
FRUITLESS = 8
_ROOM = 4096  # bytes of a request besides its data, at least

_dice = random.Random()  # the global one is the episodes'


class NoRoom(SandboxError):
    """This server has no sandbox to give now, or cannot be reached: another may have."""


class _Gone(Exception):
    """The session is lost, or its server is: coming back makes no sense."""


class RemoteChannel:
    """A session on a server. One thread uses it at a time; `close` may be called from any.

    Args:
        address: how the server is asked.
        server: `http://host:port`.

    Raises:
        NoRoom: it gives no session.
        SandboxError: it refuses who asks.
    """

    def __init__(self, address: Address, server: str):
        self.alive = True
        self.name = f"sandbox at {server}"
        self.reconnects = 0
        self._address = address
        self._server = server
        self._limits = ServiceLimits()
        self._resume = ""
        self._last = 0
        self._request = ""  # the one whose answer is awaited
        self._sent = False
        self._then: Header | None = None  # an answer that came with the one before
        self._socket: BlockingWebSocket | None = None
        until = time.monotonic() + CONNECT_SECONDS
        try:
            self._connect(until, until)
        except HandshakeRefused as error:
            text = f"{server} gives no sandbox: {_explained(error)}"
            raise (NoRoom if error.status == 429 or error.status >= 500 else SandboxError)(text) from None
        except (OSError, EOFError, Refused) as error:
            raise NoRoom(f"{server} gives no sandbox: {_said(error)}: is `agentgym serve --sandbox` there?") from error

    def start(self, spec: Mapping[str, Any], run: str, timeout: float) -> Header:
        """Have the sandbox started; what the server tells of it. Raises SandboxError."""
        self._ask("start", {"spec": spec, "run": run})
        return self._guarded("start", timeout, self._exchange)

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        """See `GuestRpc.send`."""
        until = time.monotonic() + timeout
        call = header["do"]
        fields = {name: value for name, value in header.items() if name != "do"}
        piece = max(min(PART, (self._limits.message_bytes - _ROOM) * 3 // 4), 1)
        while len(payload) > piece:
            self._ask("part", {"data": _text_of(payload[:piece])})
            self._guarded(call, until - time.monotonic(), self._exchange)
            payload = payload[piece:]
        self._ask(call, fields | ({"data": _text_of(payload)} if payload else {}))
        self._guarded(call, until - time.monotonic(), self._transmit)

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        """See `GuestRpc.answer`."""
        header = self._then
        if header is None:
            if not self._request:
                self._ask("next", {})
            header = self._guarded(call, timeout, self._exchange)
        self._then = header.pop("then", None)
        return header, base64.b64decode(header.pop("data", ""))

    def close(self) -> None:
        """See `GuestRpc.close`. The server ends the sandbox."""
        self.alive = False
        if self._socket is not None:
            self._socket.close()

    def _ask(self, call: str, fields: Mapping[str, Any]) -> None:
        """Make the next request."""
        request = json.dumps({"id": self._last + 1, "call": call, **fields})
        if len(request) > self._limits.message_bytes:
            most = self._limits.message_bytes
            raise SandboxError(f"{self.name}: {call} would send {len(request):,} bytes, and the server takes {most:,}")
        self._last += 1
        self._request, self._sent = request, False

    def _transmit(self, until: float) -> None:
        """Send the request, if the connection takes it; `_exchange` sends it again where it did not."""
        if self._socket is None or self._sent:
            return
        try:
            self._socket.send(self._request, until)
            self._sent = True
        except TimeoutError:
            raise
        except OSError:
            self._drop()

    def _exchange(self, until: float) -> Header:
        """The result of the request, over as many connections as it takes."""
        fruitless = 0
        while True:
            try:
                if self._socket is None:
                    self._reconnect(until)
                self._transmit(until)
                if self._socket is not None:
                    answer = self._answer_in(self._socket.receive(until))
                    break
            except TimeoutError:
                raise
            except (OSError, EOFError) as error:
                self._drop()
                fruitless += 1
                if fruitless >= FRUITLESS or not self.alive:
                    raise _Gone(f"{fruitless} connections in a row dropped: {_said(error)}") from error
        self._request = ""
        refusal = answer.get("error")
        if refusal is not None:
            if refusal.get("fatal"):
                self.close()
            elsewhere = refusal.get("code") in (CAPACITY, DRAINING)
            raise (NoRoom if elsewhere else SandboxError)(
                f"{self.name}: {refusal.get('message')} ({refusal.get('code')})"
            )
        result: Header = answer["result"]
        return result

    def _answer_in(self, text: str) -> Header:
        answer = json.loads(text)
        if answer.get("id") not in (self._last, None) or not ("result" in answer or "error" in answer):
            raise ValueError(f"an answer to nothing that was asked: {text:.80}")
        found: Header = answer
        return found

    def _drop(self) -> None:
        socket, self._socket, self._sent = self._socket, None, False
        if socket is not None:
            socket.close(in_order=False)

    def _reconnect(self, until: float) -> None:
        """Come back to the session. Raises `_Gone` where that cannot be, or takes too long."""
        began = time.monotonic()
        until = min(until, began + min(RECONNECT_SECONDS, self._limits.resume_seconds))
        absent_since, pause = None, 0.05
        while True:
            if not self.alive:
                raise SandboxError(f"{self.name} was closed")
            now = time.monotonic()
            try:
                # The hello waits until the call that runs has ended, which may be long.
                self._connect(min(now + CONNECT_SECONDS, until), until)
                self.reconnects += 1
                return
            except HandshakeRefused as error:
                if error.status not in (429, 502, 503, 504):
                    raise _Gone(f"it does not have the session any more: {error} ({error.status})") from None
                why: Exception = error
            except (OSError, EOFError) as error:
                absent_since = (absent_since or now) if isinstance(error, ConnectionRefusedError) else None
                why = error
            if absent_since is not None and time.monotonic() - absent_since > ABSENT_SECONDS:
                raise _Gone(f"nothing listens there any more, so its sandboxes have ended: {_said(why)}")
            if time.monotonic() + pause > until:
                raise _Gone(f"the connection is gone, and no other could be opened: {_said(why)}")
            time.sleep(pause * _dice.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)

    def _connect(self, until: float, hello_until: float) -> None:
        try:
            headers = self._address.headers() | ({RESUME_HEADER: self._resume} if self._resume else {})
            tls = self._address.tls()
        except RemoteError as error:
            raise SandboxError(str(error)) from error
        socket = BlockingWebSocket(f"{self._server}{PATH}/session", headers, tls, until)
        try:
            hello = json.loads(socket.receive(hello_until))
            if "error" in hello:
                raise NoRoom(f"{self.name}: {hello['error'].get('message')} ({hello['error'].get('code')})")
            if hello["protocol"] != PROTOCOL:
                raise SandboxError(
                    f"{self.name}: it speaks protocol {hello['protocol']!r:.20}, this client {PROTOCOL}: update the older one"
                )
            limits = {name: value for name, value in hello["limits"].items() if name in vars(self._limits)}
            self._resume, self._limits = str(hello["resume"]), ServiceLimits(**limits)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            socket.close()
            raise ConnectionError(f"its hello is none ({error!r:.100})") from error
        except BaseException:
            socket.close(in_order=False)
            raise
        self._socket = socket
        if not self.alive:  # `close` came meanwhile, from a thread that saw no connection
            socket.close()
            raise SandboxError(f"{self.name} was closed")

    def _guarded(self, call: str, timeout: float, act: Any) -> Any:
        if not self.alive:
            raise SandboxError(f"{self.name} is closed: no {call!r} any more")
        try:
            return act(time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            raise SandboxError(f"{self.name} did not answer {call!r} within {timeout:.1f} s") from None
        except SandboxError:
            raise
        except (OSError, EOFError, ValueError, Refused, _Gone) as error:
            if not self.alive:
                raise SandboxError(f"{self.name} was closed during {call!r}") from error
            self.close()
            kind = BackendDown if isinstance(error, _Gone | OSError | EOFError) else SandboxError
            raise kind(f"{self.name} failed in {call!r}: {_said(error)}") from error
        except BaseException:  # interrupted half way: the rest of the answer would be taken for the next call's
            self.close()
            raise


def _explained(error: HandshakeRefused) -> str:
    if error.status == 401:
        return "it wants another bearer token (401): set AGENTGYM_TOKEN"
    if error.status == 404:
        return "it serves no sandboxes (404): is it `agentgym serve --sandbox`?"
    return f"{error} ({error.status})"


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
