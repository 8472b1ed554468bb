"""The Docker Engine: one client for the process, by the SDK `docker`, and its failures as `SandboxError`.

The address is DOCKER_HOST (with DOCKER_TLS_VERIFY and DOCKER_CERT_PATH), else that of the Docker context in use, else the
usual socket.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentgym.sandbox.api import SandboxError

if TYPE_CHECKING:
    from docker import APIClient

CALL_TIMEOUT = 60  # seconds in which the engine must answer a call; many containers may be starting
PROBE_TIMEOUT = 5  # the same where nothing depends on the answer
CONNECTIONS = 64  # kept open at a time

_clients: dict[tuple[int, str, float], APIClient] = {}


def _settings() -> dict[str, Any]:
    try:
        from docker import ContextAPI
        from docker.utils import kwargs_from_env
    except ImportError as error:
        raise SandboxError(
            f"the docker back end needs the docker package: pip install 'agentgym-toolkit[docker]' ({error})"
        ) from error
    settings = kwargs_from_env()
    if "base_url" not in settings:
        settings = ContextAPI.kwargs_from_context() | settings
    return settings


def address() -> str:
    return _settings().get("base_url") or "unix:///var/run/docker.sock"


def client(timeout: float = CALL_TIMEOUT) -> APIClient:
    """The process's client for the engine at `address()`. SandboxError: no engine answers, or no package `docker`."""
    settings = _settings()
    key = (os.getpid(), address(), timeout)
    if key not in _clients:
        from docker import APIClient

        if key[1].startswith("ssh://") and find_spec("paramiko") is None:
            raise SandboxError(f"reaching the Docker Engine at {key[1]} needs paramiko: pip install paramiko")
        with failures("connecting"):
            made = APIClient(version="auto", timeout=timeout, max_pool_size=CONNECTIONS, **settings)
        _clients.setdefault(key, made)
    return _clients[key]


def unavailable() -> str | None:
    """The reason why no engine can be used, in one line; None if one answers."""
    try:
        probe = client(PROBE_TIMEOUT)
        with failures("connecting"):
            probe.ping()
    except SandboxError as error:
        return str(error)
    return None


@dataclass
class _Held:
    """A connection to an engine that ends only when the engine does."""

    key: tuple[int, str]
    since: float
    broken: bool = False


_holding = threading.Lock()
_held: _Held | None = None


def hold() -> None:
    """Keep a connection to the engine, whose end tells of a restart. It may fail silently."""
    global _held  # noqa: PLW0603 - one for the process
    key = (os.getpid(), address())
    with _holding:
        if _held is not None and _held.key == key and not _held.broken:
            return
        made = _Held(key, time.monotonic())
        try:
            with failures("connecting"):
                events = client().events(filters={"type": ["daemon"]})
        except SandboxError:
            return
        made.since = time.monotonic()
        _held = made

    def wait() -> None:
        with suppress(Exception):  # however it ends, it has ended
            deque(events, maxlen=0)
        made.broken = True

    threading.Thread(target=wait, name="docker engine", daemon=True).start()


def unbroken_since(then: float) -> bool:
    """True if the engine answers and was not restarted since a moment of `time.monotonic`."""
    held = _held
    return held is not None and held.since <= then and unavailable() is None and not held.broken


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Raises failures of the engine as a SandboxError that says what was tried, where, and why it failed."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException, Timeout
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (DockerException, RequestException, HTTPError, OSError) as error:
        if isinstance(error, APIError):
            how = f"refuses: {error.explanation or error}"
        else:
            how = "does not answer in time" if isinstance(error, Timeout) else f"does not answer: {_root(error)}"
        # The layers below the SDK's error say the same again, in pages of traceback.
        error.__cause__, error.__context__ = None, None
        raise SandboxError(f"{what}: the Docker Engine at {address()} {how}") from error


def _root(error: BaseException) -> str:
    seen: BaseException = error
    while (below := seen.__cause__ or seen.__context__) is not None:
        seen = below
    return f"{type(seen).__name__}: {seen}" if seen is not error else str(error)
