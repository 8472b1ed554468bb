"""The databases of the questions: SQLite files, and two that are generated."""

import contextlib
import functools
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from agentgym import datasets
from agentgym_envs.data_sets import CHINOOK, DEFOG
from agentgym_envs.sql.own_data import OWN_NAMES, own_database


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
    path = _path_of(name)
    if path is None:
        raise ValueError(
            f"no database {name!r}: it is {', '.join(OWN_NAMES)}, the path of an SQLite file, or, in the folder that"
            f" {datasets.FOLDER_VARIABLE} names, chinook ({CHINOOK}) or defog/NAME ({DEFOG.format('NAME')})"
        )
    return _of_file(name, path, path.stat().st_mtime_ns)


def _path_of(name: str) -> Path | None:
    if name == "chinook":
        return datasets.locate(CHINOOK)
    if name.startswith("defog/") and name.count("/") == 1:
        return datasets.locate(DEFOG.format(name.removeprefix("defog/")))
    path = Path(name)
    return path if path.is_file() else None


@functools.cache
def _own(name: str) -> Database:
    content = own_database(name)
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(content)
        return Database(name, content, _tables(db, {}))


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
    return tuple(Table(name, tuple(_columns(db, name, notes))) for (name,) in names)


def _columns(db: sqlite3.Connection, table: str, notes: dict[tuple[str, str], str]) -> list[Column]:
    keys = db.execute("SELECT * FROM pragma_foreign_key_list(?)", (table,))
    targets = {row[3]: f"{row[2]}.{row[4] or row[3]}" for row in keys}
    return [
        Column(name, kind, bool(key), targets.get(name, ""), notes.get((table, name), ""))
        for _, name, kind, _, _, key in db.execute("SELECT * FROM pragma_table_info(?)", (table,))
    ]


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
    alone = key[0] if len(key) == 1 else ""
    parts = [(_column(column, column.name == alone), column.note) for column in table.columns]
    if len(key) > 1:
        parts.append((f"PRIMARY KEY ({', '.join(key)})", ""))
    if not any(note for _, note in parts):
        return f"{table.name}({', '.join(text for text, _ in parts)})"
    return "\n".join([f"{table.name}(", *(f"  {text}{note and f' -- {note}'}" for text, note in parts), ")"])


def _column(column: Column, is_key: bool) -> str:
    target = f"-> {column.references}" if column.references else ""
    return " ".join(word for word in (column.name, column.type, "PRIMARY KEY" if is_key else "", target) if word)
