"""The index of a file of episodes, as the file grows, breaks and is written anew."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import HOSTILE, TokenPolicy, byte_tokenizer, failed, hostile, play, policy_maker

from agentgym.core.trajectory import read_jsonl, write_jsonl
from agentgym.evaluate.results import numbers_of, results_of
from agentgym.storage.jsonl import line_of
from agentgym.viewer.index import EpisodeFile, NotServed
from agentgym.viewer.query import MOST_ROWS, Query, TextSearch, find
from agentgym.viewer.rows import result_of


@pytest.fixture(scope="module")
def played():
    return play("wordle", policy_maker("random"), 4, 2)


@pytest.fixture
def file(tmp_path):
    return EpisodeFile(tmp_path / "cell.jsonl", "cell")


def lines_of(trajectories):
    return [line_of(t.to_json()).encode() for t in trajectories]


def test_a_row_says_what_its_episode_says(file, played):
    rated = replace(played[0], metadata={"tags": ["a", "b"], "difficulty": 3, "cost": 0.25})
    write_jsonl(file.path, [rated])
    file.update()
    (row,) = file.rows
    assert (row.env, row.task, row.sample, row.end) == ("wordle", rated.task_id, rated.sample, rated.end)
    assert (row.reward, row.success, row.turns) == (rated.reward, rated.success, len(rated.turns))
    assert (row.seconds, row.tags, row.difficulty, row.cost) == (rated.seconds, ("a", "b"), 3, 0.25)
    assert (row.error, row.superseded, file.share) == (None, False, 1.0)
    assert file.record(row) == json.loads(line_of(rated.to_json()))


@pytest.mark.parametrize(
    ("expected", "info", "said", "row"),
    [
        ("42", {"answer": "41", "expected": "x"}, "so\n43", ("42", "41")),
        (None, {"answer": "41", "expected": "42"}, "so", ("42", "41")),
        (["Paris"], {}, "I think:\n\nLyon \n", ("Paris", "Lyon")),
        ({"a": 1}, {"answer": ["b", "c"]}, "", ('{"a": 1}', '["b", "c"]')),
        (None, {}, "left", (None, None)),
        (None, {"answer": 7}, "left", (None, "7")),
        ("x" * 300, {}, None, ("x" * 199 + "…", None)),
    ],
)
def test_a_row_has_the_expected_and_the_given_answer(file, played, expected, info, said, row):
    turn = replace(played[0].turns[-1], info=info, reply={"role": "assistant", "content": said})
    metadata = {} if expected is None else {"expected": expected}
    write_jsonl(file.path, [replace(played[0], turns=[turn], metadata=metadata)])
    file.update()
    assert (file.rows[0].expected, file.rows[0].given) == row


def test_the_result_of_rows_is_that_of_the_episodes(file, played):
    """With an error that counts as the environment's least reward, and an episode that the agent's programs broke."""
    error = failed(replace(played[0], metadata={"floor": -2.0}))
    broken = replace(played[1].turns[-1], info={"agent_failure": "process"})
    stored = [error, replace(played[1], turns=[*played[1].turns[:-1], broken]), *played[2:]]
    write_jsonl(file.path, stored)
    file.update()
    names = {"env": "wordle", "agent": "random", "split": "test", "samples": 2, "planned": None}
    from_rows = result_of(file.rows, **names)
    from_episodes = results_of([numbers_of(trajectory) for trajectory in stored], **names)
    assert from_rows.agent_failures == {"process": 1}
    assert from_rows.to_json() == from_episodes.to_json() | {"seconds": from_rows.seconds}


def test_tokens_are_those_that_the_agent_wrote(file, played):
    import random

    by_ids = play(
        "frozen_lake", lambda e: TokenPolicy(byte_tokenizer(), ["up", "left"], random.Random(e.sample)), n=1, k=1
    )
    counted = replace(
        played[0], turns=[replace(t, usage={"prompt_tokens": 9, "completion_tokens": 4}) for t in played[0].turns]
    )
    by_episode = replace(played[1], metadata={"calls": {"usage": {"completion_tokens": 77}}})
    write_jsonl(file.path, [*by_ids, counted, by_episode, played[2]])
    file.update()
    assert [row.tokens for row in file.rows] == [by_ids[0].sampled_tokens, 4 * len(counted.turns), 77, None]


def test_an_error_has_no_reward_and_a_short_text(file, played):
    write_jsonl(file.path, [failed(played[0], error="x" * 5000)])
    file.update()
    (row,) = file.rows
    assert (row.reward, row.success, row.outcome, len(row.error)) == (None, None, "error", 200)
    assert file.failed == 1


def test_a_file_that_was_never_read_is_not_complete(file, played):
    write_jsonl(file.path, played[:1])
    assert file.share == 0.0
    file.update(lambda: False)
    assert file.share == 0.0
    file.update()
    assert file.share == 1.0


def test_only_what_was_appended_is_read(file, played):
    write_jsonl(file.path, played[:3])
    file.update()
    first, read_to = list(file.rows), file.read_to
    assert not file.changed()
    write_jsonl(file.path, played[3:])
    assert file.changed()
    file.update()
    assert file.rows[:3] == first
    assert all(a is b for a, b in zip(file.rows, first, strict=False)), "rows that were read are read again"
    assert file.rows[3].start == read_to
    assert [row.task for row in file.rows] == [t.task_id for t in played]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_however_a_file_grows_the_rows_are_those_of_the_whole(played, data, tmp_path_factory):
    content = b"".join(lines_of(played))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    file = EpisodeFile(tmp_path_factory.mktemp("grow") / "f.jsonl", "f")
    whole = EpisodeFile(file.path.with_name("whole.jsonl"), "whole")
    whole.path.write_bytes(content)
    whole.update()
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with file.path.open("ab") as out:
            out.write(content[start:end])
        file.update()
        assert file.share == 1.0
        assert len(file.rows) == content[:end].count(b"\n")
    assert file.rows == whole.rows
    assert [file.record(row) for row in file.rows] == [json.loads(line_of(t.to_json())) for t in played]


def test_a_cut_last_line_is_left_for_later(file, played):
    first, second = lines_of(played[:2])
    file.path.write_bytes(first + second[:100])
    file.update()
    assert (len(file.rows), file.broken, file.problem) == (1, 0, None)
    assert not file.changed()
    write_jsonl(file.path, [played[2]])  # takes the cut line away first
    file.update()
    assert [row.task for row in file.rows] == [played[0].task_id, played[2].task_id]
    assert file.rows[1].start == len(first)
    assert list(read_jsonl(file.path))[1].id == played[2].id


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{oops}", "not valid JSON"),
        (b'"a text"', "no list of turns"),
        (b'{"turns": 3}', "no list of turns"),
        (b"[" * 200_000, "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b'{"turns": [], "reward": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_broken_line_is_told_and_passed_over(file, played, line, what):
    first, last = lines_of(played[:2])
    file.path.write_bytes(first + line + b"\n\n" + last)
    file.update()
    assert [row.task for row in file.rows] == [played[0].task_id, played[1].task_id]
    assert file.broken == 1
    assert what in file.problem
    assert f"at byte {len(first):,}" in file.problem
    assert file.path.name in file.problem


@pytest.mark.parametrize(
    "record",
    [
        {"turns": [1, None, {"reward": "x", "tokens": 3, "usage": []}], "reward": "high", "sample": "s", "metadata": 5},
        {"turns": [], "reward": 1e999, "seconds": [], "metrics": [], "end": None, "error": {"a": 1}, "task_id": 7},
        {"turns": [{"info": [], "reply": {"content": [1]}}], "metadata": {"expected": {"a": [None]}}},
        {"turns": [{"info": {"answer": {"b": 2}}, "reply": "x"}], "metadata": {"expected": []}},
        {"turns": [{}], "metadata": {"tags": {"a": 1}, "difficulty": [], "calls": 3, "cost": "much"}},
    ],
)
def test_values_of_wrong_types_do_no_harm(file, record):
    file.path.write_text(json.dumps(record) + "\n")
    file.update()
    (row,) = file.rows
    assert file.broken == 0
    assert row.turns == len([t for t in record["turns"] if isinstance(t, dict)])
    assert row.cost is None
    find([file], Query(sort="reward", reward_min=0))


def test_a_failed_line_is_superseded_by_another_of_its_key(file, played):
    again, other = played[0], played[1]
    write_jsonl(file.path, [failed(again), failed(other)])
    file.update()
    assert (file.episodes, file.failed) == (2, 2)
    write_jsonl(file.path, [again])
    file.update()
    assert (file.episodes, file.failed) == (2, 1)
    assert [row.superseded for row in file.rows] == [True, False, False]
    write_jsonl(file.path, [failed(again, error="later")])  # a failure never takes the place of an episode
    file.update()
    assert [row.superseded for row in file.rows] == [True, False, False, True]
    assert (file.episodes, file.failed) == (2, 1)


def test_of_failed_lines_and_of_played_lines_the_last_counts(file, played):
    one, two = played[0], replace(played[0], seconds=123.0)
    write_jsonl(file.path, [failed(one), failed(one, error="last")])
    file.update()
    assert [row.error for row in file.rows if not row.superseded] == ["last"]
    write_jsonl(file.path, [one, two])
    file.update()
    assert [row.seconds for row in file.rows if not row.superseded] == [123.0]
    assert (file.episodes, file.failed) == (1, 0)


def test_in_a_training_run_nothing_is_superseded(tmp_path, played):
    file = EpisodeFile(tmp_path / "train-000001.jsonl", "train-000001", hides_failed=False)
    write_jsonl(file.path, [failed(played[0]), played[0], played[0]])
    file.update()
    assert (file.episodes, file.failed) == (3, 1)


@pytest.mark.parametrize("how", ["replaced", "shorter", "in place and longer"])
def test_a_file_that_is_written_anew_is_read_from_its_start(file, played, how):
    write_jsonl(file.path, played[:3])
    file.update()
    old = file.rows[2]
    changed = [replace(t, metadata={"rescored": how}) for t in played]
    content = b"".join(lines_of(changed if how == "in place and longer" else changed[:2]))
    if how == "replaced":
        new = file.path.with_suffix(".new")
        new.write_bytes(content)
        new.replace(file.path)
    else:
        file.path.write_bytes(content)
    file.update()
    assert len(file.rows) == content.count(b"\n")
    assert file.record(file.rows[0])["metadata"] == {"rescored": how}
    if how == "shorter":
        with pytest.raises(NotServed, match="was changed"):
            file.record(replace(old, start=old.start + 1))


def test_a_file_that_went_away_or_is_none_says_so(file, played):
    file.update()
    assert "No such file" in file.problem
    write_jsonl(file.path, played[:1])
    file.update()
    assert (len(file.rows), file.problem) == (1, None)


def test_a_pipe_does_not_hold_the_reader_up(file):
    os.mkfifo(file.path)
    file.update()
    assert "not a regular file" in file.problem


def test_reading_can_be_stopped_and_goes_on(file, played):
    write_jsonl(file.path, played * 20)
    answers = iter([True, False])
    file.update(lambda: next(answers))
    some = len(file.rows)
    assert 0 < some < 160
    assert 0 < file.share < 1
    assert file.changed()
    file.update()
    assert (len(file.rows), file.share) == (160, 1.0)


def test_queries_filter_and_sort(file, played):
    tagged = [replace(t, metadata={"tags": [f"t{i}"]}) for i, t in enumerate(played)]
    write_jsonl(file.path, [*tagged, failed(replace(played[0], sample=9))])
    file.update()
    rows = file.rows

    def ask(**query):
        return [row for _, row in find([file], Query(**query))]

    assert ask() == rows
    assert ask(order="desc") == rows[::-1]
    assert ask(outcome="error") == [rows[-1]]
    assert ask(outcome="success") + ask(outcome="failure") == sorted(
        (r for r in rows if not r.failed), key=lambda r: not r.success
    )
    assert ask(tag="t3") == [rows[3]]
    assert ask(end=rows[0].end) == [r for r in rows if r.end == rows[0].end]
    assert ask(task=rows[0].task, sample=1) == [r for r in rows if r.task == rows[0].task and r.sample == 1]
    part = rows[0].task[-3:]
    assert ask(task_has=part.upper()) == [r for r in rows if part in r.task] != []
    assert ask(task=part) == []
    assert ask(turns_min=2, turns_max=5) == [r for r in rows if 2 <= r.turns <= 5]
    assert ask(reward_min=0.0) == rows[:-1], "an error has no reward"
    assert ask(tokens_min=0) == [], "nobody counted"
    assert ask(cell="other") == []
    by_reward = ask(sort="reward", order="desc")
    assert by_reward[-1] is rows[-1], "what has no reward comes last"
    assert [r.reward for r in by_reward[:-1]] == sorted((r.reward for r in rows[:-1]), reverse=True)
    assert [(r.task, r.sample) for r in ask(sort="task")] == sorted((r.task, r.sample) for r in rows)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"colour": "red"}, "no parameter 'colour'"),
        ({"outcome": "draw"}, "outcome is one of success, failure, error"),
        ({"sort": "luck"}, "sort is one of stored, reward"),
        ({"order": "up"}, "order is one of asc, desc"),
        ({"turns_min": "few"}, "turns_min is a number, not 'few'"),
        ({"limit": "0"}, f"limit from 1 to {MOST_ROWS}"),
        ({"limit": "1001"}, f"limit from 1 to {MOST_ROWS}"),
        ({"offset": "-1"}, "offset is at least 0"),
        ({"offset": "1.5"}, "offset is a number"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        Query.of(given)


def test_a_query_takes_the_names_of_the_page():
    given = {"cell": "c", "turns_min": "2", "limit": "5", "superseded": "1", "text": "", "sample": "3"}
    assert Query.of(given) == Query(cell="c", turns_min=2.0, limit=5, superseded=True, sample=3)
    assert not Query.of({"superseded": "0"}).superseded


def found_by(text, file):
    search = TextSearch(text)
    while search.share([file]) < 1.0:
        search.go_on([file], 5.0)
    return [i for i, row in enumerate(file.rows) if search.has(file, row.start)]


@pytest.mark.parametrize(
    ("text", "sought"),
    [
        ("Plain words", "pLAIN"),
        ('a "quote" and \\ back', '"QUOTE" and \\'),
        ("two\nlines", "two\nlines"),
        ("Straße", "STRASSE".replace("SS", "ß")),
        ("ÜBER den Wolken", "über"),
        ("日本語のテキスト", "語のテ"),
        ("Привет", "ПРИВЕТ"),
        ("half \ud800 a pair, ÄRGER", "ärger"),
        (HOSTILE, "</SCRIPT>"),
        ("bell \x07 rings", "\x07 r"),
    ],
)
def test_a_text_is_found_without_case_wherever_a_reader_sees_it(tmp_path, played, text, sought):
    file = EpisodeFile(tmp_path / "f.jsonl", "f")
    other, last = played[0], replace(played[1], final_observation=[{"role": "user", "content": text}])
    write_jsonl(file.path, [other, hostile(played[2], text), last, replace(other, metadata={"note": text})])
    file.update()
    assert found_by(sought, file) == [1, 2]


def test_names_of_fields_are_no_text(file, played):
    write_jsonl(file.path, played[:1])
    file.update()
    assert found_by("final_observation", file) == []
    assert found_by("content", file) == []


def test_a_search_goes_on_where_the_file_grew_and_starts_again_where_it_is_new(file, played):
    marked = replace(played[0], error="NEEDLE", end="error")
    write_jsonl(file.path, [played[0], marked])
    file.update()
    search = TextSearch("needle")
    search.go_on([file], 10)
    assert (search.share([file]), search.has(file, file.rows[1].start)) == (1.0, True)
    write_jsonl(file.path, [marked])
    file.update()
    assert search.share([file]) == pytest.approx(2 / 3)
    search.go_on([file], 10)
    assert search.has(file, file.rows[2].start)
    file.path.write_bytes(lines_of([marked])[0])
    file.update()
    assert not search.has(file, 0)
    search.go_on([file], 10)
    assert search.has(file, 0)
