"""The text of a query's result for the agent: a table, or an error with a hint."""

import difflib
import re
from typing import Any

from agentgym_envs.sql.database import Database
from agentgym_envs.sql.queries import Cut, QueryFailure, QueryResult

MAX_CHARACTERS = 6_000  # of a result's rows; further rows are left out

_ADVICE = {
    "time": "It was stopped after {seconds:g} s. Join tables on their keys, filter earlier, and end every recursion.",
    "memory": "Select fewer and shorter values, and sort or group fewer rows.",
    "size": "Select fewer and shorter values.",
    "refused": "Use a single SELECT, whose result depends on the database alone.",
    "died": "The program is started again for the next query. Do not send this query again.",
}
_SYNTAX = (
    (r"\bILIKE\b", "SQLite has no ILIKE: LIKE ignores the case of ASCII letters."),
    (r"::", "SQLite has no ::, write CAST(x AS TYPE)."),
    (r"\bEXTRACT\s*\(", "SQLite has no EXTRACT, write strftime('%Y', day)."),
    (r"\bINTERVAL\b", "SQLite has no INTERVAL, write date(day, '+1 month')."),
    (r"\bTOP\s+\d", "SQLite has no TOP, write LIMIT at the end."),
    (r"```", "Give the query alone, without a code fence."),
)
_FUNCTIONS = {
    "year": "strftime('%Y', day)",
    "month": "strftime('%m', day)",
    "day": "strftime('%d', day)",
    "date_trunc": "strftime('%Y-%m-01', day)",
    "to_char": "strftime('%Y-%m', day)",
    "datediff": "julianday(a) - julianday(b)",
    "now": "date('now')",
    "concat": "a || b",
    "string_agg": "group_concat(x, ', ')",
    "stddev": "AVG(x*x) - AVG(x)*AVG(x), the variance, and sqrt",
    "left": "substr(x, 1, n)",
    "greatest": "max(a, b)",
    "least": "min(a, b)",
    "if": "iif(condition, a, b)",
}


def observation_text(answer: QueryResult | QueryFailure, query: str, database: Database, seconds: float) -> str:
    if isinstance(answer, QueryResult):
        return _table(answer)
    if answer.kind == "sql":
        hint = _hint(answer.text, query, database)
    else:
        hint = _ADVICE[answer.kind].format(seconds=seconds)
    return f"Error: {answer.text}" + (f"\nHint: {hint}" if hint else "")


def _table(found: QueryResult) -> str:
    head = " | ".join(_cell(name) for name in found.columns)
    lines: list[str] = []
    room = MAX_CHARACTERS
    for row in found.rows:
        line = " | ".join(_cell(cell) for cell in row)
        room -= len(line)
        if room < 0 and lines:
            break
        lines.append(line)
    left = found.total - len(lines)
    if not found.total:
        lines.append("(no rows)")
    elif left or not found.whole:
        more = "" if found.whole else " or more"
        lines.append(f"... {left}{more} further row{'s' * (left != 1)} not shown")
    return "\n".join([head, *lines])


def _cell(value: Any) -> str:
    """A value on one line: NULL as NULL, the text "NULL" in quotes, bytes as SQL literals."""
    if value is None:
        return "NULL"
    if isinstance(value, Cut):
        unit = "bytes" if isinstance(value.shown, bytes) else "characters"
        return f"{_cell(value.shown)}... ({value.left} more {unit})"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if value == "NULL":
        return "'NULL'"
    if not isinstance(value, str):
        return str(value)
    return value.replace("\r", "\\r").replace("\n", "\\n")


def _hint(message: str, query: str, database: Database) -> str:
    tables = [table.name for table in database.tables]
    if match := re.match(r"no such table: (.*)", message):
        return f"{_nearest(match[1], tables)}The tables are: {', '.join(tables)}."
    if match := re.match(r"no such column: (.*)", message):
        return _about_column(match[1], database)
    if message.startswith("ambiguous column name"):
        return "Write the table's name or alias before it, as in table.column."
    if match := re.match(r"no such function: (\w+)", message):
        instead = _FUNCTIONS.get(match[1].lower())
        return f"Write {instead}." if instead else "SQLite does not have it."
    if message.startswith("misuse of aggregate"):
        return "Put conditions on aggregates into HAVING, after GROUP BY."
    if "one statement" in message:
        return "Send each statement by itself."
    return next((text for pattern, text in _SYNTAX if re.search(pattern, query, re.IGNORECASE)), "")


def _about_column(name: str, database: Database) -> str:
    column = name.rpartition(".")[2].strip('"')
    known = [(table.name, item.name) for table in database.tables for item in table.columns]
    having = [f"{table}.{name}" for table, name in known if name.lower() == column.lower()]
    if having:
        return f"There is {', '.join(having)}: join that table, or check the alias."
    return (
        _nearest(column, sorted({name for _, name in known})).strip()
        or "Look at the columns with PRAGMA table_info(table)."
    )


def _nearest(name: str, known: list[str]) -> str:
    by_lower = {item.lower(): item for item in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(by_lower[item] for item in close)}? " if close else ""
