"""One connection to a session: handshake, hello and close; and what the work of one event loop shares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentgym.policies import endpoints
from agentgym.service.client.address import Address
from agentgym.service.client.blocking_websocket import VANISHED_SECONDS
from agentgym.service.protocol import frames
from agentgym.service.worker.websocket import keep_alive
from agentgym.storage.jsonl import line_of

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
HELLO_SECONDS = frames.ServiceLimits().init_seconds
CLOSE_SECONDS = 2.0
LARGEST_ANSWER = 64 << 20
_ABSENT = "there is no such argument"
_tasks: set[asyncio.Task[Any]] = set()  # a loop holds its tasks only weakly
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]
_shared = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class NotOpened(Exception):
    """A server gave no session."""

    why: str
    wait: float | None = None  # seconds that a full server asked to be left alone; None: it failed
    lasting: bool = False  # trying again will not help: a wrong token, or an environment that it does not serve
    absent: bool = False  # nothing listens there
    broken: bool = False  # the server itself reports a failure, not a proxy before a restarting one (502, 504)

    def __str__(self) -> str:
        return self.why


@dataclass
class Hello:
    session: str
    resume: str
    env: dict[str, Any]
    limits: frames.ServiceLimits

    @classmethod
    def read(cls, text: str) -> Hello:
        """Parse a hello. Raises `NotOpened` for a refusal or anything else."""
        try:
            record = json.loads(text)
            if "error" in record:
                code, message = str(record["error"].get("code")), record["error"].get("message")
                wait = 1.0 if code in (frames.CAPACITY, frames.DRAINING) else None
                lasting, broken = code == frames.RESUME_REFUSED, code == frames.ENV_ERROR
                raise NotOpened(f"{code}: {message}", wait, lasting=lasting, broken=broken)
            if record["protocol"] != frames.PROTOCOL:
                why = f"it speaks protocol {record['protocol']!r:.20}, this client {frames.PROTOCOL}: update the older"
                raise NotOpened(why, lasting=True)
            env = record["env"]
            if not isinstance(env, dict) or not isinstance(env.get("tools", []), list):
                raise TypeError("env is no record")
            served = frames.ServiceLimits.of_hello(record.get("limits"))
            return cls(str(record["session"]), str(record["resume"]), env, served)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotOpened(f"its hello is not that of {frames.NAME} ({error!r:.100}): {text!r:.100}") from error


async def connect(
    address: Address, server: str, resume: str | None, expects: Mapping[str, Any], running_seconds: float = 0.0
) -> tuple[aiohttp.ClientWebSocketResponse, Hello]:
    """Open a session, or with `resume` go on with one, whose calls may run for so long. Raises `NotOpened`."""
    import aiohttp

    headers = address.headers()
    if resume is not None:
        headers[frames.RESUME_HEADER] = resume
    ws: aiohttp.ClientWebSocketResponse | None = None
    opened, begun = False, time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            ws = await open_websocket(address, f"{server}{address.path}/session", headers)
        message = await _first_message(ws, address, server, max(HELLO_SECONDS, running_seconds))
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise NotOpened(f"it closed without a hello ({ws.close_code or 'reset'})")
        hello = Hello.read(message.data)
        if wrong := difference(expects, hello.env.get("kwargs")):
            await close_in_order(ws)
            raise NotOpened(wrong, lasting=True)
        opened = True
        return ws, hello
    except aiohttp.WSServerHandshakeError as error:
        raise _of_status(error, address, resume) from error
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError) as error:
        raise NotOpened(f"TLS failed: {said(error)}: a certificate of your own needs ca_file=", lasting=True) from error
    except TimeoutError:
        raise NotOpened(f"no session within {time.monotonic() - begun:.0f} s") from None
    except (OSError, aiohttp.ClientError) as error:
        refused = isinstance(getattr(error, "os_error", error), ConnectionRefusedError)
        raise NotOpened(said(error), absent=refused) from error
    finally:
        if ws is not None and not opened and resume is None:
            # Cut off, the server would keep the new session for a client that comes back.
            await close_in_order(ws, seconds=0.1)
        elif not opened:
            cut(ws)


async def _first_message(
    ws: aiohttp.ClientWebSocketResponse, address: Address, server: str, seconds: float
) -> aiohttp.WSMessage:
    """It comes once the environment is made, or its call has ended: the server's health must answer meanwhile."""
    receiving = asyncio.ensure_future(ws.receive())
    try:
        async with asyncio.timeout(seconds):
            while not (await asyncio.wait([receiving], timeout=CONNECT_SECONDS))[0]:
                await get(address, server, "/health", CONNECT_SECONDS)
        return receiving.result()
    finally:
        receiving.cancel()


async def get(
    address: Address, server: str, path: str, seconds: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """The status and body of a GET. Raises OSError or aiohttp.ClientError."""
    import aiohttp

    http = await endpoints.session()
    timeout, ssl = aiohttp.ClientTimeout(total=seconds), address.tls() or True
    headers, name = address.headers() if headers is None else headers, address.server_hostname
    async with http.get(f"{server}{path}", headers=headers, timeout=timeout, ssl=ssl, server_hostname=name) as answer:
        received = bytearray()
        async for part in answer.content.iter_any():
            received += part
            if len(received) > LARGEST_ANSWER:
                raise OSError(f"it sends more than {LARGEST_ANSWER >> 20} MiB")
        return answer.status, bytes(received)


async def open_websocket(
    address: Address, url: str, headers: Mapping[str, str], **options: Any
) -> aiohttp.ClientWebSocketResponse:
    """A WebSocket of this event loop's HTTP session. Raises aiohttp's errors."""
    import aiohttp

    http = await endpoints.session()
    timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)  # type: ignore[call-arg]
    tls = {"ssl": address.tls() or True, "server_hostname": address.server_hostname}
    settings = {"max_msg_size": LARGEST_ANSWER, "timeout": timeout, **tls, **options}
    ws = await http.ws_connect(url, headers=headers, **settings)
    if (connection := ws.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):
            keep_alive(connection, VANISHED_SECONDS)
    return ws


def _of_status(error: aiohttp.WSServerHandshakeError, address: Address, resume: str | None) -> NotOpened:
    status = error.status
    if status in (429, 503):
        wait = endpoints.retry_after(error.headers.get("Retry-After") if error.headers else None)
        what = "this token has all the sessions that it may have" if status == 429 else "it is full or draining"
        return NotOpened(f"{what} ({status})", wait=1.0 if wait is None else wait)
    why = f"it answered {status} {error.message}"
    if status in (502, 504):
        return NotOpened(why)
    if status >= 500:
        return NotOpened(f"{why}: its log says why", broken=True)
    if status in (401, 403):
        what = "the resume token or the bearer token" if resume else "the bearer token"
        why = f"it refuses {what} ({status}): set AGENTGYM_TOKEN or token_file="
    elif resume is not None:
        why = f"it does not have the session any more ({status})"
    elif status == 404:
        why = f"it serves no environment {address.env!r} (404): GET /envs lists them"
    return NotOpened(why, lasting=True)


async def close_in_order(ws: aiohttp.ClientWebSocketResponse, seconds: float = CLOSE_SECONDS) -> None:
    """Close with a close frame, whose answer is waited for this long."""
    with contextlib.suppress(Exception):  # it is gone already, or does not answer: either way nothing is left to do
        await asyncio.wait_for(ws.close(), seconds)


def cut(ws: aiohttp.ClientWebSocketResponse | None) -> None:
    """Cut a connection from any thread, also if its event loop has ended."""
    connection = None if ws is None else ws.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def is_gone(ws: aiohttp.ClientWebSocketResponse | None) -> bool:
    """True if the connection has ended; reads nothing from it."""
    connection = None if ws is None else ws.get_extra_info("socket")
    return connection is None or connection.fileno() < 0


def said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def difference(expects: Mapping[str, Any], made_with: Any) -> str:
    """The difference between the arguments `expects` and those of a server, in words; "" if they agree."""
    there = made_with if isinstance(made_with, dict) else {}
    for name, value in expects.items():
        # As JSON, which is how the server told it: a tuple here is a list there.
        if line_of(there.get(name, _ABSENT)) != line_of(value):
            what = f"{name}={there[name]!r}" if name in there else f"no {name}"
            hint = "serve it with this value (--kwargs), or do not set it here (training: env=remote)"
            return f"{name}={value!r} is expected, and the server makes it with {what}: {hint}"
    return ""


def in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def shared(key: Hashable, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of `work()`. Callers with the same key share it while it runs."""
    running = _shared.setdefault(asyncio.get_running_loop(), {})
    if key not in running or running[key].done():
        running[key] = task = in_background(work())
        # The task holds the loop, which would else stay as long as the process.
        task.add_done_callback(lambda done: running.pop(key) if running.get(key) is done else None)
    return await asyncio.shield(running[key])  # a caller that is cancelled leaves it to the others
