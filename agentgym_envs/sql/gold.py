"""Judges a query: compares its rows with those of a task's gold queries."""

from dataclasses import dataclass

from agentgym.core.tasks import Task
from agentgym_envs.sql.queries import QueryFailure, QueryLimits, QueryResult, QueryRunner
from agentgym_envs.sql.ranking import has_order, ranking_of
from agentgym_envs.sql.results import Segment, same_result

GRADED_ROWS = 20_000
GRADED_BYTES = 8 << 20
GOLD_SECONDS = 20.0  # more than an agent's query: a busy machine must not fail an episode


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
        known = gold_of(task, gold, queries)
        if known.columns == len(found.columns) and same_result(known.segments, rows, known.columns, known.ordered):
            return True, ""
    return False, ""


def gold_of(task: Task, gold: str, queries: QueryRunner) -> Gold:
    """The result of a gold query; run once per process."""
    ordered = has_order(gold) and bool(task.metadata.get("ordered", True))
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
    segments = ranking.segments(_all_rows(ranking.query, queries).rows, columns)
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
