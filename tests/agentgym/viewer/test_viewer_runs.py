"""Which runs are found, what is said of them, and that nothing outside the named folders is looked at."""

import fcntl
import os
import time

import pytest
from made_runs import failed, play, policy_maker, write_evaluation, write_training

from agentgym.core.trajectory import write_jsonl
from agentgym.core.usage_error import UsageError
from agentgym.storage import locks
from agentgym.storage.files import write_json, write_text
from agentgym.viewer.answers import BadRequest, compare, details, metrics, summary
from agentgym.viewer.index import NotServed
from agentgym.viewer.run import Runs, roots_of, run_folders


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "first", created=100.0)
    write_evaluation(folder / "deep" / "er" / "second", [("wordle", "expert")], created=200.0)
    write_training(folder / "lake")
    return folder


def seen(*roots):
    runs = Runs(roots_of(list(roots)))
    return {run.id: run for run in runs.look()}


def read(run):
    run.advance(30)
    return details(run)


def test_runs_are_found_below_the_folders_and_by_their_own_names(made):
    assert set(seen(made)) == {"first", "second", "lake"}
    assert set(seen(made / "first")) == {"first"}
    assert set(seen(made / "deep", made / "first", made)) == {"first", "second", "lake"}
    assert {run.id: run.kind for run in seen(made).values()} == {
        "first": "evaluation",
        "second": "evaluation",
        "lake": "training",
    }


def test_a_run_that_is_still_being_read_has_no_score(tmp_path):
    write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=40, k=2)
    run = seen(tmp_path)["run"]
    run.refresh()
    (file,) = run.files.values()
    steps = iter([True, False])
    file.update(lambda: next(steps))
    part = details(run)
    assert 0 < part["indexing"] < 1
    assert (part["headline"], part["cells"][0]["success"], part["cells"][0]["reward"]) == (None, None, None)
    assert part["episodes"] == len(file.rows) > 0
    whole = read(run)
    assert whole["indexing"] == 1.0
    assert whole["headline"]["value"] == whole["cells"][0]["success"] == 1.0


def test_what_is_no_run_is_none(tmp_path):
    for name, content in (("a", '{"kind": "other"}'), ("b", "[1]"), ("c", '{"kind": "training"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.yaml").write_text("x: 1")
    assert seen(tmp_path) == {}


@pytest.mark.parametrize(("name", "words"), [("nowhere", "there is no folder"), ("file", "is not a folder")])
def test_a_path_that_is_no_folder_is_the_users_mistake(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=words):
        roots_of([tmp_path / name])


def test_an_evaluation_says_what_was_played_and_how_well(made):
    run = read(seen(made)["first"])
    assert (run["kind"], run["created"], run["episodes"], run["errors"]) == ("evaluation", 100.0, 12, 0)
    assert (run["envs"], run["agents"], run["live"], run["problem"]) == (
        ["frozen_lake"],
        ["expert", "random"],
        False,
        None,
    )
    assert [cell["name"] for cell in run["cells"]] == ["frozen_lake@expert", "frozen_lake@random"]
    expert = run["cells"][0]
    assert (expert["planned"], expert["episodes"], expert["success"], expert["reward"]) == (6, 6, 1.0, 1.0)
    assert 0 < expert["low"] < expert["high"] == 1.0
    assert run["headline"]["label"] == "success, mean of 2 cells"
    assert run["headline"]["value"] == pytest.approx(sum(cell["success"] for cell in run["cells"]) / 2)
    assert '"concurrency": 8' in run["config"]


def test_one_cell_has_an_interval(made):
    run = read(seen(made)["second"])
    cell = run["cells"][0]
    assert run["headline"] == {"label": "success", "value": cell["success"], "low": cell["low"], "high": cell["high"]}


def test_a_training_run_says_its_last_evaluation_and_its_steps(made):
    run = read(seen(made)["lake"])
    assert (run["kind"], run["envs"], run["episodes"], run["errors"]) == ("training", ["frozen_lake"], 20, 0)
    assert run["headline"]["label"] == "success at step 2"
    assert [(s["step"], s["kind"], s["cell"]) for s in run["steps"]] == [
        (0, "eval", "eval-000000"),
        (1, "eval", "eval-000001"),
        (1, "train", "train-000001"),
        (2, "eval", "eval-000002"),
        (2, "train", "train-000002"),
    ]
    assert run["config"].startswith("env:\n  id: frozen_lake")
    assert run["versions"]["command"] == ["agent-train", "+env=frozen_lake"]


def test_metrics_that_were_written_anew_say_so_whatever_their_number(tmp_path):
    file = write_training(tmp_path / "lake", steps=1, n=1, k=1) / "metrics.jsonl"
    *before, last = file.read_text().splitlines()
    runs = Runs(roots_of([tmp_path]))
    told = [metrics(runs, "lake", {"after": "3"})]
    for extra in ([], [last]):  # it went back to a checkpoint and came as far again, then further
        write_text(file, "\n".join([*before, last, *extra]) + "\n")
        told.append(metrics(runs, "lake", {"after": "3"}))
    assert [(each["next"], each["rewritten"]) for each in told] == [(3, 1), (3, 2), (4, 3)]


def test_ids_stay_the_same_whatever_comes(tmp_path):
    write_evaluation(tmp_path / "b" / "same", n=1, k=1)
    runs = Runs(roots_of([tmp_path]))
    runs.look()
    first = runs.get("same").path
    write_evaluation(tmp_path / "a" / "same", n=1, k=1)
    runs.looked = 0.0
    ids = {run.path: run.id for run in runs.look()}
    assert ids[first] == "same"
    assert len(set(ids.values())) == 2
    assert all(id.startswith("same") for id in ids.values())
    with pytest.raises(NotServed, match="there is no run 'other'"):
        runs.get("other")


def test_a_run_that_appears_is_found_and_one_that_goes_is_gone(tmp_path):
    runs = Runs(roots_of([tmp_path]))
    assert runs.look() == []
    run = write_evaluation(tmp_path / "new", n=1, k=1)
    runs.looked = 0.0
    assert runs.get("new").path == run
    (run / "run.json").unlink()
    runs.looked = 0.0
    assert runs.look() == []


def test_an_evaluation_is_live_while_its_lock_is_held(tmp_path):
    path = write_evaluation(tmp_path / "live", n=1, k=1)
    (run,) = seen(tmp_path).values()
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
    assert not summary(run)["live"]
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert summary(run)["live"]
    os.close(lock)
    assert not summary(run)["live"], "the file alone says nothing"


def test_where_the_kernel_lists_no_locks_the_lock_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "none")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert not locks.lock_held(tmp_path / "lock")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert locks.lock_held(tmp_path / "lock")
    os.close(lock)
    assert not locks.lock_held(tmp_path / "lock")


def test_looking_whether_a_run_is_live_never_takes_its_lock(tmp_path, monkeypatch):
    if not locks._LOCKS.exists():
        pytest.skip("this kernel lists no locks")
    (tmp_path / "lock").touch()
    monkeypatch.setattr(
        fcntl, "flock", lambda *_: pytest.fail("the lock was tried: a run that starts now would be refused")
    )
    assert not locks.lock_held(tmp_path / "lock")


def test_a_training_run_is_live_while_it_is_written_and_has_no_result(tmp_path):
    path = write_training(tmp_path / "t", steps=1, n=1, k=1)
    (run,) = seen(tmp_path).values()
    run.refresh()
    assert summary(run)["live"]
    (path / "result.json").write_text("{}")
    assert not summary(run)["live"]
    (path / "result.json").unlink()
    past = time.time() - 3600
    for file in path.rglob("*"):
        os.utime(file, (past, past))
    assert not summary(run)["live"]


@pytest.mark.parametrize("content", ["{broken", '{"kind": "evaluation", "cells": 3}', "[1]\n" * 3, "\x00\xff"])
def test_a_broken_manifest_is_shown_with_the_reason(tmp_path, content):
    path = write_evaluation(tmp_path / "run", n=1, k=1)
    (path / "run.json").write_text(content)
    runs = seen(tmp_path)
    assert "run" in runs
    run = read(runs["run"])
    assert run["problem"].startswith("run.json: ")
    assert run["episodes"] == 2, "its episodes can still be read"
    assert [cell["name"] for cell in run["cells"]] == ["frozen_lake@expert", "frozen_lake@random"]


def test_broken_lines_are_shown_with_file_and_place(tmp_path):
    path = write_evaluation(tmp_path / "run", n=1, k=1)
    with (path / "episodes" / "frozen_lake@expert.jsonl").open("a") as out:
        out.write("nonsense\nmore\n")
    run = read(seen(tmp_path)["run"])
    assert len(run["problems"]) == 1
    assert run["problem"].startswith("frozen_lake@expert.jsonl: at byte ")
    assert run["problem"].endswith("(2 lines in all)")


def test_values_of_wrong_types_in_a_manifest_do_no_harm(tmp_path):
    path = write_evaluation(tmp_path / "run", n=1, k=1)
    cells = [5, {"name": 3, "file": ["x"], "env": "e", "agent": 7, "tasks": "many", "k": None}]
    write_json(path / "run.json", {"kind": "evaluation", "created": "noon", "cells": cells, "versions": "new"})
    run = read(seen(tmp_path)["run"])
    assert run["episodes"] == 2
    assert run["versions"] is None
    assert isinstance(run["created"], float)


def test_nothing_outside_the_named_folder_is_looked_at(tmp_path):
    outside = write_evaluation(tmp_path / "outside" / "secret", n=1, k=1)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "up").symlink_to(tmp_path)
    assert list(run_folders(roots_of([inside]))) == []


def test_links_within_a_run_lead_nowhere_else(tmp_path):
    secret = tmp_path / "secret.jsonl"
    write_jsonl(secret, play("wordle", policy_maker("random"), 1, 1))
    inside = write_evaluation(tmp_path / "runs" / "run", [("frozen_lake", "expert")], n=1, k=1)
    (inside / "episodes" / "wordle@random.jsonl").symlink_to(secret)
    run = read(seen(tmp_path / "runs")["run"])
    assert run["episodes"] == 1
    other = write_training(tmp_path / "runs" / "train", steps=1, n=1, k=1)
    (other / "config.yaml").unlink()
    (tmp_path / "config.yaml").write_text("key: hidden")
    (other / "config.yaml").symlink_to(tmp_path / "config.yaml")
    assert read(seen(tmp_path / "runs")["train"])["config"] is None
    (other / "metrics.jsonl").unlink()
    (tmp_path / "credentials.json").write_text('{"kind": "eval", "key": "hidden"}\n')
    (other / "metrics.jsonl").symlink_to(tmp_path / "credentials.json")
    (other / "config.yaml").unlink()
    (other / "config.yaml").write_text("env:\n  id: frozen_lake\n")
    runs = Runs(roots_of([tmp_path / "runs"]))
    assert metrics(runs, "train", {})["records"] == []
    assert details(runs.get("train"))["episodes"] == 0
    episodes = inside / "episodes"
    episodes.rename(tmp_path / "elsewhere")
    episodes.symlink_to(tmp_path / "elsewhere")
    assert read(seen(tmp_path / "runs")["run"])["episodes"] == 0


def test_a_run_whose_manifest_lies_elsewhere_is_not_compared(tmp_path):
    run = write_evaluation(tmp_path / "runs" / "run", [("frozen_lake", "expert")], n=1, k=1)
    runs = Runs(roots_of([tmp_path / "runs"]))
    assert compare(runs, {"a": "run", "b": "run"})["cells"]
    (run / "run.json").rename(tmp_path / "run.json")
    (run / "run.json").symlink_to(tmp_path / "run.json")
    with pytest.raises(BadRequest, match=r"run\.json is not a regular file inside the run"):
        compare(runs, {"a": "run", "b": "run"})


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    path = write_evaluation(tmp_path / "runs" / "run", [("frozen_lake", "expert")], n=1, k=1)
    write_jsonl(tmp_path / "secret.jsonl", play("wordle", policy_maker("random"), 1, 1))
    cells = [{"name": "x", "file": "../../secret.jsonl"}, {"name": "y", "file": str(tmp_path / "secret.jsonl")}]
    write_json(path / "run.json", {"kind": "evaluation", "cells": cells})
    assert read(seen(tmp_path / "runs")["run"])["episodes"] == 1


def test_a_ring_of_links_ends(tmp_path):
    write_evaluation(tmp_path / "a" / "run", n=1, k=1)
    (tmp_path / "a" / "ring").symlink_to(tmp_path / "a")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    assert [path.name for path, _ in run_folders(roots_of([tmp_path]))] == ["run"]


def test_the_numbers_are_of_the_episodes_that_count(tmp_path):
    path = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=2, k=1)
    file = path / "episodes" / "frozen_lake@expert.jsonl"
    first, second = play("frozen_lake", policy_maker("expert"), 2, 1)
    file.unlink()
    write_jsonl(file, [failed(first), failed(second), first])
    run = read(seen(tmp_path)["run"])
    assert (run["episodes"], run["errors"], run["headline"]["value"]) == (2, 1, 1.0)
    assert (run["cells"][0]["episodes"], run["cells"][0]["errors"]) == (2, 1)
