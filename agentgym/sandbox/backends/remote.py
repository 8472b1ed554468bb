"""The remote back end: sandboxes on servers (`agentgym serve --sandbox`), with limits and images kept there.

`RemoteChannel` speaks `agentgym/service/protocol/sandbox_frames.py`. It reopens a dropped connection and sends an unanswered
request again with the same id, so the server runs it once.
"""

import base64
import http.client
import itertools
import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from agentgym.sandbox.api import BackendDown, SandboxError, SandboxesInUse, SandboxSpec
from agentgym.sandbox.guest.guest_sandbox import GRACE, GuestRpc, GuestSandbox, Header
from agentgym.sandbox.images import build as images
from agentgym.service.client.address import Address, RemoteError, is_url, parse
from agentgym.service.client.blocking_websocket import BlockingWebSocket, HandshakeRefused, said_in
from agentgym.service.client.lookup import fetch
from agentgym.service.protocol.frames import BAD_REQUEST, CAPACITY, DRAINING, RESUME_HEADER, Refused, ServiceLimits
from agentgym.service.protocol.sandbox_frames import PART, PATH, PROTOCOL

URL_VARIABLE = "AGENTGYM_SANDBOX_URL"
CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = 20.0
# Sandboxes end with their server: one at whose port nothing listens has no more of them, unless the network says so in error.
ABSENT_SECONDS = 3.0
FRUITLESS = 8  # connections in a row over which no answer came
_ANSWER_SECONDS = 60.0
_ROOM = 4096  # bytes of a request besides its data, at least
_REFUSALS = {
    401: "it rejects the bearer token (401): set AGENTGYM_TOKEN",
    404: "it serves no sandboxes (404): is it `agentgym serve --sandbox`?",
}
_turn = itertools.count()
_dice = random.Random()  # the global one is the episodes'


def urls_of(name: str, what: str = "sandbox") -> str:
    """The URLs of a back end, joined by commas; for "remote" those of AGENTGYM_SANDBOX_URL. ValueError if malformed or missing."""
    text = name if name != "remote" else os.environ.get(URL_VARIABLE, "")
    if not text.strip():
        raise ValueError(f"{what}=remote: {URL_VARIABLE} says where: http://HOST:PORT of an `agentgym serve --sandbox`")
    return ",".join(_address(text, what if name != "remote" else URL_VARIABLE).servers)


def _address(urls: str, what: str = "sandbox") -> Address:
    wanted = [part.strip().rstrip("/") + PATH for part in urls.split(",") if part.strip()]
    if any(not is_url(one) or urlsplit(one).path != PATH for one in wanted):
        form = "http://HOST:PORT or https://HOST:PORT of a server of sandboxes, nothing after it"
        raise ValueError(f"{what}={urls}: write {form}")
    return parse(wanted)


def why_not(urls: str, image: str) -> str | None:
    reasons = []
    address = _address(urls)
    for server in address.servers:
        try:
            _check_image(address, server, _image_there(image))
            return None
        except SandboxError as error:
            reasons.append(str(error))
    return "; ".join(reasons)


def open_remote(urls: str, spec: SandboxSpec, run: str) -> GuestSandbox:
    """Start a sandbox on a server; of several URLs, joined by commas, on the next one that has room.

    Raises SandboxError; Never if no server has enough for it.
    """
    if spec.socket:
        raise SandboxError(f"a sandbox at {urls} cannot reach the socket {spec.socket} of this machine")
    address = _address(urls)
    first = next(_turn) % len(address.servers)
    failures: list[NoRoom] = []
    for server in address.servers[first:] + address.servers[:first]:
        try:
            channel = RemoteChannel(address, server)
            try:
                fields = {**vars(spec), "env": dict(spec.env), "image": _image_there(spec.image)}
                for name in ("writable_root", "socket"):  # which older servers do not know
                    if not fields[name]:
                        del fields[name]
                told = channel.start(fields, run, spec.start_timeout + GRACE)
            except BaseException:
                channel.close()
                raise
            channel.name = f"{told['sandbox']} {channel.name}"
            return GuestSandbox(channel, spec, told["facts"])
        except NoRoom as error:
            failures.append(error)
    up = any(isinstance(error, Full) for error in failures)
    never = all(isinstance(error, Never) for error in failures)
    raise (Never if never else SandboxesInUse if up else SandboxError)("; ".join(map(str, failures)))


def _image_there(image: str) -> str:
    """An image as a server knows it: a folder's path means nothing there, but what was built from an equal folder is the same."""
    return images.recipe(image).tag if images.is_path(image) else image


def _check_image(address: Address, server: str, image: str) -> None:
    headers, _ = _credentials(address)
    try:
        status, body = fetch(address, server, f"{PATH}?image={quote(image, safe='')}", headers, seconds=_ANSWER_SECONDS)
        if status == 200:
            json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        todo = "start `agentgym serve --sandbox` there"
        raise SandboxError(f"no server of sandboxes answers at {server}: {_said(error)}: {todo}") from error
    if status == 401 or (status == 404 and b"NO_SANDBOX" not in body):
        raise SandboxError(f"{server}: {_REFUSALS[status]}")
    if status != 200:
        raise SandboxError(f"{server}: {said_in(body) or f'it answered {status}'}")


def _credentials(address: Address) -> tuple[dict[str, str], Any]:
    try:
        return address.headers(), address.tls()
    except RemoteError as error:
        raise SandboxError(str(error)) from error


class NoRoom(BackendDown):
    """This server has no sandbox to give now, cannot be reached, or refuses what was asked: no program's doing."""


class Full(NoRoom, SandboxesInUse):
    """All sessions of this server are in use."""


class Never(NoRoom, ValueError):
    """This server's limits do not allow what was asked for, and never will."""


class _Gone(Exception):
    """The session is lost, or its server is: coming back makes no sense."""


class RemoteChannel(GuestRpc):
    """A session on a server. NoRoom if the server gives no session, another SandboxError if it refuses the client."""

    failures = (*GuestRpc.failures, Refused, _Gone)

    def __init__(self, address: Address, server: str):
        super().__init__(f"at {server}")
        self.reconnects = 0
        self._address = address
        self._server = server
        self._limits = ServiceLimits()
        self._resume = ""
        self._last = 0
        self._request = ""  # the one whose answer is awaited
        self.sent = False
        self._then: Header | None = None  # an answer that came with the one before
        self._socket: BlockingWebSocket | None = None
        until = time.monotonic() + CONNECT_SECONDS
        try:
            self._connect(until, until)
        except HandshakeRefused as error:
            text = f"{server} gives no sandbox: {_REFUSALS.get(error.status, f'{error} ({error.status})')}"
            if error.status == 429 or error.code == CAPACITY:
                raise Full(text) from None
            raise (NoRoom if error.status >= 500 else SandboxError)(text) from None
        except (OSError, EOFError, Refused) as error:
            raise NoRoom(f"{server} gives no sandbox: {_said(error)}: is `agentgym serve --sandbox` there?") from error

    def start(self, spec: Mapping[str, Any], run: str, timeout: float) -> Header:
        self._ask("start", {"spec": spec, "run": run})
        return self.guarded("start", timeout, self._exchange)

    def send(self, header: Header, payload: bytes = b"", *, timeout: float) -> None:
        until = time.monotonic() + timeout
        fields = dict(header)
        call = fields.pop("do")
        piece = max(min(PART, (self._limits.message_bytes - _ROOM) * 3 // 4), 1)
        while len(payload) > piece:
            self._ask("part", {"data": base64.b64encode(payload[:piece]).decode()})
            self.guarded(call, until - time.monotonic(), self._exchange)
            payload = payload[piece:]
        self._ask(call, fields | ({"data": base64.b64encode(payload).decode()} if payload else {}))
        self.guarded(call, until - time.monotonic(), self._transmit)

    def answer(self, call: str, *, timeout: float) -> tuple[Header, bytes]:
        header = self._then
        if header is None:
            if not self._request:
                self._ask("next", {})
            header = self.guarded(call, timeout, self._exchange)
        self._then = header.pop("then", None)
        return header, base64.b64decode(header.pop("data", ""))

    def close(self) -> None:
        self.alive = False
        if self._socket is not None:
            self._socket.close()

    def failed(self, what: str, error: Exception) -> SandboxError:
        kind = BackendDown if isinstance(error, _Gone | OSError | EOFError) else SandboxError
        return kind(f"{what}: {_said(error)}")

    def _ask(self, call: str, fields: Mapping[str, Any]) -> None:
        request = json.dumps({"id": self._last + 1, "call": call, **fields})
        if len(request) > (most := self._limits.message_bytes):
            what = f"{call} would send {len(request):,} bytes, and the server takes {most:,}"
            raise SandboxError(f"sandbox {self.name}: {what}")
        self._last += 1
        self._request, self.sent = request, False

    def _transmit(self, until: float) -> None:
        """Send the request, if the connection takes it; `_exchange` sends it again where it did not."""
        if self._socket is None or self.sent:
            return
        try:
            self._socket.send(self._request, until)
            self.sent = True
        except TimeoutError:
            raise
        except OSError:
            self._drop()

    def _exchange(self, until: float) -> Header:
        fruitless = 0
        while True:
            try:
                if self._socket is None:
                    self._reconnect(until)
                self._transmit(until)
                if self._socket is not None:
                    text = self._socket.receive(until)
                    break
            except TimeoutError:
                raise
            except (OSError, EOFError) as error:
                self._drop()
                fruitless += 1
                if fruitless >= FRUITLESS or not self.alive:
                    raise _Gone(f"{fruitless} connections in a row dropped: {_said(error)}") from error
        answer = json.loads(text)
        if answer.get("id") not in (self._last, None) or not ("result" in answer or "error" in answer):
            raise ValueError(f"an answer to no open request: {text:.80}")
        self._request = ""
        if (refusal := answer.get("error")) is not None:
            if refusal.get("fatal"):
                self.close()
            raise self._refused(refusal, elsewhere=refusal.get("code") == DRAINING)
        result: Header = answer["result"]
        return result

    def _refused(self, refusal: Mapping[str, Any], elsewhere: bool) -> SandboxError:
        code = refusal.get("code")
        kind = Full if code == CAPACITY else Never if code == BAD_REQUEST else NoRoom if elsewhere else SandboxError
        return kind(f"sandbox {self.name}: {refusal.get('message')} ({code})")

    def _drop(self) -> None:
        socket, self._socket, self.sent = self._socket, None, False
        if socket is not None:
            socket.close(in_order=False)

    def _reconnect(self, until: float) -> None:
        """Come back to the session. Raises `_Gone` where that cannot be, or takes too long."""
        until = min(until, time.monotonic() + min(RECONNECT_SECONDS, self._limits.resume_seconds))
        absent_since, pause = None, 0.05
        while True:
            if not self.alive:
                raise SandboxError(f"sandbox {self.name} was closed")
            now = time.monotonic()
            try:
                # The hello waits until the call that runs has ended, which may be long.
                self._connect(min(now + CONNECT_SECONDS, until), until)
                self.reconnects += 1
                return
            except HandshakeRefused as error:
                if error.status not in (429, 502, 503, 504):
                    raise _Gone(f"the server no longer has the session: {error} ({error.status})") from None
                why: Exception = error
            except (OSError, EOFError) as error:
                absent_since = (absent_since or now) if isinstance(error, ConnectionRefusedError) else None
                why = error
            if absent_since is not None and time.monotonic() - absent_since > ABSENT_SECONDS:
                raise _Gone(f"no server listens there any more, so its sandboxes have ended: {_said(why)}")
            if time.monotonic() + pause > until:
                raise _Gone(f"the connection was lost and could not be reopened: {_said(why)}")
            time.sleep(pause * _dice.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)

    def _connect(self, until: float, hello_until: float) -> None:
        headers, tls = _credentials(self._address)
        if self._resume:
            headers = {**headers, RESUME_HEADER: self._resume}
        socket = BlockingWebSocket(f"{self._server}{PATH}/session", headers, tls, until)
        try:
            hello = json.loads(socket.receive(hello_until))
            if "error" in hello:
                raise self._refused(hello["error"], elsewhere=True)
            if hello["protocol"] != PROTOCOL:
                theirs = f"the server speaks protocol {hello['protocol']!r:.20}"
                raise SandboxError(f"sandbox {self.name}: {theirs}, this client {PROTOCOL}: update the older one")
            self._resume, self._limits = str(hello["resume"]), ServiceLimits.of_hello(hello["limits"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            socket.close()
            raise ConnectionError(f"its hello is invalid ({error!r:.100})") from error
        except BaseException:
            socket.close(in_order=False)
            raise
        self._socket = socket
        if not self.alive:  # `close` came meanwhile, from a thread that saw no connection
            socket.close()
            raise SandboxError(f"sandbox {self.name} was closed")


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
