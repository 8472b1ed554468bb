"""Judges a query: compares its rows with those of a task's gold queries.

Rows are compared as multisets: duplicates count, and order counts if requested. Some permutation of the columns must
match; column names are ignored. NULL equals only NULL. Numbers are equal by value: whole ones exactly, others within a
relative 1e-6 (near zero, an absolute 1e-9). Text is compared exactly, case included, and '3' is not 3.

`ORDER BY total DESC LIMIT 3` does not define the order of rows with equal totals, nor which of them LIMIT drops. To
find such ties, a gold query runs again without its LIMIT and with its sort keys as further columns. The query is only
tokenized, enough to find its outermost clauses; a query that cannot be read this way is refused.
"""

import functools
import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from agentgym.core.tasks import Task
from agentgym_envs.sql.queries import QueryFailure, QueryLimits, QueryResult, QueryRunner

Value = None | int | float | str | bytes
Row = tuple[Value, ...]

RELATIVE, ABSOLUTE = 1e-6, 1e-9
# Columns laid on each other before a match is given up; a result in the gold's own order needs one each.
MAX_TRIES = 2_000
GRADED_ROWS = 20_000
GRADED_BYTES = 8 << 20
GOLD_SECONDS = 20.0  # more than an agent's query: a busy machine must not fail an episode

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/) | (?P<text>'(?:[^']|'')*') | (?P<name>"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\])
    | (?P<word>[^\W\d]\w*) | (?P<number>\d[\w.]*) | (?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_COMPOUND = {"UNION", "INTERSECT", "EXCEPT"}


@dataclass(frozen=True)
class Segment:
    """Rows that the gold query leaves tied, so they may come in any order.

    `take` is how many of them the result has; fewer if LIMIT or OFFSET cuts through the ties, and then any subset is right.
    """

    rows: Sequence[Row]
    take: int


@dataclass(frozen=True)
class Gold:
    """A gold query's result: rows in segments of ties, number of columns, and whether the segments' order counts."""

    segments: tuple[Segment, ...]
    columns: int
    ordered: bool


_known: dict[tuple[str, str, bool], Gold] = {}


def golds_of(task: Task) -> list[str]:
    given = [task.answer] if isinstance(task.answer, str) else task.answer
    if not isinstance(given, list) or not given or not all(isinstance(q, str) and q.strip() for q in given):
        raise ValueError(
            f"task {task.id!r}: the answer must be a gold query, or a list of some, not {task.answer!r:.100}"
        )
    return given


def judge(task: Task, query: str, queries: QueryRunner, seconds: float) -> tuple[bool, str]:
    """(True if the query is right, the error if it could not be run)."""
    found = queries.ask(query, _limits(seconds))
    if isinstance(found, QueryFailure):
        return False, found.text
    if len(found.rows) < found.total:
        return False, f"the result has more than {GRADED_ROWS} rows"
    rows = found.rows
    for gold in golds_of(task):
        known = _gold_of(task, gold, queries)
        if known.columns == len(found.columns) and same_result(known.segments, rows, known.columns, known.ordered):
            return True, ""
    return False, ""


def _gold_of(task: Task, gold: str, queries: QueryRunner) -> Gold:
    """The result of a gold query; run once per process."""
    ordered = bool(task.metadata.get("ordered", True))
    key = (str(task.metadata["database"]), gold, ordered)
    if key not in _known:
        queries.close()  # gold queries run in a sandbox that has run no query of the agent
        try:
            _known[key] = _run(gold, ordered, queries)
        except ValueError as error:
            raise ValueError(f"task {task.id!r}: {error}") from error
    return _known[key]


def _run(gold: str, ordered: bool, queries: QueryRunner) -> Gold:
    found = _all_rows(gold, queries)
    ranking = ranking_of(gold, found.columns)
    columns = len(found.columns)
    if ranking is None or (not ordered and ranking.limit is None and not ranking.offset):
        return Gold((Segment(found.rows, len(found.rows)),), columns, False)
    try:
        sorted_rows = _all_rows(ranking.query, queries).rows
    except ValueError as error:
        raise ValueError(
            f"ORDER BY of {gold!r} cannot be shown as columns, as with an alias in a formula: {error}"
        ) from error
    segments = ranking.segments(sorted_rows, columns)
    if not same_result(segments, found.rows, columns, True):
        raise ValueError(f"the ties of the gold query could not be determined: {gold}")
    return Gold(tuple(segments), columns, ordered)


def _all_rows(query: str, queries: QueryRunner) -> QueryResult:
    found = queries.ask(query, _limits(GOLD_SECONDS))
    if isinstance(found, QueryFailure):
        raise ValueError(f"the gold query does not run ({found.kind}: {found.text}): {query}")
    if len(found.rows) < found.total:
        raise ValueError(f"the gold query has more than {GRADED_ROWS} rows: {query}")
    return found


def _limits(seconds: float) -> QueryLimits:
    return QueryLimits(rows=GRADED_ROWS, bytes=GRADED_BYTES, cell=None, seconds=seconds)


# ---- ties


@dataclass(frozen=True)
class _SqlToken:
    kind: str
    text: str
    start: int
    end: int
    depth: int  # of parentheses around it

    @property
    def key(self) -> str:
        """Text for comparison: SQL ignores case and the quotes of names."""
        if self.kind == "name":
            return self.text[1:-1].casefold()
        return self.text if self.kind == "text" else self.text.casefold()

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.depth == 0 and self.text.upper() in words


@dataclass(frozen=True)
class Ranking:
    """A query that shows how another one sorts its rows."""

    query: str  # the original without LIMIT, with missing sort keys appended as columns
    keys: tuple[tuple[int, str], ...]  # of each sort key: its index in the rows, and its COLLATE, "" if it has none
    offset: int  # rows that the original skips
    limit: int | None  # its maximum number of rows

    def segments(self, rows: Sequence[Row], columns: int) -> list[Segment]:
        """Segments of tied rows within the window of LIMIT and OFFSET, cut to `columns`."""
        found = []
        place = 0
        end = len(rows) if self.limit is None else self.offset + self.limit
        for _, group in itertools.groupby(rows, key=lambda row: [_collated(row[key], way) for key, way in self.keys]):
            tied = [row[:columns] for row in group]
            take = min(end, place + len(tied)) - max(self.offset, place)
            place += len(tied)
            if take > 0:
                found.append(Segment(tied, take))
        return found


def ranking_of(query: str, columns: Sequence[str]) -> Ranking | None:
    """The query that shows another one's ties; None if that has no outermost ORDER BY."""
    tokens = _tokens(query)
    places = [place for place, token in enumerate(tokens) if token.is_word("ORDER")]
    if not places:
        return None
    order = places[-1]
    limit = next((place for place in range(order, len(tokens)) if tokens[place].is_word("LIMIT")), len(tokens))
    hidden: list[str] = []
    keys = []
    for written in _split(tokens[order + 2 : limit]):
        term, collation = _without_direction(written)
        place = _column_of(term, columns, tokens[:order])
        if place is None:
            place = len(columns) + len(hidden)
            hidden.append(query[term[0].start : term[-1].end])
        keys.append((place, collation))
    end = tokens[limit].start if limit < len(tokens) else tokens[-1].end
    if hidden and any(token.is_word("DISTINCT", *_COMPOUND) for token in tokens[:order]):
        raise ValueError(f"an ORDER BY of DISTINCT or UNION rows must name columns of the result: {query}")
    at = _columns(tokens[: order + 1])[-1].end if hidden else tokens[order].start
    more = "".join(f", ({expression})" for expression in hidden)
    text = f"{query[:at].rstrip()}{more}\n{query[at:end].strip()}"  # the last line may be a comment
    return Ranking(text, tuple(keys), *_window(tokens[limit:], query))


def _tokens(query: str) -> list[_SqlToken]:
    found: list[_SqlToken] = []
    depth = 0
    for match in _TOKEN.finditer(query):
        kind = str(match.lastgroup)
        if kind == "space":
            continue
        depth -= match[0] == ")"
        found.append(_SqlToken(kind, match[0], match.start(), match.end(), depth))
        depth += match[0] == "("
    while found and found[-1].text == ";":
        found.pop()
    return found


def _split(tokens: Sequence[_SqlToken]) -> list[list[_SqlToken]]:
    parts: list[list[_SqlToken]] = [[]]
    for token in tokens:
        if token.text == "," and token.depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _without_direction(term: list[_SqlToken]) -> tuple[list[_SqlToken], str]:
    """A sort key without its direction and collation, and this collation."""
    if len(term) > 2 and term[-2].is_word("NULLS"):
        term = term[:-2]
    if term[-1].is_word("ASC", "DESC"):
        term = term[:-1]
    if len(term) > 2 and term[-2].is_word("COLLATE"):
        return term[:-2], term[-1].key.upper()
    return term, ""


def _collated(value: Value, collation: str) -> Value:
    """The form of a value that SQLite compares by NOCASE, which folds ASCII letters only, or by RTRIM."""
    if not isinstance(value, str) or collation not in ("NOCASE", "RTRIM"):
        return value
    return value.rstrip(" ") if collation == "RTRIM" else value.translate(_ASCII_LOWER)


def _column_of(term: list[_SqlToken], columns: Sequence[str], before: Sequence[_SqlToken]) -> int | None:
    """The column that a sort key refers to, as SQLite resolves it: a number, an alias, or the same expression."""
    if len(term) == 1 and term[0].kind == "number" and term[0].text.isdigit():
        return int(term[0].text) - 1
    names = [name.casefold() for name in columns]
    if len(term) == 1 and term[0].kind in ("word", "name") and term[0].key in names:
        return names.index(term[0].key)
    items = [item[:-2] if len(item) > 2 and item[-2].is_word("AS") else item for item in _split(_columns(before))]
    if len(items) != len(columns):  # there is a *, which stands for many
        return None
    wanted = [token.key for token in term]
    return next((place for place, item in enumerate(items) if [token.key for token in item] == wanted), None)


def _columns(tokens: Sequence[_SqlToken]) -> list[_SqlToken]:
    """The tokens between the first outermost SELECT and its FROM."""
    start = next(place for place, token in enumerate(tokens) if token.is_word("SELECT")) + 1
    if tokens[start].is_word("DISTINCT", "ALL"):
        start += 1
    ends = ("FROM", "WHERE", "GROUP", "ORDER", *_COMPOUND)
    return list(itertools.takewhile(lambda token: not token.is_word(*ends), tokens[start:]))


def _window(tokens: Sequence[_SqlToken], query: str) -> tuple[int, int | None]:
    """Offset and limit of `LIMIT n`, `LIMIT n OFFSET m` or `LIMIT m, n`."""
    if not tokens:
        return 0, None
    numbers = [int(token.text) for token in tokens[1::2] if token.text.isdigit()]
    links = [token.text.upper() for token in tokens[2::2]]
    if len(numbers) == 1 and not links:
        return 0, numbers[0]
    if len(numbers) == 2 and links in (["OFFSET"], [","]):
        return (numbers[1], numbers[0]) if links == ["OFFSET"] else (numbers[0], numbers[1])
    raise ValueError(f"LIMIT and OFFSET must be plain numbers: {query}")


# ---- comparing rows


def same_result(segments: Sequence[Segment], found: Sequence[Row], columns: int, ordered: bool = False) -> bool:
    """True if a result matches the segments; a gold without an order is one segment."""
    gold = [row for segment in segments for row in segment.rows]
    if len(found) != sum(segment.take for segment in segments):
        return False
    if any(len(row) != columns for row in (*gold, *found)):
        return False
    return not found or _Matcher(segments, gold, found, ordered).match(
        0, frozenset(), [0] * len(gold), [0] * len(found)
    )


class _Matcher:
    def __init__(self, segments: Sequence[Segment], gold: Sequence[Row], found: Sequence[Row], ordered: bool):
        self.gold, self.found = list(zip(*gold, strict=True)), list(zip(*found, strict=True))
        self.sizes, self.ordered = [(len(segment.rows), segment.take) for segment in segments], ordered
        self.tries = MAX_TRIES
        self.classes = functools.cache(lambda ours, theirs: _classes(self.gold[ours], self.found[theirs]))
        self.alike = functools.cache(lambda ours, theirs: self._holds(*self.classes(ours, theirs)))

    def match(self, column: int, used: frozenset[int], gold: list[int], found: list[int]) -> bool:
        """Match each gold column from `column` on with an unused column of the result.

        `gold` and `found` number the classes of the rows by the columns so far; equal rows have equal numbers.
        """
        if column == len(self.gold):
            return True
        failed: list[tuple[Value, ...]] = []
        # The column at the same position first.
        for other in sorted(set(range(len(self.found))) - used, key=lambda place: (place != column, place)):
            if self.tries <= 0:
                return False
            if self.found[other] in failed or not self.alike(column, other):  # an equal column would fail too
                continue
            self.tries -= 1
            ours, theirs = self.classes(column, other)
            numbers: dict[Hashable, int] = {}
            gold_next = [numbers.setdefault(pair, len(numbers)) for pair in zip(gold, ours, strict=True)]
            found_next = [numbers.setdefault(pair, len(numbers)) for pair in zip(found, theirs, strict=True)]
            if self._holds(gold_next, found_next) and self.match(column + 1, used | {other}, gold_next, found_next):
                return True
            failed.append(self.found[other])
        return False

    def _holds(self, gold: Sequence[Hashable], found: Sequence[Hashable]) -> bool:
        """True if the found rows, each given as one value, can be drawn from the gold's segments."""
        place = at = 0
        cut: list[Counter[Hashable]] = []
        takes: list[int] = []
        rest = Counter(found)
        for size, take in self.sizes:
            pool = Counter(gold[place : place + size])
            place += size
            if self.ordered:
                if not Counter(found[at : at + take]) <= pool:
                    return False
                at += take
            elif take == size:
                rest.subtract(pool)
            else:
                cut.append(pool)
                takes.append(take)
        return self.ordered or (min(rest.values(), default=0) >= 0 and _can_be_dealt(+rest, cut, takes))


def _can_be_dealt(rest: Counter[Hashable], pools: list[Counter[Hashable]], takes: list[int]) -> bool:
    """True if rows can be drawn from the at most two segments that LIMIT and OFFSET cut."""
    if len(pools) < 2:
        return rest <= (pools[0] if pools else Counter())
    first, second = pools
    if any(count > first[row] + second[row] for row, count in rest.items()):
        return False
    least = sum(max(0, count - second[row]) for row, count in rest.items())
    most = sum(min(count, first[row]) for row, count in rest.items())
    return least <= takes[0] <= most


def _classes(ours: Sequence[Value], theirs: Sequence[Value]) -> tuple[list[Hashable], list[Hashable]]:
    numbers = {value for value in (*ours, *theirs) if isinstance(value, int | float)}
    names: dict[int | float, Hashable] = {} if all(map(_is_whole, numbers)) else _groups(numbers)

    def name(value: Value) -> Hashable:
        if isinstance(value, int | float):
            return names.get(value, value)
        return None if value is None else (type(value), value)

    return [name(value) for value in ours], [name(value) for value in theirs]


def _is_whole(number: int | float) -> bool:
    return isinstance(number, int) or number.is_integer()


def _groups(numbers: set[int | float]) -> dict[int | float, Hashable]:
    """Maps each number to the smallest of a chain of numbers within tolerance, in which no two neighbours are whole."""
    named: dict[int | float, Hashable] = {}
    last: int | float = math.nan  # close to no number
    for number in sorted(numbers):
        both_whole = _is_whole(number) and _is_whole(last)
        close = not both_whole and math.isclose(number, last, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        named[number] = named[last] if close else number
        last = number
    return named
