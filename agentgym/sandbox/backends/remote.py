"""The remote back end: sandboxes on servers (`agentgym serve --sandbox`), with limits and images kept there."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import time
from urllib.parse import quote, urlsplit

from agentgym.sandbox.api import SandboxError, SandboxSpec
from agentgym.sandbox.backends.remote_channel import CONNECT_SECONDS, NoRoom, RemoteChannel
from agentgym.sandbox.guest.guest_sandbox import GRACE, GuestSandbox
from agentgym.service.client.address import Address, RemoteError, is_url, parse
from agentgym.service.client.blocking_websocket import dial, said_in
from agentgym.service.protocol.sandbox_frames import PATH

URL_VARIABLE = "AGENTGYM_SANDBOX_URL"
_ANSWER_SECONDS = 60.0
_LARGEST_ANSWER = 1 << 20
_turn = itertools.count()


def urls_of(name: str, what: str = "sandbox") -> str:
    """The URLs that a back end's name means, joined by commas: itself, or for "remote" AGENTGYM_SANDBOX_URL.

    Raises:
        ValueError: they are malformed, or there are none.
    """
    text = name if name != "remote" else os.environ.get(URL_VARIABLE, "")
    if not text.strip():
        raise ValueError(f"{what}=remote: {URL_VARIABLE} says where: http://HOST:PORT of an `agentgym serve --sandbox`")
    return ",".join(_address(text, what if name != "remote" else URL_VARIABLE).servers)


def _address(urls: str, what: str = "sandbox") -> Address:
    wanted = [part.strip().rstrip("/") + PATH for part in urls.split(",") if part.strip()]
    if any(not is_url(one) or urlsplit(one).path != PATH for one in wanted):
        raise ValueError(
            f"{what}={urls}: write http://HOST:PORT or https://HOST:PORT of a server of sandboxes, nothing after it"
        )
    return parse(wanted)


def why_not(urls: str, image: str) -> str | None:
    """The reason why no server has an image, in one line; None if one has it. `open_remote` passes over servers that are down."""
    reasons = []
    for server in _address(urls).servers:
        try:
            _asked(urls, server, f"{PATH}?image={quote(image, safe='')}")
        except SandboxError as error:
            reasons.append(str(error))
        else:
            return None
    return "; ".join(reasons)


def open_remote(urls: str, spec: SandboxSpec, run: str) -> GuestSandbox:
    """Start a sandbox on a server; with several, on the next one that has room.

    Args:
        urls: of servers, joined by commas.
        spec: its image is looked for there.
        run: whose it is; its label there.

    Raises:
        SandboxError: it could not be started; says why.
    """
    address = _address(urls)
    first = next(_turn)
    reasons = []
    for number in range(len(address.servers)):
        server = address.servers[(first + number) % len(address.servers)]
        try:
            return _opened(RemoteChannel(address, server), spec, run)
        except NoRoom as error:
            reasons.append(str(error))
    raise SandboxError("; ".join(reasons))


def _opened(channel: RemoteChannel, spec: SandboxSpec, run: str) -> GuestSandbox:
    try:
        told = channel.start({**vars(spec), "env": dict(spec.env)}, run, spec.start_timeout + GRACE)
    except BaseException:
        channel.close()
        raise
    channel.name = f"{told['sandbox']} at {channel.name.removeprefix('sandbox at ')}"
    return GuestSandbox.greeted(channel, spec, channel.name, told["facts"])


def _asked(urls: str, server: str, path: str) -> dict[str, object]:
    """The answer of a server to a GET. SandboxError if there is none, or a refusal."""
    try:
        address = _address(urls)
        headers, tls = address.headers(), address.tls()
    except RemoteError as error:
        raise SandboxError(str(error)) from error
    parts = urlsplit(server)
    try:
        connection = http.client.HTTPConnection(parts.netloc)
        connection.sock = dial(server, tls, time.monotonic() + CONNECT_SECONDS)
        try:
            connection.sock.settimeout(_ANSWER_SECONDS)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read(_LARGEST_ANSWER)
        finally:
            connection.close()
        if answer.status == 200:
            found: dict[str, object] = json.loads(body)
            return found
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SandboxError(
            f"no server of sandboxes answers at {server}: {error or type(error).__name__}: start `agentgym serve --sandbox` there"
        ) from error
    if answer.status == 401:
        raise SandboxError(f"{server} wants another bearer token (401): set AGENTGYM_TOKEN")
    said = said_in(body)
    if answer.status == 404 and "NO_SANDBOX" not in body.decode(errors="replace"):
        raise SandboxError(f"{server} serves no sandboxes (404): is it `agentgym serve --sandbox`?")
    raise SandboxError(f"{server}: {said or f'it answered {answer.status}'}")
