"""`report.html`: the viewer's page of one run, with its numbers whole and some of its episodes."""

import json
from collections import Counter

import pytest
from exported_page import Page
from made_runs import HOSTILE, hostile, play, policy_maker, write_evaluation, write_training

from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate.run import results_in
from agentgym.storage.files import write_json
from agentgym.viewer.export import OF_EACH_OUTCOME, static_files, write_report


def reported(run, kind="evaluation"):
    if kind == "evaluation":
        write_json(run / "results.json", results_in(run).to_json())
    return Page(write_report(run, kind).read_text(encoding="utf-8"))


def test_the_report_of_an_evaluation_has_its_results_and_some_episodes_of_each_outcome(tmp_path):
    run = write_evaluation(tmp_path / "games", n=12, k=3)
    data = reported(run).data
    details = data["details"]["games"]
    results = json.loads((run / "results.json").read_text())
    assert data["home"] == "games"
    assert details["results"] == results
    for cell, result in zip(details["cells"], results["cells"], strict=True):
        assert cell["result"] == result
        shown = (cell["episodes"], cell["success"], cell["low"], cell["high"], cell["turns"])
        assert shown == (36, result["success"], result["success_low"], result["success_high"], result["turns"])
    assert (details["live"], details["indexing"], details["episodes"]) == (False, 1.0, 72)
    rows = data["rows"]["games"]
    assert {row["key"] for row in rows} == set(data["episodes"]["games"])
    outcomes = Counter((row["agent"], "success" if row["success"] else "failure") for row in rows)
    assert outcomes == dict.fromkeys(
        [("expert", "success"), ("random", "success"), ("random", "failure")], OF_EACH_OUTCOME
    )
    assert data["note"].startswith("9 of 72 episodes are in this file")


def test_no_more_is_read_than_the_examples_take(tmp_path):
    run = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=200, k=1)
    write_json(run / "results.json", results_in(run).to_json())
    (file,) = (run / "episodes").iterdir()
    with file.open("a") as out:
        out.write("broken\n")
    page = Page(write_report(run, "evaluation").read_text())
    assert page.data["details"]["run"]["problems"] == []


def test_what_a_model_wrote_ends_no_element(tmp_path):
    run = write_evaluation(tmp_path / "odd", [("wordle", "random")], n=1, k=1)
    (file,) = (run / "episodes").iterdir()
    write_jsonl(file, [hostile(play("wordle", policy_maker("random"), 1, 1)[0])])
    page = reported(run)
    tags, own = ([tag for tag, _ in one.elements] for one in (page, Page(static_files()["index.html"][1].decode())))
    assert (tags.count("script"), tags.count("img")) == (own.count("script") + 1, own.count("img"))
    assert page.data["rows"]["odd"][-1]["task"] == HOSTILE


def test_a_run_in_which_nothing_was_played_has_a_report_too(tmp_path):
    run = write_evaluation(tmp_path / "none", [("wordle", "random")], n=1, k=1)
    for file in (run / "episodes").iterdir():
        file.unlink()
    details = reported(run).data["details"]["none"]
    assert [(cell["episodes"], cell["planned"], cell["success"]) for cell in details["cells"]] == [(0, 1, None)]


def test_the_report_of_a_training_run_has_its_measurements_and_the_first_and_the_last_evaluation(tmp_path):
    run = write_training(tmp_path / "lake")
    data = reported(run, "training").data
    assert data["metrics"]["lake"] == [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["cell"] for step in data["details"]["lake"]["steps"]] == ["eval-000000", "eval-000002"]
    rows = data["rows"]["lake"]
    assert {row["step"] for row in rows} == {0, 2}
    assert all(data["episodes"]["lake"][row["key"]]["tokens"] for row in rows)


def test_what_a_crash_has_left_of_lines_is_named_and_the_rest_is_shown(tmp_path):
    run = write_training(tmp_path / "lake", steps=0)
    with (run / "metrics.jsonl").open("a") as out:
        out.write('{"kind": "tr\n')
    file = run / "trajectories" / "eval-000000.jsonl"
    file.write_text("{\n" + file.read_text())
    data = reported(run, "training").data
    assert [problem.partition(":")[0] for problem in data["details"]["lake"]["problems"]] == [
        file.name,
        "metrics.jsonl",
    ]
    assert len(data["metrics"]["lake"]) == 1
    assert data["rows"]["lake"]


@pytest.mark.parametrize("kind", ["evaluation", "training"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, kind):
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path, kind)
