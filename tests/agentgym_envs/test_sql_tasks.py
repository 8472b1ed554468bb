"""sql: its README and its tasks: gold, null and random players over all of them, splits, what is refused."""

from __future__ import annotations

import contextlib
import csv
import itertools
import random
import re
import sqlite3
from pathlib import Path

import pytest
from readme_parts import players, replay
from sql_cases import all_of, call, need_sandbox, play, play_all, question, reward_of, started

import agentgym
from agentgym.core.tasks import Task
from agentgym_envs import register_all, sql
from agentgym_envs.sql import tasks as task_module
from agentgym_envs.sql.database import load_database
from agentgym_envs.sql.gold import golds_of, judge
from agentgym_envs.sql.queries import QueryRunner
from agentgym_envs.sql.tasks import load_questions

README = Path(sql.__file__).with_name("README.md").read_text(encoding="utf-8")
REAL = pytest.mark.data
register_all()


@pytest.fixture(scope="module", autouse=True)
def back_end():
    need_sandbox()


@pytest.fixture(scope="module")
def env():
    made = agentgym.make("sql", data="own")
    yield made
    made.close()


def judged_all(data, queries_of):
    """Each task with each of its queries and whether it is right: on one sandbox for a database, as the rows alone decide."""
    judged = []
    for name, tasks in itertools.groupby(all_of(data), lambda task: task.metadata["database"]):
        with contextlib.closing(QueryRunner(load_database(name))) as queries:
            judged += [(t, q, judge(t, q, queries, 20.0)) for t in tasks for q in queries_of(t)]
    return judged


class TestReadme:
    def test_it_replays(self, env):
        replay(README, env, load_questions("test", "own"))

    def test_it_has_the_numbers_of_simple_players(self):
        rows = players(README)
        assert [row[0] for row in rows] == ["expert", "random"]
        for player, success, turns in rows:
            rng = random.Random(0)
            reply = (lambda e: e.expert_action()) if player == "expert" else (lambda e, rng=rng: e.random_action(rng))
            ends = [play(task, reply, data="own") for task in load_questions("test", "own")]
            assert f"{100 * sum(info['success'] for *_, info in ends) / len(ends):.1f}" == success
            assert f"{sum(n for _, n, _ in ends) / len(ends):.2f}" == turns


@pytest.mark.parametrize("data", ["own", pytest.param("chinook", marks=REAL), pytest.param("defog", marks=REAL)])
class TestAllTasks:
    """In parallel; the README has the numbers of all tasks."""

    def counts(self, data):
        """Of tasks, and of gold queries."""
        return [int(n) for n in re.search(rf"\b{data}:\s(\d+)\stasks,\s(\d+)\sgold\squeries", README).groups()]

    def test_gold_scores_1(self, data, sample):
        assert self.counts(data)[0] == len(all_of(data))
        tasks = sample(all_of(data), 60)
        ends = play_all(tasks, lambda e: e.expert_action())
        assert [(t.id, end) for t, end in zip(tasks, ends, strict=True) if end[0] != 1.0 or end[1] != 2] == []

    def test_every_gold_query_scores_1_and_finds_something(self, data):
        judged = judged_all(data, golds_of)
        assert [(task.id, query) for task, query, verdict in judged if verdict != (True, "")] == []
        assert self.counts(data)[1] == len(judged)

    def test_an_answer_that_finds_nothing_earns_nothing(self, data):
        nothing = ["SELECT 1 WHERE 0", "SELECT 1, 2 WHERE 0", "SELECT NULL", "SELECT NULL, NULL"]
        assert {verdict for *_, verdict in judged_all(data, lambda task: nothing)} == {(False, "")}

    def test_no_answer_and_random_ones_earn_nothing(self, data, sample):
        tasks = sample(all_of(data), 40)
        silent = play_all(tasks, lambda e: "")
        assert {(total, turns) for total, turns, _ in silent} == {(0.0, 8)}
        chance = play_all(tasks, lambda e: e.random_action(random.Random(f"{e.task.id} {e.turn}")))
        assert [(t.id, end) for t, end in zip(tasks, chance, strict=True) if end[0]] == []


class TestTasks:
    def test_there_are_our_own_in_two_splits(self):
        train, test = load_questions("train", "own"), load_questions("test", "own")
        assert (len(train), len(test)) == (40, 12)
        questions = [task.messages[0]["content"] for task in [*train, *test]]
        assert len(set(questions)) == 52
        assert {task.metadata["database"] for task in [*train, *test]} == {"library", "railway"}

    def test_those_that_ask_for_an_order_are_flagged(self):
        for task in all_of("own"):
            gold, asked = golds_of(task)[0], task.messages[0]["content"]
            if task.metadata["ordered"]:
                assert re.search(r"first|order|sorted", asked), asked
            elif "ORDER BY" in gold:
                assert gold.endswith("LIMIT 1"), gold

    @REAL
    def test_defog_is_divided_by_database(self):
        train, test = load_questions("train", "defog"), load_questions("test", "defog")
        assert (len(train), len(test)) == (130, 47)
        databases = [{task.metadata["database"] for task in tasks} for tasks in (train, test)]
        assert (len(databases[0]), len(databases[1])) == (5, 2)
        assert not databases[0] & databases[1]
        assert sum(task.metadata["ordered"] for task in [*train, *test]) == 30
        assert load_questions("test").source == test.source

    @REAL
    def test_what_is_left_out_of_defog_is_what_cannot_be_judged(self):
        """Against SQLite itself: those rows and no others have a gold query that fails, or only ones that find nothing but NULL."""
        path = Path(load_questions("test", "defog").source)
        failing, empty, without = set(), set(), 0
        for place, row in enumerate(csv.DictReader(path.open(encoding="utf-8", newline=""))):
            file = path.parent / "db" / f"{row['db_name']}.sqlite"
            if not file.is_file():
                without += 1
                continue
            db = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
            try:
                found = [db.execute(query).fetchall() for query in row["query"].split(";") if query.strip()]
            except sqlite3.Error:
                failing.add(place)
            else:
                if all(value is None for rows in found for row in rows for value in row):
                    empty.add(place)
        assert (without, failing, empty) == (20, task_module.WITHOUT_TABLE, task_module.FINDS_NOTHING)

    def test_without_the_data_our_own_are_taken_and_that_is_said(self, monkeypatch, caplog):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        monkeypatch.setattr("agentgym.datasets.noticed", set())
        assert load_questions("test").source == "the project's own questions over library and railway"
        load_questions("test")
        assert [record.message.count("AGENTGYM_DATA") for record in caplog.records] == [1]
        with pytest.raises(FileNotFoundError, match=r"defog.*questions_gen_sqlite\.csv.*AGENTGYM_DATA"):
            load_questions("test", "defog")
        with pytest.raises(FileNotFoundError, match="Chinook"):
            load_questions("test", "chinook")

    def test_unknown_splits_and_data_are_refused(self):
        with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
            agentgym.spec("sql").tasks("dev")
        with pytest.raises(ValueError, match="one of auto, defog, own, chinook, not 'spider'"):
            load_questions("test", "spider")

    @pytest.mark.parametrize(
        ("task", "says"),
        [
            (Task("mine", (), "SELECT 1", metadata={"database": "library"}), "no messages"),
            (question(gold=None), "gold query"),
            (question(gold=[]), "gold query"),
            (question(gold=["SELECT 1", ""]), "gold query"),
            (question(database=3), "names no database"),
            (question(database="nowhere"), "no database 'nowhere'.*library, railway.*AGENTGYM_DATA"),
            (question(database="defog/../../secret"), "no database"),
        ],
    )
    def test_a_task_that_cannot_be_posed_is_refused(self, task, says):
        with pytest.raises(ValueError, match=says):
            agentgym.make("sql", data="own").init(task)

    def test_a_gold_query_that_does_not_run_is_an_error_and_no_reward(self, env):
        started(env, question("SELECT name FROM nowhere"))
        with pytest.raises(ValueError, match=r"task 'mine'.*does not run.*no such table: nowhere"):
            env.step(call("answer", "SELECT 1"))

    def test_a_file_of_ones_own_is_a_database(self, env, tmp_path):
        path = tmp_path / "mine.sqlite"
        db = sqlite3.connect(path)
        db.executescript(
            "CREATE TABLE a (x, y, PRIMARY KEY (x, y)); CREATE TABLE b (z REFERENCES a(x)); CREATE VIEW c AS SELECT 1 AS n;"
            "INSERT INTO a VALUES (1, 2);"
        )
        db.close()
        task = question("SELECT x FROM a", str(path))
        assert "a(x, y, PRIMARY KEY (x, y))\nb(z -> a.x)\nc(n)\n" in started(env, task)
        assert env.step(call("answer", "SELECT y - x FROM a"))[1] == 1.0

    def test_its_views_and_generated_columns_may_call_any_function(self, env, tmp_path):
        path = tmp_path / "mine.sqlite"
        db = sqlite3.connect(path)
        db.executescript(
            "CREATE TABLE o (day TEXT, month TEXT GENERATED ALWAYS AS (substr(day, 1, 7)) VIRTUAL);"
            "CREATE VIEW yearly AS SELECT strftime('%Y', day) AS year, printf('%d', COUNT(*)) AS n FROM o GROUP BY 1;"
            "INSERT INTO o VALUES ('2024-05-06'), ('2024-06-07'), ('2025-01-02');"
        )
        db.close()
        task = question("SELECT strftime('%Y', day), printf('%d', COUNT(*)) FROM o GROUP BY 1", str(path))
        assert "month TEXT" in started(env, task)
        assert env.step(call("answer", "SELECT * FROM yearly"))[1] == 1.0

    @REAL
    def test_notes_on_columns_are_shown(self, env):
        task = load_questions("test", "defog")[0]
        assert "house_number bigint -- The number assigned to the building" in started(env, task)


@pytest.mark.parametrize("name", ["library", "railway"])
def test_no_question_can_be_answered_by_a_whole_table(env, name):
    """Rows of one table as they are, the simplest guess, are the answer to none."""
    database = load_database(name)
    for task in all_of("own"):
        if task.metadata["database"] == name:
            assert reward_of(env, task, f"SELECT * FROM {database.tables[0].name}") == 0.0
