"""Queries on a database inside a sandbox: the host's side of `query_program.py`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from importlib import resources
from typing import Any

from agentgym import sandbox
from agentgym.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec, Session
from agentgym_envs.sql.database import Database

log = logging.getLogger(__name__)

SPEC = SandboxSpec(image="sql", memory=256 << 20, pids=16, disk=16 << 20)
FILE, PROGRAM = "/private/database.sqlite", "/private/query_program.py"
COMMAND = ("python3", "-I", "-S", PROGRAM)
WAIT = 45.0  # seconds for a sandbox; less than a step has, so that this error, which says why, comes first
GRACE = 1.0  # seconds after which a query that did not stop by itself is stopped from outside


@dataclass(frozen=True)
class Cut:
    """A value of which only the beginning was kept: what is shown, and how many characters or bytes were left out."""

    shown: str | bytes
    left: int


@dataclass(frozen=True)
class Found:
    """What a query found.

    Attributes:
        columns: their names.
        rows: the first of its rows; with `cell` set, long values are `Cut`.
        total: how many rows there are.
        whole: False where counting was given up: there are `total` or more.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    total: int
    whole: bool


@dataclass(frozen=True)
class Problem:
    """Why a query found nothing: "sql" (SQLite's message), "refused", "time", "memory", "size" or "died"."""

    kind: str
    text: str


@dataclass(frozen=True)
class Bounds:
    """How much of a result is wanted: rows, bytes of JSON, characters of a value (None: all), and seconds."""

    rows: int
    bytes: int
    cell: int | None
    seconds: float


class Queries:
    """Runs queries on one database, read only, each with nothing left of the one before.

    The sandbox is acquired by the first query. A query that kills the program there is answered with a `Problem`, and the
    program is started again. A sandbox that fails is replaced once, since a query is safe to repeat.

    Args:
        database: which.
        backend: of the sandbox; see `agentgym.sandbox.acquire`.
    """

    def __init__(self, database: Database, backend: str | None = None):
        self._database = database
        self._backend = backend
        self._box: Sandbox | None = None
        self._session: Session | None = None

    def ask(self, query: str, bounds: Bounds) -> Found | Problem:
        """Run a query.

        Raises:
            SandboxError: two sandboxes failed.
            ValueError: the database's file cannot be opened.
        """
        request = json.dumps(
            {
                "database": FILE,
                "query": query.encode("utf-8", "replace").decode("utf-8"),
                "rows": bounds.rows,
                "bytes": bounds.bytes,
                "cell": bounds.cell,
                "seconds": bounds.seconds,
            }
        )
        try:
            return self._once(request, bounds.seconds)
        except SandboxError as error:
            if self._box is None:  # none was to be had, and the time for waiting is used up
                raise
            log.warning("a sandbox failed in a query, trying a fresh one: %s", error)
            self.close()
        try:
            return self._once(request, bounds.seconds)
        except SandboxError:
            self.close()
            raise

    def close(self) -> None:
        """Give the sandbox back. May be called twice; a later query acquires another."""
        box, self._box, self._session = self._box, None, None
        if box is not None:
            box.close()

    def _once(self, request: str, seconds: float) -> Found | Problem:
        result = self._run(request, seconds)
        if _died(result):  # perhaps before the query came: the next time it will have been the query
            result = self._run(request, seconds)
        if result.timed_out:
            return Problem("time", "interrupted")
        if result.exit_code is not None:
            kind = "memory" if result.oom_killed else "died"
            return Problem(kind, f"the database's program ended with exit code {result.exit_code}")
        reply = json.loads(result.reply)
        if reply.get("problem") == "database":
            raise ValueError(f"database {self._database.name!r} cannot be opened: {reply['text']}")
        if "problem" in reply:
            return Problem(reply["problem"], reply["text"])
        rows = [tuple(_value(cell) for cell in row) for row in reply["rows"]]
        return Found(tuple(reply["columns"]), rows, reply["total"], reply["all"])

    def _run(self, request: str, seconds: float) -> ExecResult:
        try:
            return self._opened().run(request, timeout=seconds + GRACE)
        except ValueError:  # it ended since the last query
            return self._opened().run(request, timeout=seconds + GRACE)

    def _opened(self) -> Session:
        if self._session is not None and self._session.alive:
            return self._session
        if self._box is None:
            self._box = _acquire(self._backend)
            self._box.write(FILE, self._database.content)
            program = resources.files("agentgym_envs.sql").joinpath("query_program.py")
            self._box.write(PROGRAM, program.read_bytes())
        elif self._session is not None:
            self._session.close()
        self._session = self._box.session(COMMAND)
        return self._session


def _died(result: ExecResult) -> bool:
    return result.exit_code is not None and not result.timed_out and not result.oom_killed


def _acquire(backend: str | None) -> Sandbox:
    return sandbox.acquire(SPEC, backend=backend, timeout=WAIT)


def _value(cell: Any) -> Any:
    if not isinstance(cell, dict):
        return cell
    shown = bytes.fromhex(cell["bytes"]) if "bytes" in cell else cell["text"]
    return Cut(shown, cell["left"]) if cell["left"] else shown
