"""The program that runs queries in the sandbox. It uses only the standard library, and keeps no state of a query.

It reads frames from standard input and answers each on file descriptor 3 (see `agentgym.sandbox.Session`). A request is
JSON: `database` (a path), `query`, and the fields of `QueryLimits`. The reply has `columns`, `rows`, `total` and `all`
(true if every row was counted), or `problem` (refused, time, memory, size or sql) with `text`.

Each request opens the file anew, read only. An authorizer limits what the query may do, a progress handler its time,
and SQLite's own limits its memory, so this program survives almost any query.
"""

import functools
import json
import os
import re
import signal
import sqlite3
import struct
import sys
import time
from typing import Any

NOW = "2025-01-01 00:00:00"  # a fixed clock: a query gives the same rows on any day
HEAP = 64 << 20
COUNTED = 100_000  # rows after which counting stops
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 300,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 300,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
REFUSED_FUNCTIONS = {"load_extension", "random", "randomblob", "fts3_tokenizer", "sqlite_log"}
FORMATS = ("printf", "format")
WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")  # such a width takes seconds to write, in which SQLite asks no clock
CLOCKS = ("date", "time", "datetime", "julianday", "strftime", "unixepoch")
SHORT, KEPT = 100, 20_000  # characters of an argument, and calls, whose results are remembered
OPCODES = 2_000  # of SQLite's VM between two looks at the clock; well under a millisecond


def main() -> None:
    # A step that is over its time gets SIGINT: within one long function call only the default action ends it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    requests, replies = sys.stdin.buffer, os.fdopen(3, "wb")
    while len(head := requests.read(4)) == 4:
        request = json.loads(requests.read(struct.unpack(">I", head)[0]))
        body = json.dumps(answer(request)).encode()
        replies.write(struct.pack(">I", len(body)) + body)
        replies.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the query of a request; never raises."""
    refused: list[str] = []
    end = time.monotonic() + request["seconds"]
    try:
        db = _open(request["database"], refused, end)
    except (sqlite3.Error, OSError) as error:
        return {"problem": "database", "text": str(error)}
    try:
        return _run(db, request, end)
    except MemoryError:
        return {"problem": "memory", "text": "out of memory"}
    except Exception as error:  # any driver error is due to the query
        if refused:
            return {"problem": "refused", "text": refused[-1]}
        if "too big" in str(error):
            return {"problem": "size", "text": str(error)}
        kind = "time" if str(error) == "interrupted" else "sql"
        return {"problem": kind, "text": str(error) or type(error).__name__}
    finally:
        db.close()


def _open(path: str, refused: list[str], end: float) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True, isolation_level=None, cached_statements=0)
    # Sorting and temporary tables stay in memory, and all memory is bounded: nothing is written anywhere.
    # The schema is the task's. If it were not trusted, its views could not call the functions put in place below.
    for setting in (f"hard_heap_limit={HEAP}", "temp_store=2", "query_only=1", "cell_size_check=1"):
        db.execute(f"PRAGMA {setting}").fetchall()
    db.execute("SELECT count(*) FROM sqlite_master").fetchall()  # what is no database fails here, not in the query
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    _put_in_place(db, refused)
    for limit, value in LIMITS.items():
        db.setlimit(limit, value)
    db.set_authorizer(lambda action, first, second, *_: _permit(action, first, second, refused))
    db.set_progress_handler(lambda: time.monotonic() > end, OPCODES)
    return db


def _put_in_place(db: sqlite3.Connection, refused: list[str]) -> None:
    """Fix the time of 'now' and refuse huge formats; a second connection computes the originals."""
    plain = sqlite3.connect(":memory:", isolation_level=None)

    def plainly(name: str, *values: Any) -> Any:
        return plain.execute(f"SELECT {name}({', '.join('?' * len(values))})", values).fetchone()[0]

    remembered = functools.lru_cache(KEPT, typed=True)(plainly)  # the dates of a table repeat

    def at(name: str, *values: Any) -> Any:
        first = 1 if name == "strftime" else 0
        given = list(values) if len(values) > first else [*values, "now"]
        if isinstance(given[first], str) and given[first].strip().lower() == "now":
            given[first] = NOW
        short = all(len(value) <= SHORT for value in given if isinstance(value, (str, bytes)))
        return (remembered if short else plainly)(name, *given)

    def formatted(name: str, *values: Any) -> Any:
        if values and WIDE.search(str(values[0])):
            refused.append(f"{name} takes no * and no width over 9999")
            raise ValueError(refused[-1])
        return plainly(name, *values)

    for names, function in ((CLOCKS, at), (FORMATS, formatted)):
        for name in names:
            db.create_function(name, -1, functools.partial(function, name), deterministic=True)
    for name, kind in (("current_date", "date"), ("current_time", "time"), ("current_timestamp", "datetime")):
        db.create_function(name, 0, functools.partial(at, kind), deterministic=True)


def _permit(action: int, first: str | None, second: str | None, refused: list[str]) -> int:
    if (
        action in READING
        # SQLite itself does this to set up json_each or pragma_table_info; query_only stops a query that tries it.
        or (action == sqlite3.SQLITE_UPDATE and first == "sqlite_master")
        or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in REFUSED_FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and str(first).lower() in PRAGMAS)
    ):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        refused.append(f"the function {second} is switched off")
    elif action == sqlite3.SQLITE_PRAGMA:
        refused.append(f"PRAGMA {first} is switched off; those that describe tables are: {', '.join(sorted(PRAGMAS))}")
    else:
        refused.append("the database can only be read")
    return sqlite3.SQLITE_DENY


def _run(db: sqlite3.Connection, request: dict[str, Any], end: float) -> dict[str, Any]:
    cursor = db.execute(request["query"])
    if cursor.description is None:
        return {"problem": "sql", "text": "this is no query: nothing was selected"}
    rows: list[list[Any]] = []
    total, room, whole = 0, request["bytes"], True
    try:
        for row in cursor:
            total += 1
            if len(rows) < request["rows"]:
                cells = [_cell(value, request["cell"]) for value in row]
                room -= sum(_size(value) for value in cells)
                if room < 0:
                    return {"problem": "size", "text": f"the result is longer than {request['bytes']} bytes"}
                rows.append(cells)
            elif total >= COUNTED or time.monotonic() > end:
                whole = False
                break
    except sqlite3.OperationalError as error:
        # The requested rows are complete: only counting the rest ran out of time.
        if str(error) != "interrupted" or len(rows) < request["rows"]:
            raise
        whole = False
    return {"columns": [item[0] for item in cursor.description], "rows": rows, "total": total, "all": whole}


def _cell(value: Any, keep: int | None) -> Any:
    """A value as JSON: bytes as `{"bytes": hex}`; shortened values have `left`, how much is missing."""
    if isinstance(value, bytes):
        kept = value if keep is None else value[: keep // 2]
        return {"bytes": kept.hex(), "left": len(value) - len(kept)}
    if isinstance(value, str) and keep is not None and len(value) > keep:
        return {"text": value[:keep], "left": len(value) - keep}
    return value


def _size(cell: Any) -> int:
    if isinstance(cell, dict):
        return 16 + sum(len(part) for part in cell.values() if isinstance(part, str))
    return 8 + 6 * len(cell) if isinstance(cell, str) else 24  # JSON writes a character in up to six bytes


if __name__ == "__main__":
    main()
