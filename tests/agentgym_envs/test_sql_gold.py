"""Reading a gold query's ORDER BY and LIMIT: the rewritten query, run on SQLite itself, shows the ties."""

from __future__ import annotations

import sqlite3

import pytest

from agentgym_envs.sql.gold import ranking_of, same_result

ROWS = [
    (1, "ann", "x", 5),
    (2, "bob", "x", 5),
    (3, "Cid", "y", 7),
    (4, "dan", "y", None),
    (5, "eve", "z", 5),
    (6, "fay", "z", 1),
]


@pytest.fixture(scope="module")
def db():
    made = sqlite3.connect(":memory:")
    made.execute('CREATE TABLE t (id INTEGER, name TEXT, kind TEXT, "the score" INTEGER)')
    made.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", ROWS)
    return made


def ties(db, query):
    """The query's segments as (rows, how many are taken); checked against the rows that it gives itself."""
    cursor = db.execute(query)
    own = cursor.fetchall()
    columns = [item[0] for item in cursor.description]
    ranking = ranking_of(query, columns)
    segments = ranking.segments(db.execute(ranking.query).fetchall(), len(columns))
    assert same_result(segments, own, len(columns), ordered=True)
    return [(sorted(map(str, segment.rows)), segment.take) for segment in segments]


def sizes(db, query):
    return [(len(rows), take) for rows, take in ties(db, query)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('SELECT name FROM t ORDER BY "the score"', [(1, 1), (1, 1), (3, 3), (1, 1)]),
        ("SELECT name, `the score` FROM t ORDER BY 2 DESC", [(1, 1), (3, 3), (1, 1), (1, 1)]),
        ("SELECT name, [the score] AS s FROM t ORDER BY S DESC, id", [(1, 1)] * 6),
        ("SELECT t.name FROM t ORDER BY t.name", [(1, 1)] * 6),
        ("SELECT DISTINCT t.kind FROM t ORDER BY t.kind ASC NULLS LAST;", [(1, 1)] * 3),
        ("SELECT kind, COUNT(*) AS n FROM t GROUP BY kind ORDER BY n DESC", [(3, 3)]),
        ("SELECT kind FROM t GROUP BY kind ORDER BY COUNT(*) DESC, MAX(id) DESC LIMIT 1", [(1, 1)]),
        ("SELECT kind FROM t GROUP BY kind ORDER BY COUNT(*) LIMIT 1", [(3, 1)]),
        ('SELECT name FROM t ORDER BY "the score" LIMIT 3', [(1, 1), (1, 1), (3, 1)]),
        ('SELECT name FROM t ORDER BY "the score" LIMIT 2 OFFSET 3', [(3, 2)]),
        ('SELECT name FROM t ORDER BY "the score" LIMIT 3, 2', [(3, 2)]),
        ('SELECT name FROM t ORDER BY "the score" LIMIT 4 OFFSET 1', [(1, 1), (3, 3)]),
        ("SELECT name FROM t ORDER BY CASE kind WHEN 'z' THEN 1 ELSE 2 END, lower(name)", [(1, 1)] * 6),
        ("SELECT kind FROM t UNION SELECT name FROM t ORDER BY kind LIMIT 2", [(1, 1), (1, 1)]),
        ("WITH a AS (SELECT * FROM t ORDER BY id LIMIT 4) SELECT name FROM a ORDER BY kind", [(2, 2), (2, 2)]),
        ("SELECT (SELECT max(id) FROM t ORDER BY 1 LIMIT 1), name FROM t ORDER BY kind", [(2, 2)] * 3),
        ("SELECT name, rank() OVER (ORDER BY id) FROM t ORDER BY kind", [(2, 2)] * 3),
        ("SELECT * FROM t ORDER BY kind", [(2, 2)] * 3),
        ("SELECT *, id + 1 AS next FROM t ORDER BY length(name), next", [(1, 1)] * 6),
        ("SELECT 'ORDER BY; LIMIT 1' AS text, name FROM t -- ORDER BY id\nORDER BY kind /* LIMIT 1 */", [(2, 2)] * 3),
        ("SELECT name FROM t ORDER BY name COLLATE NOCASE DESC", [(1, 1)] * 6),
        ("SELECT name FROM t ORDER BY CASE id % 2 WHEN 0 THEN 'a' ELSE 'A' END COLLATE NOCASE", [(6, 6)]),
        ("SELECT CASE id % 2 WHEN 0 THEN 'a' ELSE 'A' END AS c FROM t ORDER BY c COLLATE nocase LIMIT 2", [(6, 2)]),
        ("SELECT name, kind FROM t -- everyone\nORDER BY id LIMIT 2", [(1, 1), (1, 1)]),
        ("SELECT name -- ours\nFROM t -- everyone\nORDER BY kind LIMIT 1", [(2, 1)]),
        ("SELECT upper(kind) FROM t ORDER BY upper( kind )", [(2, 2)] * 3),
    ],
)
def test_the_ties_of(db, query, expected):
    assert sizes(db, query) == expected


def test_which_rows_are_tied(db):
    assert ties(db, 'SELECT name FROM t ORDER BY "the score" DESC LIMIT 2') == [
        (["('Cid',)"], 1),
        (["('ann',)", "('bob',)", "('eve',)"], 1),
    ]


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT 1 ORDER BY 1", True),
        ("select 1 order by 1", True),
        ("SELECT * FROM (SELECT id FROM t ORDER BY id)", False),
        ("SELECT rank() OVER (ORDER BY id) FROM t", False),
        ("SELECT 'ORDER BY 1'", False),
        ('SELECT 1 AS "ORDER"', False),
        ("SELECT 1 -- ORDER BY 1", False),
    ],
)
def test_a_query_has_an_order_where_its_outermost_clause_says_so(query, ordered):
    assert (ranking_of(query, ["1"]) is not None) is ordered


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT DISTINCT kind FROM t ORDER BY id", "must name columns of the result"),
        ("SELECT kind FROM t UNION ALL SELECT name FROM t ORDER BY length(kind)", "must name columns of the result"),
        ("SELECT kind FROM t ORDER BY kind LIMIT (SELECT 2)", "plain numbers"),
        ("SELECT kind FROM t ORDER BY kind LIMIT 1 + 1", "plain numbers"),
    ],
)
def test_what_cannot_be_read_is_refused(query, says):
    with pytest.raises(ValueError, match=says):
        ranking_of(query, ["kind"])
