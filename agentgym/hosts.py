"""Names of this machine, as a `Host` header or a listening address has them."""

import hmac
import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

KEY_VARIABLE = "AGENTGYM_SERVER_KEY"  # of a vLLM server that other machines reach
LOOPBACK = "127.0.0.1"
LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def is_ours(host: str, allowed: Collection[str] = ()) -> bool:
    """True if a `Host` header names this machine, by any port: it may be forwarded (`ssh -L`).

    With DNS rebinding, a foreign web page is of the same origin as this server, but its browser sends the page's own name. So a
    server without tokens answers only under names that others cannot point elsewhere: local ones and `allowed` (lower case).
    """
    name = host_name(host)
    return name in LOCAL_HOSTS or name.endswith(".localhost") or name in allowed


def host_name(host: str) -> str:
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


class ServerGuard:
    """ASGI middleware of vLLM's server: 403 to web pages, whose browsers it lets read all answers, and 401 without the run's key.

    A request is a page's if it has an `Origin`, or a `Host` that is neither this machine nor the address that it came to.
    The key, if `AGENTGYM_SERVER_KEY` holds one, guards every path: vLLM's own key leaves those open that run code.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]):
        self._app = app
        self._bearer = f"Bearer {key}".encode() if (key := os.environ.get(KEY_VARIABLE)) else None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host, address = headers.get(b"host"), scope.get("server") or ("",)
        ours = host is None or is_ours(host.decode("latin-1"), (str(address[0]),))
        if not ours or b"origin" in headers:
            await _refuse(scope["type"], send, 403, b"web pages may not ask this server")
        elif self._bearer and not hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
            await _refuse(scope["type"], send, 401, b"this server answers only to the run that started it")
        else:
            await self._app(scope, receive, send)


async def _refuse(kind: str, send: _Send, status: int, why: bytes) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    plain = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": plain})
    await send({"type": "http.response.body", "body": why})
