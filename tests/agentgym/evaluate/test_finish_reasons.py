"""Answers that are not what the model would have said: cut, withheld, or never asked for. None passes for a plain score."""

import asyncio
import json

import pytest
from endpoint_double import said, serving
from rich.console import Console

from agentgym.cli import main
from agentgym.core.trajectory import Trajectory, Turn, read_jsonl
from agentgym.evaluate import evaluate, results_of, table_of
from agentgym.evaluate.agents import chat, policy_maker
from agentgym.evaluate.results import CellResult, Results, cause_in
from agentgym.evaluate.tables import results_table
from agentgym.viewer.query import Query
from agentgym.viewer.rows import row_of

TOO_LONG = (400, '{"error": {"code": "context_length_exceeded", "message": "maximum context length is 9"}}')


def played(answer, out, **settings):
    with serving(answer) as url:
        maker = policy_maker(chat("double", url, retries=0, **settings))
        result = asyncio.run(evaluate("frozen_lake", maker, n=4, out=out, retries=0))
    [file] = (out / "episodes").glob("*.jsonl")
    return result, list(read_jsonl(file))


def test_a_refusal_by_the_content_filter_is_an_error_and_no_score(tmp_path):
    result, episodes = played(lambda body: said(None, "content_filter"), tmp_path)
    assert (result.episodes, result.errors, result.success) == (0, 4, None)
    assert (result.finish_reasons, result.cut) == ({"content_filter": 4}, 4)
    assert all("content filter" in episode.error for episode in episodes)
    assert [turn.finish_reason for turn in episodes[0].turns] == ["content_filter"]


def test_what_a_filter_cut_off_after_some_words_is_played_and_counted(tmp_path):
    result, _ = played(lambda body: said("right", "content_filter"), tmp_path)
    assert (result.errors, result.finish_reasons["content_filter"], result.cut) == (0, 4, 4)


def test_a_first_request_that_is_too_long_is_an_error_and_no_score(tmp_path):
    result, episodes = played(lambda body: TOO_LONG, tmp_path)
    assert (result.episodes, result.errors, result.finish_reasons) == (0, 4, {"context": 4})
    assert all("longer than the model's context" in episode.error for episode in episodes)


def test_a_conversation_that_grows_too_long_is_truncated_scored_and_counted(tmp_path):
    def answer(body):
        return TOO_LONG if len(body["messages"]) > 3 else said("right")

    result, episodes = played(answer, tmp_path)
    grown = [episode for episode in episodes if episode.end == "context"]
    assert grown
    assert result.errors == 0
    assert (result.finish_reasons["context"], result.cut) == (len(grown), len(grown))


def test_the_command_says_what_was_cut_and_ends_with_1_where_nothing_was_played(tmp_path, capsys):
    def asked(answer, *options):
        with serving(answer) as url:
            asking = ["--model", "double", "--base-url", url, "-n", "3", "--retries", "0", "--quiet", *options]
            code = main(["eval", "frozen_lake", *asking, "--out", str(tmp_path / f"{len(list(tmp_path.iterdir()))}")])
        return code, capsys.readouterr()

    code, (table, _) = asked(lambda body: TOO_LONG)
    assert code == 1
    assert "warning: 3 of 3 episodes were cut: 3 x context" in table
    code, (table, _) = asked(lambda body: said("right", "length"))
    assert code == 0
    assert "warning: 3 of 3 episodes were cut: 3 x length" in table
    _, (text, _) = asked(lambda body: said("right", "length"), "--json")
    assert json.loads(text)["cells"][0]["finish_reasons"] == {"length": 3}


def test_the_table_says_that_the_run_s_limit_of_turns_ended_episodes(tmp_path, capsys):
    with serving(lambda body: said("right")) as url:
        asking = ["--model", "double", "--base-url", url, "-n", "3", "--quiet", "--max-turns", "1"]
        assert main(["eval", "frozen_lake", *asking, "--out", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 of 3 episodes ended at --max-turns, before their environment ended them (its own limit: --kwargs" in shown


def cut(*reasons, end="terminated"):
    return Trajectory("a/0", "e", "a", turns=[Turn([], {}, finish_reason=r) for r in reasons], end=end)


def test_each_reason_counts_once_for_an_episode_and_5_percent_warn():
    few = results_of([cut("stop", "length", "length"), *(cut("stop") for _ in range(19))], env="e")
    assert (few.finish_reasons, few.cut, few.much_cut) == ({"stop": 20, "length": 1}, 1, False)
    many = results_of([cut("length"), *(cut("stop") for _ in range(18))], env="e")
    assert many.much_cut
    console = Console(width=100, file=None)
    with console.capture() as shown:
        console.print(results_table(Results("r", [few])), table_of([few]))
    text = shown.get()
    assert "1 of 20 episodes were cut: 1 x length" in text
    assert "warning" not in text
    assert CellResult.from_json(json.loads(json.dumps(few.to_json()))) == few


@pytest.mark.parametrize(("reason", "found"), [("length", True), ("context", False), ("stop", True)])
def test_the_viewer_finds_episodes_by_a_finish_reason(reason, found):
    row = row_of(json.loads(json.dumps(cut("stop", "length").to_json())), 0, 1)
    assert Query.of({"finish": reason}).matches(row) is found


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("KeyError: request req_01ABcd9x2 of 3", "KeyError: request req_77ZZyy1q3 of 12", True),
        ("OSError: connect to 10.0.0.7:8000", "OSError: connect to 10.0.1.9:41231", True),
        ("ValueError: <Env object at 0x7f12ab>", "ValueError: <Env object at 0x7f99cd>", True),
        ("no session 123e4567-e89b-12d3-a456-426614174000", "no session 00000000-aaaa-bbbb-cccc-0123456789ab", True),
        ("EndpointError: u: answered 500: died", "EndpointError: u: answered 503: died", False),
        ("KeyError: 'a' (env.py:12 in step)", "KeyError: 'a' (env.py:40 in step)", False),
        ("no model gpt-4o", "no model gpt-4.1x", False),
        ("pip install 'swebench>=4.1,<6'", "pip install 'swebench>=5.0,<6'", False),
        ("limit=30", "limit=60", True),
        ("took 12 > 10", "took 13 > 10", True),
    ],
)
def test_errors_that_differ_in_ids_numbers_and_addresses_count_together(one, other, alike):
    first, second = (cause_in(f"e, task 't', turn 0: act failed after 0.1 s: {text}") for text in (one, other))
    assert (first == second) is alike
