"""Asks servers over HTTP about environments and tasks. Blocking, as task sets are."""

import contextlib
import functools
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode, urlsplit

from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.usage_error import instead
from agentgym.service.client.address import REMOTE_ENV, Address, Unavailable, parse
from agentgym.service.client.balance import pool_of
from agentgym.service.client.blocking_websocket import said_in
from agentgym.service.protocol.frames import ServiceLimits

SECONDS = 10.0
MAKING_SECONDS = ServiceLimits().init_seconds  # for the record of an environment, which is made for it
LARGEST = 64 << 20
RECORD_SECONDS = 60.0
PAGE, PAGES = 100, 500
_JSON = {"Accept": "application/json", "Content-Type": "application/json"}

known_records: dict[Address, tuple[float, dict[str, Any]]] = {}
_asking: dict[Address, threading.Lock] = {}


class NotFound(ValueError):
    """A server answered 404."""


def record_of(address: Address) -> dict[str, Any]:
    """The servers' record of the environment (description, tags, splits, tools, ...), cached for a minute."""
    with _asking.setdefault(address, threading.Lock()):  # many environments are made at once: one asks for all
        told, record = known_records.get(address, (float("-inf"), {}))
        if told + RECORD_SECONDS > time.monotonic():
            return record
        try:
            record = _record_at(address)
        except Unavailable:
            if not record:
                raise
            # An environment may well be made while its servers are away: its first episode waits for them.
        known_records[address] = time.monotonic(), record
        return record


def _record_at(address: Address) -> dict[str, Any]:
    with contextlib.suppress(NotFound):  # the others that are served may take long to make
        answer = ask(address, address.path, seconds=MAKING_SECONDS)
        if isinstance(answer, dict) and answer.get("id") == address.env:
            try:
                return _record(answer)
            except TypeError as error:
                raise Unavailable(f"{address}: GET {address.path} gives no environment: {error}") from error
    known = records_at(address)
    if address.env not in known:
        hint = instead(address.env, known)
        raise NotFound(f"{address.servers[0]} serves no environment {address.env!r}{hint}")
    return known[address.env]


def _record(told: Any) -> dict[str, Any]:
    """A server's record of an environment, in which a null in place of tags, splits or kwargs is left out.

    Raises TypeError if a program could not read it.
    """
    record = {k: v for k, v in dict(told).items() if v is not None or k not in ("tags", "splits", "kwargs")}
    tags, splits, kwargs = record.get("tags", []), record.get("splits", {}), record.get("kwargs", {})
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise TypeError(f"its tags are no list of texts: {tags!r:.100}")
    if not isinstance(splits, dict):
        raise TypeError(f"its splits are no table: {splits!r:.100}")
    for split, about in splits.items():
        if not isinstance(about, dict) or type(about.get("size")) is not int:
            raise TypeError(f"its split {split!r:.50} has no size: {about!r:.100}")
    if not isinstance(kwargs, dict):
        raise TypeError(f"its kwargs are no table: {kwargs!r:.100}")
    return record


def told_of(spec: EnvSpec, split: str) -> dict[str, Any]:
    """The served facts that decide what is measured: `kwargs` and `split` (name, size, source); {} if it is local."""
    record = _record_for(spec)
    told = {"kwargs": record.get("kwargs"), "split": (record.get("splits") or {}).get(split)}
    return {name: value for name, value in told.items() if isinstance(value, dict)}


def _record_for(spec: EnvSpec) -> dict[str, Any]:
    if spec.entry_point != REMOTE_ENV:
        return {}
    return record_of(parse(spec.kwargs["url"], spec.kwargs.get("token_file"), spec.kwargs.get("ca_file")))


def held(spec: EnvSpec) -> EnvSpec:
    """The spec of an environment that must stay as its servers make it now; a local one's is unchanged."""
    kwargs = _record_for(spec).get("kwargs")
    if not isinstance(kwargs, dict):
        return spec
    return replace(spec, kwargs={**spec.kwargs, "expects": {**kwargs, **(spec.kwargs.get("expects") or {})}})


def records_at(address: Address) -> dict[str, dict[str, Any]]:
    """The servers' records of all their environments by id. The address's `env` may be "". Raises `Unavailable`."""
    answer = ask(address, "/envs")
    try:
        return {str(env["id"]): _record(env) for env in answer["envs"]}
    except (TypeError, KeyError, ValueError) as error:
        raise Unavailable(f"{address}: GET /envs gives no list of environments ({error}): {answer!s:.100}") from error


def tasks_at(address: Address, split: str) -> TaskSet:
    """The tasks of a split of the environment at an address. Raises ValueError or `Unavailable`."""
    pages = _Pages(address, split)
    told = pages.page(0)
    where = ", ".join(address.servers) + (f": {told['source']}" if told.get("source") else "")
    return TaskSet(pages, name=str(told.get("name") or f"{address.env}/{split}"), source=where, size=pages.size)


class _Pages:
    """Tasks of a split by position, read from the servers in pages. Picklable, without the pages."""

    def __init__(self, address: Address, split: str):
        self._address, self._split = address, split
        self.size = self.page(0)["size"]

    @functools.cached_property
    def page(self) -> Callable[[int], dict[str, Any]]:
        return functools.lru_cache(PAGES)(self._read)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "page"}

    def __call__(self, position: int) -> Task:
        """The task at a position, which may be negative. Raises IndexError or `Unavailable`."""
        if not -self.size <= position < self.size:
            raise IndexError(f"{self._split} has {self.size} tasks, and none at {position}")
        number, index = divmod(position % self.size, PAGE)
        tasks: list[Task] = self.page(number)["tasks"]
        if index >= len(tasks):
            raise Unavailable(f"{self._address}: the tasks of {self._split!r} have changed since they were counted")
        return tasks[index]

    def _read(self, number: int) -> dict[str, Any]:
        start = number * PAGE
        query = {"split": self._split, "start": start, "stop": start + PAGE}
        answer = ask(self._address, f"{self._address.path}/tasks", query)
        try:
            tasks = [Task.from_json(record) for record in answer["tasks"]]
            total = answer["size"]
            if type(total) is not int or len(tasks) != min(PAGE, max(0, total - start)):
                raise ValueError(f"{len(tasks)} tasks from {start} of {total}")
        except (KeyError, TypeError, ValueError) as error:
            where = f"{self._address}: GET {self._address.path}/tasks"
            raise Unavailable(f"{where} gives no page of tasks: {error}") from error
        return {**answer, "tasks": tasks}


def ask(address: Address, path: str, query: Mapping[str, Any] | None = None, seconds: float = SECONDS) -> Any:
    """GET a path as JSON; if a server fails, the next one is asked. Raises `NotFound` or `Unavailable`."""
    reasons: dict[str, str] = {}
    missing = ""
    known = sorted(pool_of(address.servers).servers, key=lambda server: bool(server.why))
    for server in dict.fromkeys(one.service or one.url for one in known):
        try:
            return _get(address, server, f"{path}?{urlencode(query)}" if query else path, seconds)
        except NotFound as error:
            missing = str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reasons[server] = why_not(error)
    if missing:
        raise NotFound(missing)
    why = "; ".join(f"{server}: {reason}" for server, reason in reasons.items())
    raise Unavailable(f"{address.env or address.servers[0]}: no server answers: {why}")


def _get(address: Address, server: str, target: str, seconds: float) -> Any:
    if seconds > SECONDS:
        fetch(address, server, "/health", address.headers())  # a server that hangs is not waited for
    status, body = fetch(address, server, target, address.headers(), seconds=seconds)
    if status == 200:
        return json.loads(body)
    said = said_in(body) or body[:200].decode("utf-8", "replace").strip()
    if status == 404:
        raise NotFound(f"{server}: {said}")
    hint = ": set AGENTGYM_TOKEN or token_file= to a token of its file" if status in (401, 403) else ""
    raise OSError(f"{status} {said}{hint}")


def fetch(
    address: Address,
    server: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
    seconds: float = SECONDS,
) -> tuple[int, bytes]:
    """Status and body of a GET, or with a body of a POST. Raises OSError, `http.client.HTTPException` or ValueError.

    `seconds` limit each wait, that for a connection at most `SECONDS`; three times as many the whole answer.
    """
    parts = urlsplit(server)
    if parts.hostname is None:
        raise ValueError(f"{server} names no host")
    connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        connect = functools.partial(http.client.HTTPSConnection, context=address.tls())
    connection = connect(parts.hostname, parts.port, timeout=min(seconds, SECONDS))
    with contextlib.closing(connection):
        connection.connect()
        connection.sock.settimeout(seconds)
        connection.response_class = functools.partial(_Answer, seconds)  # type: ignore[assignment]
        connection.request("GET" if body is None else "POST", parts.path + target, body, {**_JSON, **headers})
        answer = connection.getresponse()
        received = bytearray()
        while part := answer.read1(1 << 20):
            received += part
            if len(received) > LARGEST:
                raise ValueError(f"it sends more than {LARGEST >> 20} MiB")
        if answer.length:
            raise ValueError(f"its answer lacks {answer.length} bytes")
    return answer.status, bytes(received)


class _Answer(http.client.HTTPResponse):
    """An answer of which no read waits longer than `seconds`, and all of them together three times as long."""

    def __init__(self, seconds: float, sock: socket.socket, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_InTime(self.fp.detach(), sock, seconds))


class _InTime(io.RawIOBase):
    """What a socket receives. A server that sends a byte at a time keeps to the limit of each wait: so all of them have one."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, seconds: float):
        self._raw, self._sock, self._seconds = raw, sock, seconds
        self._until = time.monotonic() + 3 * seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left > 0:
            self._sock.settimeout(min(self._seconds, left))
            try:
                return self._raw.readinto(buffer)
            except TimeoutError:
                if time.monotonic() < self._until:
                    raise
        raise TimeoutError(f"its answer was not whole after {3 * self._seconds:g} s")

    def close(self) -> None:
        self._raw.close()
        super().close()


def why_not(error: Exception) -> str:
    """Why a server did not answer, and what to do."""
    said = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in said and "mismatch" not in said:
        return f"{said}: a certificate of your own needs ca_file="
    if "WRONG_VERSION_NUMBER" in said:
        return f"{said}: it speaks no TLS there, write http://"
    if isinstance(error, ConnectionRefusedError):
        return f"{said}: it does not run, or not at this port, or listens to its own machine alone"
    return f"{said}: does it want https://?" if isinstance(error, http.client.RemoteDisconnected) else said
