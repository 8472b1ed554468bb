"""The databases of the questions: SQLite files, and two that are shipped as SQL."""

import contextlib
import functools
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from agentgym import datasets
from agentgym_envs.data_sets import CHINOOK, DEFOG

OWN_NAMES = ("library", "railway")


@dataclass(frozen=True)
class Column:
    """A column; `note` describes its content if known, `references` is `table.column` or empty."""

    name: str
    type: str
    key: bool = False
    references: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Database:
    name: str
    content: bytes
    tables: tuple[Table, ...]

    def schema(self, detail: str) -> str:
        """The schema as text: "names" lists the tables; "full" adds columns, types, keys and notes."""
        if detail == "names":
            return ", ".join(table.name for table in self.tables)
        return "\n".join(_described(table) for table in self.tables)


def load_database(name: str) -> Database:
    """A database by name: "library", "railway", "chinook", "defog/NAME", or the path of an SQLite file."""
    if name in OWN_NAMES:
        return _own(name)
    if name == "chinook":
        path = datasets.locate(CHINOOK)
    elif name.startswith("defog/") and name.count("/") == 1:
        path = datasets.locate(DEFOG.format(name.removeprefix("defog/")))
    else:
        path = Path(name)
    if path is None or not path.is_file():
        raise ValueError(
            f"no database {name!r}: it is {', '.join(OWN_NAMES)}, the path of an SQLite file, or, in the folder that"
            f" {datasets.FOLDER_VARIABLE} names, chinook ({CHINOOK}) or defog/NAME ({DEFOG.format('NAME')})"
        )
    return _of_file(name, path, path.stat().st_mtime_ns)


@functools.cache
def _own(name: str) -> Database:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8"))
        return Database(name, db.serialize(), _tables(db, {}))


@functools.lru_cache(maxsize=64)
def _of_file(name: str, path: Path, changed: int) -> Database:
    """A database from a file; `changed` (its modification time) makes the cache miss when the file changes."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            return Database(name, path.read_bytes(), _tables(db, _notes(path.with_suffix(".schema.json"))))
    except sqlite3.Error as error:
        raise ValueError(f"database {name!r}: {path} cannot be read as an SQLite database: {error}") from error


def _tables(db: sqlite3.Connection, notes: dict[tuple[str, str], str]) -> tuple[Table, ...]:
    names = db.execute(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        " ORDER BY rowid"
    ).fetchall()
    tables = []
    for (table,) in names:
        keys = db.execute("SELECT * FROM pragma_foreign_key_list(?)", (table,))
        targets = {row[3]: f"{row[2]}.{row[4] or row[3]}" for row in keys}
        # Not the hidden columns of virtual tables (1), but generated ones.
        columns = db.execute("SELECT * FROM pragma_table_xinfo(?) WHERE hidden <> 1", (table,))
        found = tuple(
            Column(name, kind, bool(key), targets.get(name, ""), notes.get((table, name), ""))
            for _, name, kind, _, _, key, _ in columns
        )
        tables.append(Table(table, found))
    return tuple(tables)


def _notes(path: Path) -> dict[tuple[str, str], str]:
    if not path.is_file():
        return {}
    tables = json.loads(path.read_text(encoding="utf-8"))["table_metadata"]
    return {
        (table, column["column_name"]): " ".join(str(column.get("column_description") or "").split())
        for table, columns in tables.items()
        for column in columns
    }


def _described(table: Table) -> str:
    """A table on one line, or one line per column if a column has a note."""
    key = [column.name for column in table.columns if column.key]
    parts = []
    for column in table.columns:
        is_key = "PRIMARY KEY" if key == [column.name] else ""
        target = f"-> {column.references}" if column.references else ""
        parts.append((" ".join(filter(None, (column.name, column.type, is_key, target))), column.note))
    if len(key) > 1:
        parts.append((f"PRIMARY KEY ({', '.join(key)})", ""))
    if not any(note for _, note in parts):
        return f"{table.name}({', '.join(text for text, _ in parts)})"
    return "\n".join([f"{table.name}(", *(f"  {text}{note and f' -- {note}'}" for text, note in parts), ")"])
