"""Queries in a sandbox, on each back end: what they find, what is refused, and what a hostile one can reach."""

from __future__ import annotations

import random
import sqlite3
import time

import pytest
from sql_cases import need_sandbox

from agentgym import sandbox
from agentgym.sandbox import SandboxError
from agentgym_envs.sql.database import load_database
from agentgym_envs.sql.queries import Cut, QueryFailure, QueryLimits, QueryResult, QueryRunner
from agentgym_envs.sql.query_program import NOW, answer

SOON = QueryLimits(rows=20, bytes=1 << 20, cell=100, seconds=1.0)
MANY = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"
CROSS = "FROM loan a, loan b, loan c, loan d, loan e"

ATTACKS = {
    "an endless recursion": (f"{MANY} SELECT COUNT(*) FROM r", "time"),
    "an endless recursion, row by row, none of them wanted": (f"{MANY} SELECT x FROM r WHERE x < 0", "time"),
    "a huge cross join": (f"SELECT COUNT(*) {CROSS}", "time"),
    "a huge cross join, sorted": (f"SELECT * {CROSS} ORDER BY random_column", "sql"),
    "a sort that fills the disk": (f"SELECT a.*, b.*, c.* {CROSS} ORDER BY b.loaned || c.due || d.due", "time memory"),
    "a distinct that fills the memory": (f"{MANY} SELECT COUNT(DISTINCT x || hex(zeroblob(20000))) FROM r", "memory"),
    "a group_concat without end": (f"SELECT group_concat(a.loaned) {CROSS}", "size time memory"),
    "a window over everything": (f"SELECT SUM(a.loan_id) OVER (ORDER BY b.due, c.due) {CROSS}", "time memory"),
    "a large zeroblob": ("SELECT zeroblob(1000000000)", "size"),
    "a large randomblob": ("SELECT randomblob(1000000000)", "refused"),
    "a wide format": ("SELECT printf('%.*c', 1000000000, 'x')", "refused"),
    "a wide format under its other name": ("SELECT format('%999999999d', 1)", "refused"),
    "doubling by replace": ("SELECT replace(hex(zeroblob(400000)), '0', hex(zeroblob(1000)))", "size"),
    "one slow function call": ("SELECT instr(hex(zeroblob(499000)), hex(zeroblob(250000)) || '1')", "time died"),
    "a pattern over the limit": (f"SELECT 1 FROM loan WHERE due LIKE '{'%0' * 300}'", "sql"),
    "a long query": ("SELECT " + " + ".join(["1"] * 40_000), "size sql"),
    "a deep query": ("SELECT " + "(" * 2000 + "1" + ")" * 2000, "sql"),
    "a thousand unions": (" UNION ALL ".join(["SELECT 1"] * 1000), "sql"),
    "many columns": ("SELECT " + ", ".join(["1"] * 3000), "sql"),
    "deleting": ("DELETE FROM loan", "refused"),
    "updating": ("UPDATE loan SET due = '2000-01-01'", "refused"),
    "inserting": ("INSERT INTO author VALUES (99, 'x', 'y', 1)", "refused"),
    "replacing": ("REPLACE INTO author VALUES (1, 'x', 'y', 1)", "refused"),
    "dropping": ("DROP TABLE book", "refused"),
    "altering": ("ALTER TABLE book RENAME TO novel", "refused"),
    "making a table": ("CREATE TABLE x (y)", "refused"),
    "making a temporary table": ("CREATE TEMP TABLE book AS SELECT 1 AS book_id", "refused"),
    "making a view": ("CREATE TEMP VIEW book AS SELECT 1", "refused"),
    "making a trigger": ("CREATE TEMP TRIGGER x AFTER INSERT ON loan BEGIN SELECT 1; END", "refused"),
    "making a virtual table": ("CREATE VIRTUAL TABLE temp.x USING fts5(y)", "refused"),
    "writing the schema": ("UPDATE sqlite_master SET sql = 'x'", "sql"),
    "allowing to write the schema": ("PRAGMA writable_schema = 1", "refused"),
    "allowing to write": ("PRAGMA query_only = 0", "refused"),
    "more memory": ("PRAGMA hard_heap_limit = 0", "refused"),
    "a pragma as a table": ("SELECT * FROM pragma_journal_mode('delete')", "refused sql"),
    "attaching a file": ("ATTACH DATABASE '/etc/passwd' AS other", "refused"),
    "attaching a new file": ("ATTACH DATABASE '/tmp/new.db' AS other", "refused"),
    "vacuuming into a file": ("VACUUM INTO '/tmp/copy.db'", "refused"),
    "backing up": (".backup /tmp/copy.db", "sql"),
    "loading an extension": ("SELECT load_extension('/tmp/evil.so')", "refused"),
    "a tokenizer's address": ("SELECT fts3_tokenizer('simple')", "refused sql"),
    "reading a file": ("SELECT readfile('/private/query_program.py')", "sql"),
    "writing a file": ("SELECT writefile('/tmp/x', 'y')", "sql"),
    "editing a file": ("SELECT edit('x', 'sh -c id')", "sql"),
    "chance": ("SELECT random() FROM loan", "refused"),
    "chance in an order": ("SELECT * FROM loan ORDER BY RANDOM() LIMIT 1", "refused"),
    "a transaction": ("BEGIN EXCLUSIVE", "refused"),
    "a savepoint": ("SAVEPOINT x", "refused"),
    "two statements": ("SELECT 1; DROP TABLE book", "sql"),
    "two statements and a comment": ("SELECT 1; -- nothing\nDELETE FROM book", "sql"),
    "a null character": ("SELECT 'a\0b'", "sql"),
    "half a character": ("SELECT '\ud800'", ""),
    "nothing": ("", "sql"),
    "a comment": ("-- only this", "sql"),
    "an overflow": ("SELECT SUM(9223372036854775807) FROM loan", "sql"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def queries(request):
    need_sandbox(request.param)
    made = QueryRunner(load_database("library"), request.param)
    yield made
    made.close()


def of(queries, query, bounds=SOON):
    found = queries.ask(query, bounds)
    assert isinstance(found, QueryResult), found
    return found


class TestWhatIsFound:
    def test_rows_keep_their_order_and_columns_their_names(self, queries):
        found = of(queries, "SELECT name AS 'The name', born FROM author ORDER BY name DESC LIMIT 2")
        assert found.columns == ("The name", "born")
        names = [row[0] for row in found.rows]
        assert names == sorted(names, reverse=True)
        assert (found.total, found.whole) == (2, True)

    def test_values_keep_their_types(self, queries):
        found = of(
            queries, "SELECT NULL, 1, 1.0, '1', x'00ff', 1e999, 'ä漢🙂', '', 9223372036854775807, CAST(x'ff' AS TEXT)"
        )
        (row,) = found.rows
        assert row == (None, 1, 1.0, "1", b"\x00\xff", float("inf"), "ä漢🙂", "", 2**63 - 1, "\ufffd")
        assert [type(cell) for cell in row[:5]] == [type(None), int, float, str, bytes]

    def test_rows_over_the_limit_are_counted(self, queries):
        found = of(queries, "SELECT loan_id FROM loan")
        assert (len(found.rows), found.total, found.whole) == (20, 240, True)

    def test_counting_ends(self, queries):
        found = of(queries, f"{MANY} SELECT x FROM r")
        assert len(found.rows) == 20
        assert not found.whole
        assert found.total > 20

    def test_long_values_are_cut(self, queries):
        found = of(queries, "SELECT hex(zeroblob(1000)), zeroblob(400000)")
        assert found.rows == [(Cut("0" * 100, 1900), Cut(b"\0" * 50, 399950))]

    def test_a_result_over_the_limit_in_bytes_is_a_problem(self, queries):
        few = QueryLimits(rows=240, bytes=500, cell=None, seconds=1.0)
        assert queries.ask("SELECT * FROM loan", few) == QueryFailure("size", "the result is longer than 500 bytes")

    def test_sqlite_says_what_is_wrong_in_its_own_words(self, queries):
        assert queries.ask("SELECT titel FROM book", SOON) == QueryFailure("sql", "no such column: titel")
        assert queries.ask("SELEC 1", SOON) == QueryFailure("sql", 'near "SELEC": syntax error')

    @pytest.mark.parametrize(
        "query",
        [
            "PRAGMA table_info(book)",
            "SELECT name FROM pragma_table_info('book')",
            "SELECT name FROM sqlite_master",
            "EXPLAIN QUERY PLAN SELECT * FROM book",
            "SELECT value FROM json_each('[1, 2]')",
            "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r WHERE x < 9) SELECT x FROM r",
            "SELECT printf('%.2f', price), strftime('%Y', '2024-02-01') FROM book",
            "VALUES (1), (2)",
        ],
    )
    def test_reading_is_free(self, queries, query):
        assert of(queries, query).total

    def test_the_clock_stands_still(self, queries):
        found = of(
            queries,
            "SELECT datetime('now'), datetime(), CURRENT_TIMESTAMP, CURRENT_DATE, CURRENT_TIME, date('NOW', '+1 day'),"
            " strftime('%Y'), julianday('now') - julianday('2024-12-31'), unixepoch(), date(NULL), date('2024-02-28', '+2 days')",
        )
        day, hour = NOW.split()
        assert found.rows == [(NOW, NOW, NOW, day, hour, "2025-01-02", "2025", 1.0, 1735689600, None, "2024-03-01")]

    def test_the_functions_put_in_place_work_as_sqlites_own(self):
        """In this process, against SQLite itself."""
        plain = sqlite3.connect(":memory:")
        for text in (
            "date('2024-01-31', '+1 month')",
            "strftime('%d.%m.%Y %H:%M', '2024-05-06 07:08:09')",
            "time(1700000000, 'unixepoch')",
            "julianday('2000-01-01 12:00')",
            "datetime('nonsense')",
            "strftime('%s', '2024-01-01')",
            "unixepoch('2024-01-01')",
            "printf('%5.1f|%-4d|%s|%%', 3.14159, 42, NULL)",
            "printf(NULL)",
            "format('%,d', 1234567)",
        ):
            assert run_here(f"SELECT {text}")["rows"] == [list(plain.execute(f"SELECT {text}").fetchone())]
        assert run_here("SELECT date(v, 'unixepoch') FROM (SELECT 1 v UNION ALL SELECT 1.0 UNION ALL SELECT '1')")[
            "rows"
        ] == ([["1970-01-01"]] * 3)
        assert run_here(
            "SELECT strftime('%Y', x), typeof(julianday(x)) FROM (SELECT '2024-05-06' x UNION ALL SELECT '2024-05-06')"
        )["rows"] == ([["2024", "real"]] * 2)

    def test_a_query_finds_what_sqlite_finds_without_a_sandbox(self, queries):
        plain = sqlite3.connect(":memory:")
        plain.deserialize(load_database("library").content)
        rng = random.Random(5)
        columns = ["genre", "year", "pages", "price", "title", "year / 10", "price * 2", "pages IS NULL"]
        for _ in range(20):
            key = rng.choice(columns)
            query = (
                f"SELECT {key}, COUNT(*), AVG(price), MAX(title) FROM book GROUP BY 1 ORDER BY {rng.choice('12')}, 1"
            )
            found = of(queries, query, QueryLimits(rows=1000, bytes=1 << 20, cell=None, seconds=5))
            assert found.rows == plain.execute(query).fetchall()


def run_here(query):
    """Run a query in this process."""
    return answer({"database": "/dev/null", "query": query, "rows": 5, "bytes": 10**6, "cell": None, "seconds": 5})


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_with_a_message_and_the_next_query_is_as_ever(queries, name):
    query, kinds = ATTACKS[name]
    start = time.monotonic()
    found = queries.ask(query, SOON)
    assert time.monotonic() - start < 30
    if kinds:
        assert isinstance(found, QueryFailure), found
        assert found.kind in kinds.split()
        assert found.text
    assert of(queries, "SELECT COUNT(*), MAX(due) FROM loan").rows == [(240, "2024-12-22")]
    assert of(queries, "SELECT COUNT(*) FROM sqlite_master").rows == [(5,)]


def test_the_program_can_be_killed_between_two_queries(monkeypatch):
    boxes = []
    acquire = sandbox.acquire
    monkeypatch.setattr(sandbox, "acquire", lambda *a, **k: boxes.append(acquire(*a, **k)) or boxes[-1])
    queries = usable("library")
    assert of(queries, "SELECT 1").total
    killed = boxes[0].exec("for p in /proc/[0-9]*; do grep -q query_p[r]ogram $p/cmdline && kill -9 ${p#/proc/}; done")
    assert "Operation not permitted" not in killed.stderr
    assert of(queries, "SELECT COUNT(*) FROM book").rows == [(70,)]
    queries.close()


def test_the_sandbox_comes_with_the_first_query_and_goes_with_close(monkeypatch):
    boxes = []
    acquire = sandbox.acquire
    monkeypatch.setattr(sandbox, "acquire", lambda *a, **k: boxes.append(acquire(*a, **k)) or boxes[-1])
    queries = usable("library")
    assert boxes == []
    assert of(queries, "SELECT 1").rows == of(queries, "SELECT 1").rows
    assert len(boxes) == 1
    queries.close()
    queries.close()
    assert not boxes[0].alive
    assert of(queries, "SELECT 1").rows == [(1,)]
    assert len(boxes) == 2
    queries.close()


class Broken:
    """A sandbox that takes files and then fails."""

    def __init__(self):
        self.closed = False

    def write(self, path, data):
        pass

    def session(self, command):
        raise SandboxError("the daemon is gone")

    def close(self):
        self.closed = True


def usable(name):
    need_sandbox()
    return QueryRunner(load_database(name))


def test_a_sandbox_that_fails_is_replaced_once(monkeypatch):
    queries = usable("library")
    broken, acquire = [Broken()], sandbox.acquire
    first = broken[0]
    monkeypatch.setattr(sandbox, "acquire", lambda *a, **k: broken.pop() if broken else acquire(*a, **k))
    assert of(queries, "SELECT COUNT(*) FROM book").rows == [(70,)]
    assert first.closed
    queries.close()


def test_two_that_fail_are_an_error_of_the_sandbox_and_no_answer(monkeypatch):
    made = []
    monkeypatch.setattr(sandbox, "acquire", lambda *a, **k: made.append(Broken()) or made[-1])
    queries = QueryRunner(load_database("library"))
    with pytest.raises(SandboxError, match="daemon is gone"):
        queries.ask("SELECT 1", SOON)
    queries.close()
    assert [box.closed for box in made] == [True, True]


def test_none_to_be_had_is_said_at_once(monkeypatch):
    asked = []

    def acquire(*a, **k):
        asked.append(a)
        raise SandboxError("no back end")

    monkeypatch.setattr(sandbox, "acquire", acquire)
    with pytest.raises(SandboxError, match="no back end"):
        QueryRunner(load_database("library")).ask("SELECT 1", SOON)
    assert len(asked) == 1


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path):
    path = tmp_path / "text.sqlite"
    path.write_text("this is no database, and longer than a header of one hundred bytes would be " * 9)
    with pytest.raises(ValueError, match=r"text\.sqlite.*cannot be read as an SQLite database"):
        load_database(str(path))
