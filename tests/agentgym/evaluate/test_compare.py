"""Which of two runs is better: by hand-made run folders, and by the command."""

import io
import json
import random
from dataclasses import replace

import pytest
from numbers_cases import cell, trajectory
from rich.console import Console

from agentgym.cli import main
from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate import compare_runs
from agentgym.evaluate.compare import MOST_CHANGED, comparison_table
from agentgym.storage.files import write_json


def evaluation(path, cells):
    """A run folder. `cells` has `(cell, episodes)`, the environment's settings in the cell."""
    (path / "episodes").mkdir(parents=True)
    records = []
    for one, episodes in cells:
        file = f"episodes/{one.name.replace('/', '-')}.jsonl"
        write_jsonl(path / file, episodes)
        records.append({**one.to_json(), "tasks": len({e.task_id for e in episodes}), "file": file})
    write_json(path / "run.json", {"kind": "evaluation", "format": 1, "name": path.name, "cells": records})
    return path


def rewards(by_task, **settings):
    """Episodes with these rewards: `{task: [reward of each sample]}`."""
    return [trajectory(task, i, r, **settings) for task, values in by_task.items() for i, r in enumerate(values)]


@pytest.fixture
def pair(tmp_path):
    """b is better on two tasks, worse on one and the same on one."""
    a = evaluation(tmp_path / "a", [(cell(k=2), rewards({"t1": [0, 0], "t2": [1, 0], "t3": [1, 1], "t4": [1, 0]}))])
    b = evaluation(tmp_path / "b", [(cell(k=2), rewards({"t1": [1, 1], "t2": [1, 1], "t3": [0, 1], "t4": [0, 1]}))])
    return a, b


def test_differences_are_of_the_tasks_means(pair):
    comparison = compare_runs(*pair)
    (found,) = comparison.cells
    success = found.measures["success"]
    assert (success.tasks, success.a, success.b, success.mean) == (4, 0.5, 0.75, 0.25)
    assert (success.wins, success.ties, success.losses, success.p) == (2, 1, 1, 1.0)
    assert success.low < 0 < success.high
    assert found.measures["turns"].mean == 0
    assert "tokens" not in found.measures, "nobody counted"
    assert (found.episodes_a, found.episodes_b, found.notes) == (8, 8, [])
    assert [change["task"] for change in found.changed] == ["t1", "t2", "t3"]
    assert (found.changed[0]["success_a"], found.changed[0]["success_b"]) == (0.0, 1.0)
    assert (comparison.only_a, comparison.only_b) == ([], [])


def test_exchanging_the_runs_exchanges_the_answer(pair):
    (there,), (back,) = compare_runs(*pair).cells, compare_runs(*reversed(pair)).cells
    assert there.measures["success"].mean == -back.measures["success"].mean
    assert there.measures["success"].wins == back.measures["success"].losses


def test_a_run_is_as_good_as_itself(pair):
    (found,) = compare_runs(pair[0], pair[0]).cells
    assert (found.measures["success"].mean, found.measures["success"].ties, found.changed) == (0.0, 4, [])


def test_no_interval_of_success_is_wider_than_success_can_differ(tmp_path):
    a = evaluation(tmp_path / "a", [(cell(), rewards({"t1": [1], "t2": [1], "t3": [1]}))])
    b = evaluation(tmp_path / "b", [(cell(), rewards({"t1": [0], "t2": [0], "t3": [1]}))])
    (found,) = compare_runs(a, b).cells
    success, reward = found.measures["success"], found.measures["reward"]
    # Student's t by hand: the mean -2/3, its standard error 1/3, the quantile of 2 degrees of freedom 4.303.
    assert (reward.low, reward.high) == pytest.approx((-2 / 3 - 4.303 / 3, -2 / 3 + 4.303 / 3), abs=1e-3)
    assert (success.low, success.high) == pytest.approx((-1, reward.high))


def test_pairing_finds_a_difference_that_is_small_beside_that_of_tasks(tmp_path):
    rng = random.Random(0)
    levels = {f"t{i}": rng.uniform(0, 100) for i in range(30)}
    runs = [
        evaluation(tmp_path / name, [(cell(), rewards({t: [x + gain + rng.gauss(0, 0.5)] for t, x in levels.items()}))])
        for name, gain in (("a", 0.0), ("b", 1.0))
    ]
    (found,) = compare_runs(*runs).cells
    assert 0 < found.measures["reward"].low < 1.0 < found.measures["reward"].high
    assert len(found.changed) == MOST_CHANGED


def test_failed_episodes_are_in_no_mean_and_a_task_of_only_those_is_not_compared(tmp_path):
    a = evaluation(tmp_path / "a", [(cell(k=2), [*rewards({"t1": [1, 1], "t2": [1, 1]})])])
    failed = [
        trajectory("t1", 1, error="e: gone"),
        trajectory("t2", 0, error="e: gone"),
        trajectory("t2", 1, error="e: gone"),
    ]
    b = evaluation(tmp_path / "b", [(cell(k=2), [trajectory("t1", 0, 1.0), *failed])])
    (found,) = compare_runs(a, b).cells
    assert (found.measures["success"].tasks, found.measures["success"].b) == (1, 1.0)
    assert (found.errors_a, found.errors_b, found.only_a) == (0, 3, 1)
    assert found.notes == ["1 task of a has only failed episodes in b"]
    counted = found.measures["success_with_errors"]
    assert (counted.tasks, counted.a, counted.b) == (2, 1.0, 0.25), "beside them, with each error as a zero"
    printed = io.StringIO()
    Console(file=printed, width=80).print(comparison_table(compare_runs(a, b)))
    assert "errors as failures" in printed.getvalue()
    (same,) = compare_runs(a, a).cells
    assert "success_with_errors" not in same.measures, "only where there are errors"


def test_an_episode_that_failed_and_was_played_again_counts_once(tmp_path):
    again = [trajectory("t1", 0, error="e: gone"), trajectory("t1", 0, 1.0)]
    runs = [evaluation(tmp_path / name, [(cell(), again)]) for name in "ab"]
    (found,) = compare_runs(*runs).cells
    assert (found.episodes_a, found.errors_a) == (1, 0)


def test_what_cannot_be_compared_is_told(tmp_path):
    from dataclasses import replace

    def made(name, tasks, **settings):
        one = cell(**settings.pop("cell", {}))
        one = replace(one, env=replace(one.env, kwargs=settings.pop("kwargs", {})))
        return evaluation(tmp_path / name, [(one, rewards(tasks))])

    a = made("a", {"t1": [1, 0], "t2": [1, 0]}, kwargs={"size": 4}, cell={"seed": 0})
    b = made("b", {"t1": [1], "t3": [1], "t4": [0]}, kwargs={"size": 6}, cell={"seed": 7})
    (found,) = compare_runs(a, b).cells
    assert found.notes == [
        "kwargs differs: {'size': 4} and {'size': 6}",
        "seed differs: 0 and 7",
        "1 task only in a",
        "2 tasks only in b",
        "episodes of each task: 2 and 1",
    ]
    assert found.measures["success"].tasks == 1
    assert found.measures["success"].low is None


def test_other_data_under_the_same_ids_is_told(tmp_path):
    runs = [evaluation(tmp_path / name, [(cell(), rewards({"t1": [1]}))]) for name in "ab"]
    for path in runs:
        record = json.loads((path / "run.json").read_text())
        record["cells"][0]["first_task"] = path.name
        write_json(path / "run.json", record)
    (found,) = compare_runs(*runs).cells
    assert ["data has changed" in note for note in found.notes] == [True]


def names_of(comparison):
    return [(c.env, c.agent_a, c.agent_b) for c in comparison.cells]


@pytest.mark.parametrize(
    ("a", "b", "pairs", "only_a", "only_b"),
    [
        (["e@m"], ["e@m"], [("e", "m", "m")], [], []),
        (["e@old"], ["e@new"], [("e", "old", "new")], [], []),
        (["e@m", "e@x"], ["e@x", "e@m"], [("e", "m", "m"), ("e", "x", "x")], [], []),
        (["e@m", "e@old"], ["e@m", "e@new"], [("e", "m", "m"), ("e", "old", "new")], [], []),
        (["e@p", "e@q"], ["e@r"], [], ["e@p", "e@q"], ["e@r"]),
        (["e@m", "f@m"], ["f@m", "g@m"], [("f", "m", "m")], ["e@m"], ["g@m"]),
        (["e/train@m"], ["e@m"], [], ["e/train@m"], ["e@m"]),
    ],
)
def test_cells_belong_together_by_environment_and_agent(tmp_path, a, b, pairs, only_a, only_b):
    def made(name, cells):
        found = []
        for one in cells:
            env, _, agent = one.partition("@")
            env, _, split = env.partition("/")
            found.append((cell(env, agent, split=split or "test"), rewards({"t": [1]}, env=env)))
        return evaluation(tmp_path / name, found)

    comparison = compare_runs(made("a", a), made("b", b))
    assert (names_of(comparison), comparison.only_a, comparison.only_b) == (pairs, only_a, only_b)


def training_run(path, by_step):
    """What a training run leaves of its evaluations."""
    (path / "trajectories").mkdir(parents=True)
    for step, episodes in by_step.items():
        write_jsonl(path / "trajectories" / f"eval-{step:06d}.jsonl", episodes)
    return path


def test_a_training_run_is_its_last_evaluation_and_a_file_is_a_run_too(tmp_path):
    run = training_run(tmp_path / "run", {0: rewards({"t1": [0], "t2": [0]}), 20: rewards({"t1": [1], "t2": [0]})})
    start = run / "trajectories" / "eval-000000.jsonl"
    comparison = compare_runs(start, run)
    assert names_of(comparison) == [("e", "eval-000000", "step 20")]
    assert comparison.cells[0].measures["success"].mean == 0.5
    against = evaluation(tmp_path / "b", [(cell(), rewards({"t1": [1], "t2": [1]}))])
    (found,) = compare_runs(run, against).cells
    assert (found.split, found.measures["success"].mean) == ("test", 0.5)


def test_a_file_may_hold_environments_whose_tasks_have_the_same_ids(tmp_path):
    one, other = rewards({"t1": [0], "t2": [0]}), rewards({"t1": [1], "t2": [1]})
    run = training_run(tmp_path / "run", {0: [*one, *(replace(t, env="other") for t in other)]})
    (file,) = (run / "trajectories").iterdir()
    for comparison in (compare_runs(run, run), compare_runs(file, file)):
        assert [(c.env, c.episodes_a, c.measures["reward"].a) for c in comparison.cells] == [
            ("e", 2, 0),
            ("other", 2, 1),
        ]


# ---- the command


def test_the_command_prints_a_table_for_people(pair, capsys):
    assert main(["compare", *map(str, pair)]) == 0
    out = capsys.readouterr().out
    assert "50.0%" in out
    assert "+25.0%" in out
    assert "the tasks that changed most" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= max(80, *(len(f"a: {path}") for path in pair))


def test_the_command_prints_json_for_programs(pair, capsys):
    assert main(["compare", *map(str, pair), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare_runs(*pair).to_json()
    assert main(["compare", *map(str, pair), str(pair[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(c["a"], c["b"]) for c in found] == [(str(pair[0]), str(pair[1])), (str(pair[0]), str(pair[0]))]


def test_the_command_shows_the_measure_that_is_asked_for(pair, capsys):
    assert main(["compare", *map(str, pair), "--measure", "turns"]) == 0
    assert "turns" in capsys.readouterr().out
    assert main(["compare", *map(str, pair), "--measure", "tokens"]) == 0
    assert "nobody counted" not in capsys.readouterr().out


def test_nothing_in_common_is_told_and_exit_code_1(tmp_path, capsys):
    a = evaluation(tmp_path / "a", [(cell("e"), rewards({"t": [1]}))])
    b = evaluation(tmp_path / "b", [(cell("f"), rewards({"t": [1]}, env="f"))])
    assert main(["compare", str(a), str(b)]) == 1
    out, err = capsys.readouterr()
    assert "only in a: e@m" in out
    assert "no task in common" in err


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["."], "at least two runs"),
        ([".", "nowhere"], "nowhere does not exist"),
        ([".", "empty"], "holds nothing to compare"),
        ([".", "broken.jsonl"], "broken.jsonl:1"),
        ([".", "run.json"], "run.json is not a file of episodes (.jsonl): name the run's folder, ."),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, paths, words, capsys):
    evaluation(tmp_path / "run", [(cell(), rewards({"t": [1]}))])
    monkeypatch.chdir(tmp_path / "run")
    (tmp_path / "run" / "empty").mkdir()
    (tmp_path / "run" / "broken.jsonl").write_text('{"task_id"\n{}\n')
    assert main(["compare", *paths]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_nothing_of_a_run_moves_the_cursor(tmp_path, capsys):
    nasty = "\x1b[2J[bold]\n"
    runs = [
        evaluation(tmp_path / name, [(cell("e", nasty), rewards({nasty: [float(name == "b")], "t": [0]}))])
        for name in "ab"
    ]
    assert main(["compare", *map(str, runs)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]" in out
