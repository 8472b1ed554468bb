"""`agent-train replay`: what it refuses, what it reads, what it tells. Whole replays are in test_ahead.py and test_same_numbers.py."""

import dataclasses
import json
import os

import pytest

from agent_train.cli import main
from agent_train.config.compose import compose, to_yaml
from agent_train.trainer.checkpoint import Progress, commit
from agent_train.trainer.replay import compared, rollout_of
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import Trajectory, write_jsonl

SETTINGS = ["+env=frozen_lake", "engine=embedded", "algorithm.group_size=2", "trainer.groups_per_step=2"]
EPISODES = [Trajectory(f"t{task}/{k}", "frozen_lake", f"t{task}", k) for task in (1, 2) for k in (0, 1)]


def record_of(step, **more):
    update = {"loss": 0.5, "kl_k3": 0.0, "seconds": 2.0, "skipped": 0}
    return {"kind": "train", "step": step, "elapsed": 9.0, "learn_seconds": 3.0, "tokens_per_second": 8.0} | {
        **{"episodes": 3, "failed": 1, "selection": {"rounds": 2}, "update": update, "weights_checksum": 7},
        **more,
    }


@pytest.fixture
def run(tmp_path):
    """A run folder after five steps, with the checkpoints of steps 2 and 4 and the episodes of steps 3 to 5."""
    made = RunFolder(tmp_path / "run")
    made.make_folders()
    made.config.write_text(to_yaml(compose(SETTINGS)))
    made.metrics.write_text("".join(json.dumps(record_of(step)) + "\n" for step in range(1, 6)))
    for step in (2, 4):
        folder = made.checkpoints / f".unfinished-{step}"
        folder.mkdir()
        record = {"progress": dataclasses.asdict(Progress(step)), "metrics_bytes": 1, "elapsed": 2.5}
        (folder / "progress.json").write_text(json.dumps(record))
        commit(made, folder, step, keep=3)
    for step in (3, 4, 5):
        write_jsonl(made.episodes("train", step), EPISODES)
    return made


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


BREAK = {
    "episodes cut off": (lambda run: cut(run.episodes("train", 4)), ["step=4"], "has 3 of its 4 episodes"),
    "episodes of a step before": (lambda run: run.episodes("train", 3).unlink(), ["step=4"], "train-000003.jsonl"),
    "episodes broken": (lambda run: run.episodes("train", 5).write_text("{}\n"), ["step=5"], "step=5: its episodes"),
    "no settings": (lambda run: run.config.unlink(), ["step=4"], "no config.yaml"),
    "files": (
        lambda run: run.config.write_text(run.config.read_text().replace("mode: rl", "mode: sft")),
        ["step=4"],
        "mode=sft has no episodes",
    ),
    "checkpoint torn": (lambda run: cut(run.checkpoints / "step-000002" / "progress.json"), ["step=4"], "dump=[4]"),
}
BAD = {
    "no step": ([], "names no step"),
    "no number": (["step=x"], "step=x: a replay takes step=N"),
    "backwards": (["step=4", "through=3"], "through=3: comes before step=4"),
    "not trained": (["step=5", "through=6"], "step=6: "),
    "no checkpoint": (["step=2"], "has no whole checkpoint before it, but those of steps [2, 4]"),
    "another environment": (["step=4", "env.kwargs.size=8"], "env.kwargs.size=8: a replay takes"),
    "other episodes": (["step=4", "algorithm.group_size=4"], "algorithm.group_size=4: a replay takes"),
    "unknown key": (["step=4", "learner.lrr=1"], "did you mean"),
    "wrong value": (["step=4", "algorithm.loss=pop"], "algorithm.loss=pop"),
    "wrong setting of a loss": (["step=4", "algorithm.loss_settings.dual_clip=0.5"], "dual_clip must be above 1"),
    "a role too many": (["step=4", "algorithm.advantage.name=gae"], "asks for a critic, which the run did not have"),
    **{name: (words, told) for name, (_, words, told) in BREAK.items()},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_replayed_is_refused_in_one_line_before_anything_starts(name, run, capsys):
    words, told = BAD[name]
    if name in BREAK:
        BREAK[name][0](run)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    assert main(["replay", str(run.path), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert told in err
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_a_rollout_is_read_as_it_was_played(run):
    config = compose(SETTINGS)
    rollout = rollout_of(run, config, record_of(4))
    assert [(group.task_id, group.trajectories) for group in rollout.groups] == [
        ("t1", EPISODES[:2]),
        ("t2", EPISODES[2:]),
    ]
    assert (rollout.greedy, rollout.rounds) == ([], 2)
    write_jsonl(run.episodes("greedy", 4), EPISODES[::2])
    assert rollout_of(run, config, record_of(4)).greedy == EPISODES[::2]


def test_times_are_not_compared():
    other = record_of(4, elapsed=1.0, learn_seconds=9.0, tokens_per_second=1.0)
    other["update"] = {**other["update"], "seconds": 5.0}
    assert list(compared(record_of(4), other, table=False)) == ["step 4: the same weights, bit for bit"]


def test_other_weights_are_told_with_all_numbers_that_differ_and_the_main_ones():
    replayed = record_of(4, weights_checksum=8, update={"loss": 0.75, "kl_k3": 0.0, "seconds": 1.0, "skipped": 1})
    verdict, head, *rows = compared(record_of(4), replayed, table=True)
    assert verdict == "step 4: other weights; 3 of 8 numbers differ"
    assert head.split() == ["recorded", "replayed"]
    assert [row.split() for row in rows] == [
        ["update.loss", "0.5", "0.75", "+0.25"],
        ["update.kl_k3", "0.0", "0.0"],
        ["update.skipped", "0", "1", "+1"],
        ["weights_checksum", "7", "8"],
    ]


def test_the_help_and_the_usage_name_it(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("replay") >= 2
    assert main(["replay", os.devnull, "step=1"]) == 2
