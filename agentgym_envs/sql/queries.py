"""Runs queries on a database in a sandbox: the host's side of `query_program.py`."""

import json
import logging
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from agentgym import sandbox
from agentgym.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec, Session
from agentgym_envs.sql.database import Database

log = logging.getLogger(__name__)

SPEC = SandboxSpec(image="sql", memory=256 << 20, pids=16, disk=16 << 20)
FILE, PROGRAM = "/private/database.sqlite", "/private/query_program.py"
COMMAND = ("python3", "-I", "-S", PROGRAM)
WAIT = 45.0  # seconds to acquire a sandbox; less than a step's limit, so this clearer error comes first
GRACE = 1.0  # seconds after its limit when a query is stopped from outside


@dataclass(frozen=True)
class Cut:
    """A shortened value: the part that is shown, and how many characters or bytes are left out."""

    shown: str | bytes
    left: int


@dataclass(frozen=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]  # the first ones; with `cell` set, long values are `Cut`
    total: int  # number of rows
    whole: bool  # False if counting was stopped: there are `total` or more


@dataclass(frozen=True)
class QueryFailure:
    """Why a query has no result: "sql" (SQLite's message), "refused", "time", "memory", "size" or "died"."""

    kind: str
    text: str


@dataclass(frozen=True)
class QueryLimits:
    """Limits of a result: rows, bytes of JSON, characters of a value (None: no limit), and seconds."""

    rows: int
    bytes: int
    cell: int | None
    seconds: float


class QueryRunner:
    """Runs read-only queries on one database; no query leaves state behind.

    The first query acquires the sandbox. A query that kills the program in it gets a `QueryFailure`, and the program is
    restarted. A failed sandbox is replaced once, since a query can be repeated safely.
    """

    def __init__(self, database: Database, backend: str | None = None):
        self._database = database
        self._backend = backend
        self._box: Sandbox | None = None
        self._session: Session | None = None

    def ask(self, query: str, limits: QueryLimits) -> QueryResult | QueryFailure:
        query = query.encode("utf-8", "replace").decode("utf-8")
        request = json.dumps({"database": FILE, "query": query, **asdict(limits)})
        try:
            return self._once(request, limits.seconds)
        except SandboxError as error:
            if self._box is None:  # none was available, and the waiting time is used up
                raise
            log.warning("a sandbox failed in a query, trying a fresh one: %s", error)
            self.close()
        try:
            return self._once(request, limits.seconds)
        except SandboxError:
            self.close()
            raise

    def close(self) -> None:
        """Release the sandbox. May be called twice; a later query acquires another."""
        box, self._box, self._session = self._box, None, None
        if box is not None:
            box.close()

    def _once(self, request: str, seconds: float) -> QueryResult | QueryFailure:
        result = self._run(request, seconds)
        if result.exit_code is not None and not result.timed_out and not result.oom_killed:
            # It died, perhaps before the query came; if it dies again, the query did it.
            result = self._run(request, seconds)
        if result.timed_out:
            return QueryFailure("time", "interrupted")
        if result.exit_code is not None:
            kind = "memory" if result.oom_killed else "died"
            return QueryFailure(kind, f"the database's program ended with exit code {result.exit_code}")
        reply = json.loads(result.reply)
        if reply.get("problem") == "database":
            raise ValueError(f"database {self._database.name!r} cannot be opened: {reply['text']}")
        if "problem" in reply:
            return QueryFailure(reply["problem"], reply["text"])
        rows = [tuple(_value(cell) for cell in row) for row in reply["rows"]]
        return QueryResult(tuple(reply["columns"]), rows, reply["total"], reply["all"])

    def _run(self, request: str, seconds: float) -> ExecResult:
        try:
            return self._opened().run(request, timeout=seconds + GRACE)
        except ValueError:  # it ended since the last query
            return self._opened().run(request, timeout=seconds + GRACE)

    def _opened(self) -> Session:
        if self._session is not None and self._session.alive:
            return self._session
        if self._box is None:
            self._box = sandbox.acquire(SPEC, backend=self._backend, timeout=WAIT)
            self._box.write(FILE, self._database.content)
            program = resources.files("agentgym_envs.sql").joinpath("query_program.py")
            self._box.write(PROGRAM, program.read_bytes())
        elif self._session is not None:
            self._session.close()
        self._session = self._box.session(COMMAND)
        return self._session


def _value(cell: Any) -> Any:
    if not isinstance(cell, dict):
        return cell
    shown = bytes.fromhex(cell["bytes"]) if "bytes" in cell else cell["text"]
    return Cut(shown, cell["left"]) if cell["left"] else shown
