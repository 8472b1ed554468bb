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
    """The name in a `Host` header, in lower case, without port and brackets."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


class NoPages:
    """ASGI middleware that answers 403 to web pages; vLLM's server lets pages of all sites read its answers.

    A request is a page's if it has an `Origin`, or a `Host` that is neither this machine nor the address that it came to.
    """

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _is_of_a_page(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"web pages may not ask this server"})


def _is_of_a_page(scope: _Scope) -> bool:
    headers = dict(scope["headers"])
    host = headers.get(b"host")
    address = scope.get("server") or ("",)
    return b"origin" in headers or (host is not None and not is_ours(host.decode("latin-1"), (str(address[0]),)))
