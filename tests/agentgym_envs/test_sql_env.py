"""sql: what the agent reads, how it answers, what is right, its sandbox, and steadiness under any reply."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import played_twice
from sql_cases import call, look, need_sandbox, question, reward_of, started

import agentgym
from agentgym import sandbox
from agentgym.checks.check_env import check_env as check_author
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task
from agentgym.rollout.episode import Limits
from agentgym.sandbox import SandboxError
from agentgym_envs import register_all

register_all()


@pytest.fixture(scope="module", autouse=True)
def back_end():
    need_sandbox()


@pytest.fixture(scope="module")
def env():
    made = agentgym.make("sql", data="own")
    yield made
    made.close()


class TestOpening:
    def test_names_alone_can_be_shown(self):
        names = agentgym.make("sql", data="own", schema="names")
        text = started(names)
        assert "Tables:\nbranch, author, book, member, loan\n" in text
        assert "title" not in text

    def test_the_examples_in_it_work(self, env):
        text = started(env)
        example = re.search(r"<tool_call>.*</tool_call>", text)[0]
        assert "branch_id | name | city" in env.step(example)[0][0]["content"]
        form = re.search(r"Answer:\n```sql\n.*?\n```", text, re.DOTALL)[0]
        _, reward, terminated, _, info = env.step(form.replace("...", "70"))
        assert (reward, terminated, info["success"]) == (1.0, True, True)

    def test_it_tells_its_tools_to_models_that_call_natively(self, env):
        assert [tool["function"]["name"] for tool in env.tools] == ["sql", "answer"]
        assert all(list(t["function"]["parameters"]["properties"]) == ["query"] for t in env.tools)

    def test_the_messages_before_the_question_stay(self, env):
        task = question()
        task = Task(
            "mine", ({"role": "system", "content": "Be brief."}, *task.messages), task.answer, metadata=task.metadata
        )
        observation, _ = env.reset(options={"task": task})
        assert observation[0] == {"role": "system", "content": "Be brief."}
        assert observation[1]["content"].startswith("How many?\n\nTables and columns:\n")

    @pytest.mark.parametrize(
        ("kwargs", "says"),
        [
            ({"schema": "some"}, "schema must be one of full, names"),
            ({"rows": 0}, "rows must be a number"),
            ({"cell": "9"}, "cell must be a number"),
            ({"seconds": -1}, "seconds must be a number"),
            ({"max_turns": 0}, "max_turns"),
        ],
    )
    def test_wrong_settings_are_refused(self, kwargs, says):
        with pytest.raises(ValueError, match=says):
            agentgym.make("sql", **kwargs)


class TestLooking:
    def test_rows_with_their_header_in_their_order(self, env):
        started(env)
        assert look(env, "SELECT name, opened AS 'open since' FROM branch ORDER BY opened DESC LIMIT 2") == (
            "name | open since\nParkside | 2004\nHarbour | 1990"
        )

    def test_values_are_told_apart(self, env):
        started(env)
        shown = look(env, "SELECT NULL, 'NULL', x'00ff', 'a' || char(10) || 'b', 1.5, 2, '', 1e999")
        assert shown.splitlines()[1] == "NULL | 'NULL' | x'00ff' | a\\nb | 1.5 | 2 |  | inf"

    def test_rows_left_out_are_counted(self, env):
        started(env)
        lines = look(env, "SELECT loan_id FROM loan").splitlines()
        assert (len(lines), lines[-1]) == (22, "... 220 further rows not shown")

    def test_where_there_are_too_many_to_count_that_is_said(self, env):
        started(env)
        lines = look(env, "SELECT 1 FROM loan a, loan b, loan c").splitlines()
        assert re.fullmatch(r"\.\.\. \d+ or more further rows not shown", lines[-1])

    def test_long_values_and_wide_results_are_cut(self, env):
        started(env)
        assert look(env, "SELECT hex(zeroblob(150)) AS h") == f"h\n{'0' * 200}... (100 more characters)"
        wide = look(env, "SELECT hex(zeroblob(90)), hex(zeroblob(90)), hex(zeroblob(90)), hex(zeroblob(90)) FROM loan")
        assert len(wide) < 7_000
        assert wide.endswith("further rows not shown")

    def test_no_rows_are_said(self, env):
        started(env)
        assert look(env, "SELECT name FROM branch WHERE 0") == "name\n(no rows)"

    @pytest.mark.parametrize(
        ("query", "says"),
        [
            ("SELECT * FROM boook", "Error: no such table: boook\nHint: Did you mean book? The tables are: branch, "),
            ("SELECT titel FROM book", "Error: no such column: titel\nHint: Did you mean title?"),
            ("SELECT country FROM book", "no such column: country\nHint: There is author.country"),
            ("SELECT name FROM author a, member m", "ambiguous column name: name\nHint: Write the table's name"),
            ("SELECT YEAR(loaned) FROM loan", "no such function: YEAR\nHint: Write strftime('%Y', day)."),
            ("SELECT * FROM book WHERE title ILIKE 'x'", 'near "ILIKE": syntax error\nHint: SQLite has no ILIKE'),
            ("SELECT price::INTEGER FROM book", "SQLite has no ::"),
            ("SELECT name FROM author WHERE COUNT(*) > 1", "misuse of aggregate"),
            ("SELECT 1; SELECT 2", "one statement at a time.\nHint: Send each statement by itself."),
            ("DROP TABLE book", "Error: the database can only be read\nHint: Use a single SELECT"),
            ("SELECT random()", "the function random is switched off"),
            ("SELECT zeroblob(1000000000)", "string or blob too big\nHint: Select fewer and shorter values."),
            ("SELEC", 'Error: near "SELEC": syntax error'),
        ],
    )
    def test_errors_are_sqlites_own_with_a_hint(self, env, query, says):
        started(env)
        assert says in look(env, query)

    def test_a_query_over_its_time_is_stopped_and_the_episode_goes_on(self):
        env = agentgym.make("sql", data="own", seconds=0.5)
        started(env)
        endless = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"
        assert look(env, endless).startswith("Error: interrupted\nHint: It was stopped after 0.5 s.")
        assert look(env, "SELECT 1 AS x") == "x\n1"
        env.close()

    def test_a_step_may_take_as_long_as_its_calls(self):
        """They begin within 4 x 100 s, and the last of them just so."""
        assert Limits().step_limit(agentgym.make("sql", data="own", seconds=100.0)) > 500

    def test_an_answer_beside_a_call_waits_for_the_result(self, env):
        started(env)
        call = '<tool_call>{"name": "sql", "arguments": {"query": "SELECT 1 AS x"}}</tool_call>'
        assert env.step(f"{call}\nAnswer:\n```sql\nSELECT 70\n```")[1:3] == (0.0, False)
        assert env.step("Answer:\n```sql\nSELECT 70\n```")[1:3] == (1.0, True)

    def test_native_calls_are_answered_one_by_one(self, env):
        started(env)
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps({"query": query})}}
            for n, (name, query) in enumerate([("sql", "SELECT 1 AS x"), ("answer", "SELECT 70"), ("sql", "SELECT 2")])
        ]
        observation, reward, terminated, _, _ = env.step({**assistant(""), "tool_calls": calls})
        assert [(m["role"], m["tool_call_id"]) for m in observation] == [("tool", f"c{n}") for n in range(3)]
        assert [m["content"] for m in observation] == [
            "x\n1",
            "Correct.",
            "Error: the answer is given, the episode is over",
        ]
        assert (reward, terminated) == (1.0, True)

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            ("<tool_call>SELECT 1</tool_call>", "there must be one JSON object"),
            ('<tool_call>{"name": "sql", "arguments": {"sql": "SELECT 1"}}</tool_call>', 'no argument "sql"'),
            (
                '<tool_call>{"name": "run", "arguments": {"query": "SELECT 1"}}</tool_call>',
                "the tools are: sql, answer",
            ),
            ("```sql\nSELECT 70\n```", "I found neither a tool call nor an answer"),
            ("<think>Answer:\n```sql\nSELECT 70\n```</think> Hm.", "I found neither a tool call nor an answer"),
            ("70", "I found neither a tool call nor an answer"),
        ],
    )
    def test_what_is_neither_is_told_and_the_episode_goes_on(self, env, reply, says):
        started(env)
        observation, reward, terminated, _, info = env.step(reply)
        assert says in observation[0]["content"]
        assert (reward, terminated, info) == (0.0, False, {"success": False})


class TestAnswering:
    @pytest.mark.parametrize(
        "reply",
        [
            call("answer", "SELECT 70"),
            "Answer:\n```sql\nSELECT COUNT(*) FROM book;\n```",
            "I think so.\n\n**Answer:**\n```\nSELECT 70.0\n```\nDone.",
            "Answer:\n```sql\nSELECT 1\n```\nNo.\nanswer: ```SQLite\nSELECT 70\n```",
            "<think>Answer:\n```sql\nSELECT 1\n```</think>Answer:\n```sql\nSELECT 70\n```",
        ],
    )
    def test_in_any_of_the_forms(self, env, reply):
        started(env)
        observation, reward, terminated, truncated, info = env.step(reply)
        assert "Correct." in observation[0]["content"]
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
        assert info["expected"] == "SELECT COUNT(*) FROM book"

    def test_a_wrong_one_ends_the_episode_with_0(self, env):
        started(env)
        observation, reward, terminated, _, info = env.step(call("answer", "SELECT 71"))
        assert "Wrong: these are not the rows that were asked for." in observation[0]["content"]
        assert (reward, terminated, info["success"], info["answer"]) == (0.0, True, False, "SELECT 71")

    def test_a_failing_one_too_and_says_why(self, env):
        started(env)
        observation, reward, terminated, _, info = env.step(call("answer", "SELECT x FROM book"))
        assert "Wrong: no such column: x" in observation[0]["content"]
        assert (reward, terminated, info["error"]) == (0.0, True, "no such column: x")

    def test_one_that_kills_the_program_is_the_agents_problem(self):
        env = agentgym.make("sql", data="own", seconds=0.5)
        started(env)
        slow = "SELECT instr(hex(zeroblob(499000)), hex(zeroblob(250000)) || '1')"
        assert env.step(call("answer", slow))[1:3] == (0.0, True)
        assert reward_of(env, question(), "SELECT 70") == 1.0
        env.close()

    def test_one_with_too_many_rows(self, env):
        started(env)
        _, reward, _, _, info = env.step(call("answer", "SELECT 1 FROM loan a, loan b"))
        assert (reward, info["error"]) == (0.0, "the result has more than 20000 rows")

    def test_order_counts_where_the_task_and_its_gold_ask_for_it(self, env):
        gold, turned = "SELECT city FROM branch ORDER BY city", "SELECT city FROM branch ORDER BY city DESC"
        assert reward_of(env, question(gold), turned) == 0.0
        assert reward_of(env, question(gold, ordered=True), turned) == 0.0
        assert reward_of(env, question(gold, ordered=False), turned) == 1.0
        assert reward_of(env, question("SELECT city FROM branch", ordered=True), turned) == 1.0

    def test_ties_may_come_in_any_order_and_any_of_cut_ones_will_do(self, env):
        gold = "SELECT name FROM branch ORDER BY city"
        assert reward_of(env, question(gold), f"{gold}, name") == 1.0
        assert reward_of(env, question(gold), f"{gold}, name DESC") == 1.0
        assert reward_of(env, question(gold), f"{gold} DESC") == 0.0
        for ordered in (True, False):
            first = question(f"{gold} LIMIT 1", ordered=ordered)
            assert reward_of(env, first, "SELECT 'Central'") == 1.0
            assert reward_of(env, first, "SELECT 'Riverside'") == 1.0
            assert reward_of(env, first, "SELECT 'Harbour'") == 0.0

    def test_duplicates_columns_and_alternatives(self, env):
        cities = question("SELECT city, branch_id % 2 FROM branch")
        assert reward_of(env, cities, "SELECT branch_id % 2 AS x, city FROM branch") == 1.0
        assert reward_of(env, cities, "SELECT DISTINCT city, branch_id % 2 FROM branch") == 0.0
        either = question(["SELECT name FROM branch", "SELECT branch_id FROM branch"])
        assert reward_of(env, either, "SELECT branch_id FROM branch") == 1.0
        assert reward_of(env, either, "SELECT name FROM branch") == 1.0
        assert reward_of(env, either, "SELECT branch_id, name FROM branch") == 0.0

    def test_nothing_is_right_where_nothing_is_to_be_found(self, env):
        none = question("SELECT name FROM branch WHERE opened > 2100")
        assert reward_of(env, none, "SELECT city FROM branch WHERE 0") == 1.0
        assert reward_of(env, none, "SELECT city, name FROM branch WHERE 0") == 0.0
        assert reward_of(env, none, "SELECT nocolumn FROM branch WHERE 0") == 0.0
        assert reward_of(env, none, "SELECT name FROM branch") == 0.0

    def test_turns_run_out(self):
        env = agentgym.make("sql", data="own", max_turns=2)
        assert "You have 2 replies in all." in started(env)
        look(env, "SELECT 1")
        _, reward, terminated, truncated, info = env.step(call("sql", "SELECT 1"))
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)


class TestSandbox:
    def test_it_is_acquired_by_a_query_and_given_back_at_the_end(self, monkeypatch):
        boxes = []
        acquire = sandbox.acquire
        monkeypatch.setattr(sandbox, "acquire", lambda *a, **k: boxes.append(acquire(*a, **k)) or boxes[-1])
        env = agentgym.make("sql", data="own")
        started(env)
        env.step("no query")
        assert boxes == []
        look(env, "SELECT 1")
        assert [box.alive for box in boxes] == [True]
        env.step(call("answer", "SELECT 70"))
        assert [box.alive for box in boxes] == [False]
        started(env)
        look(env, "SELECT 1")
        env.close()
        env.close()
        assert [box.alive for box in boxes] == [False, False]

    def test_one_that_fails_twice_is_no_reward(self, monkeypatch):
        def acquire(*a, **k):
            raise SandboxError("the daemon is gone")

        monkeypatch.setattr(sandbox, "acquire", acquire)
        env = agentgym.make("sql", data="own")
        started(env)
        with pytest.raises(SandboxError, match="daemon is gone"):
            env.step(call("answer", "SELECT 70"))

    def test_an_unknown_back_end_is_refused(self):
        env = agentgym.make("sql", data="own", sandbox="podman")
        started(env)
        with pytest.raises(ValueError, match="podman"):
            look(env, "SELECT 1")


def test_gymnasium_and_our_own_checker_find_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(agentgym.make("sql", data="own"))
    assert check_author(agentgym.make("sql", data="own")) == []


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(), max_size=60))
def test_any_text_is_an_action_and_a_query(text):
    env = _held()
    started(env)
    for action in (text, call("sql", text), f"Answer:\n```sql\n{text}\n```"):
        observation, reward, terminated, _, info = env.step(action)
        assert observation in env.observation_space
        assert reward == float(info["success"])
        json.dumps([observation, info], ensure_ascii=False).encode("utf-8")
        if terminated:
            break


def _held(held=[]):  # noqa: B006 - one for all examples
    return held[0] if held else held.append(agentgym.make("sql", data="own", seconds=0.5)) or held[0]


def test_a_step_after_the_end_or_before_the_start_is_refused():
    env = agentgym.make("sql", data="own")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("1")
    with pytest.raises(RuntimeError, match="reset"):
        env.expert_action()
    reward_of(env, question(), "SELECT 1")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("1")


def test_two_processes_play_the_same():
    one, other = played_twice("sql", data="own")
    assert one == other
    assert len(one) > 16
