"""Request bodies, inflated within a bound and only after authentication."""

import asyncio
import zlib
from typing import Any

from aiohttp import web

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Where it is kept with its request: by a key of aiohttp's, which older releases do not have.
_BODY: Any = getattr(web, "RequestKey", lambda name, _: name)("agentgym.body", bytes)


async def body_of(request: web.Request) -> bytes:
    """The body of a request, inflated if `Content-Encoding` is gzip or deflate. Raises HTTP 400, 413 or 415."""
    body: bytes | None = request.get(_BODY)
    if body is None:
        request[_BODY] = body = await _inflated(request, await request.read())
    return body


async def _inflated(request: web.Request, body: bytes) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity" or not body:
        return body
    if encoding not in _WINDOWS:
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding can be gzip, deflate or none, not {encoding!r:.50}")
    most = request.client_max_size
    try:
        found = await asyncio.to_thread(inflated, body, encoding, most)
    except (zlib.error, EOFError):
        raise web.HTTPBadRequest(text=f"the body is not {encoding}, as its Content-Encoding says") from None
    if found is None:
        raise web.HTTPRequestEntityTooLarge(most, text=f"the body inflates to more than {most:,} bytes")
    return found


def inflated(body: bytes, encoding: str, most: int) -> bytes | None:
    """The inflated body; None if it has more than `most` bytes. Raises `zlib.error` or `EOFError`."""
    raw = (
        encoding == "deflate" and body[0] & 15 != 8
    )  # without the header that the standard wants, as some clients send it
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if raw else _WINDOWS[encoding])
    found = inflate.decompress(body, most + 1)
    if len(found) > most:
        return None
    if not inflate.eof:
        raise EOFError
    return found
