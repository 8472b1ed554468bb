"""Names of this machine, as a `Host` header or a listening address has them."""

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
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


class NoPages:
    """ASGI middleware that answers 403 to web pages; vLLM's server lets pages of all sites read its answers.

    A request is a page's if it has an `Origin`, or a `Host` that is neither this machine nor the address that it came to.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host, address = headers.get(b"host"), scope.get("server") or ("",)
        ours = host is None or is_ours(host.decode("latin-1"), (str(address[0]),))
        if ours and b"origin" not in headers:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            plain = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": plain})
            await send({"type": "http.response.body", "body": b"web pages may not ask this server"})
