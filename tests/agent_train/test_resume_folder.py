"""Which runs are gone on with, which are refused and why, and what is left of a folder that a run goes on in."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_cases import clock, episode, group, learned

from agent_train.config.compose import compose, config_from_yaml
from agent_train.config.schema import Config, ConfigError
from agent_train.report.metrics import read_metrics, step_metrics
from agent_train.report.tracking import Tracker
from agent_train.trainer import checkpoint
from agent_train.trainer.checkpoint import Progress, commit
from agent_train.trainer.resume import OpenRun, open_run, refusals, resume_command, run_path
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import write_jsonl
from agentgym.storage import locks
from agentgym.viewer.run import Run


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path)


def settings(runs: Path, **trainer: object) -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, **{"name": "one", "runs_dir": str(runs), "steps": 10, **trainer}),
    )


def opened(config: Config) -> OpenRun:
    """Open the run, as a process of its own would that has ended since: its lock is free again."""
    run = open_run(config, ["agent-train", "again"])
    os.close(run.lock)
    return run


def trained(config: Config, steps: range, every: int = 2) -> OpenRun:
    """A run that took these steps, with a checkpoint after some."""
    run = opened(config)
    folder = run.folder
    with Tracker(
        folder, 10, Console(file=open(os.devnull, "w")), elapsed=run.checkpoint.elapsed if run.checkpoint else 0.0
    ) as tracker:
        for step in steps:
            write_jsonl(folder.trajectories / f"train-{step:06d}.jsonl", [episode("t")])
            tracker.train_step(step_metrics(step, [group("t", [1.0, 0.0])], clock(), step, **learned()))
            tracker.evaluation(step, [episode("e", reward=step / 10)])
            write_jsonl(folder.trajectories / f"eval-{step:06d}.jsonl", [episode("e")])
            if step % every == 0:
                save(folder, step)
    return run


def save(folder: RunFolder, step: int) -> None:
    made = folder.checkpoints / ".unfinished"
    made.mkdir()
    size = folder.metrics.stat().st_size
    record = {"progress": dataclasses.asdict(Progress(step)), "metrics_bytes": size, "elapsed": 100.0 * step}
    (made / "progress.json").write_text(json.dumps(record))
    commit(folder, made, step, keep=3)


def refused(config: Config) -> str:
    (problem,) = refusals(config)
    with pytest.raises(ConfigError) as raised:
        open_run(config)
    assert raised.value.problems == [problem]
    return problem


def steps_of(folder: RunFolder) -> list[int]:
    return [record["step"] for record in read_metrics(folder.metrics) if record["kind"] == "train"]


def test_a_name_that_is_free_begins_a_run(config, tmp_path):
    run = opened(config)
    assert run.checkpoint is None
    assert run.told == []
    assert run.folder.path == tmp_path / "one"
    assert config_from_yaml(run.folder.config.read_text()) == config


def test_a_run_goes_on_from_its_newest_checkpoint_and_what_came_after_is_aside(config):
    before = trained(config, range(1, 6)).folder
    before.turns_of(5).write_text("turns of an episode that was running")
    rest = before.metrics.read_text().splitlines()[8:]
    run = opened(config)
    assert run.checkpoint.step == 4
    assert run.told == ["going on with one from step 4"]
    assert steps_of(run.folder) == [1, 2, 3, 4]
    assert run.folder.turns_of(5).exists(), "they are played again"
    names = {path.name for path in run.folder.trajectories.iterdir()}
    assert {"train-000004.jsonl", "eval-000004.jsonl"} <= names
    assert {"train-000005.jsonl.before-resume-1", "eval-000005.jsonl.before-resume-1"} <= names
    assert (run.folder.path / "metrics.jsonl.before-resume-1").read_text().splitlines() == rest
    assert json.loads(run.folder.versions.read_text())["resumed"][0]["step"] == 4
    assert json.loads(run.folder.versions.read_text())["resumed"][0]["command"] == ["agent-train", "again"]


def test_a_run_that_is_resumed_twice_reads_as_one(config):
    viewed = Run("one", trained(config, range(1, 6)).folder.path, "training")
    assert len(viewed.metrics.updated()) == 10
    trained(config, range(5, 8))
    run = trained(config, range(7, 11))
    assert steps_of(run.folder) == list(range(1, 11))
    assert sorted(p.name for p in run.folder.path.glob("metrics.jsonl.*")) == [
        "metrics.jsonl.before-resume-1",
        "metrics.jsonl.before-resume-2",
    ]
    with Tracker(run.folder, 10, Console(file=open(os.devnull, "w")), elapsed=60.0) as tracker:
        summary = tracker.finish()
    assert summary.curve == [(step, 1.0) for step in range(1, 11)]
    assert (summary.steps, summary.episodes) == (10, 20)
    assert summary.minutes >= 1.0
    times = [record["elapsed"] for record in read_metrics(run.folder.metrics)]
    assert times == sorted(times)
    assert times[-1] > 600  # of the checkpoint that it went on from
    viewed.refresh()
    assert [record["step"] for record in viewed.metrics.updated() if record["kind"] == "eval"] == list(range(1, 11))
    assert len(viewed.files) == 20
    assert viewed.problems == []


def test_what_a_kill_left_of_setting_aside_does_not_count(config):
    run = trained(config, range(1, 3))
    (run.folder.path / ".metrics.jsonl.before-resume-7.4242.tmp").write_text("")
    (run.folder.path / "metrics.jsonl.before-resume-3.gz").write_text("")
    assert steps_of(trained(config, range(3, 5)).folder) == [1, 2, 3, 4]


def test_a_run_without_a_checkpoint_starts_over_and_loses_nothing(config):
    trained(config, range(1, 4), every=100)
    run = opened(config)
    assert run.checkpoint is None
    assert run.told == ["going on with one from the beginning: it has no whole checkpoint"]
    assert read_metrics(run.folder.metrics) == []
    assert all(".before-resume-1" in path.name for path in run.folder.trajectories.iterdir())
    assert len((run.folder.path / "metrics.jsonl.before-resume-1").read_text().splitlines()) == 6


def test_a_torn_checkpoint_is_named_and_moved_aside(config):
    folder = trained(config, range(1, 7)).folder
    (folder.checkpoints / "step-000006" / "progress.json").write_text("{")
    run = opened(config)
    assert run.checkpoint.step == 4
    assert "step-000006: not whole" in run.told[0]
    assert folder.latest_checkpoint().name == "step-000004"
    assert (folder.checkpoints / "step-000006.before-resume-1").is_dir()
    assert [path.name for path in folder.saved_checkpoints()] == ["step-000002", "step-000004"]


@pytest.mark.parametrize("other", ["format", "progress"])
def test_a_run_of_another_version_is_refused_and_does_not_begin_anew(config, monkeypatch, other):
    folder = trained(config, range(1, 7)).folder
    if other == "format":
        monkeypatch.setattr(checkpoint, "FORMAT", 2)
    else:
        later = dataclasses.make_dataclass("Progress", [("games", int, 0)], bases=(Progress,), frozen=True)
        monkeypatch.setattr(checkpoint, "Progress", later)
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(ConfigError, match=r"step-000006: .*: another version of agentgym wrote it: resume it with"):
        open_run(config)
    assert sorted(folder.path.rglob("*")) == before


@pytest.mark.parametrize("cut", [20, 700])
def test_metrics_that_end_before_the_checkpoint_cost_their_lines_and_nothing_else(config, cut):
    """The machine stopped before the disk had them. What is written afterwards must not hang on to half a line."""
    folder = trained(config, range(1, 3)).folder
    whole = folder.metrics.read_bytes()
    folder.metrics.write_bytes(whole[:-cut])
    run = trained(config, range(3, 5))
    assert steps_of(run.folder)[-2:] == [3, 4]
    assert run.told[0] == "metrics.jsonl: 1 of its lines were no records: they are in metrics.jsonl.before-resume-1"
    assert f"of the {len(whole)} bytes that it had at the checkpoint are lost" in run.told[1]
    viewed = Run("one", run.folder.path, "training")
    assert [r["step"] for r in viewed.metrics.updated() if r["kind"] == "train"][-2:] == [3, 4]
    assert viewed.problems == []


def test_a_torn_line_before_the_checkpoint_goes_aside(config):
    folder = trained(config, range(1, 3)).folder
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
    folder.metrics.write_bytes(b"".join(lines))
    run = trained(config, range(3, 4))
    assert [(r["kind"], r["step"]) for r in read_metrics(run.folder.metrics)][:3] == [
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    assert "metrics.jsonl.before-resume-1" in run.told[0]


@pytest.mark.parametrize(
    ("latest", "words"),
    [
        (b"\xff\0garbage", "which is no name of a checkpoint"),
        (b"", "which is no name of a checkpoint"),
        (b"../../etc\n", "which is no name of a checkpoint"),
        (b"step-000099\n", "which is not there"),
    ],
)
@pytest.mark.parametrize("done", [True, False])
def test_a_pointer_that_names_no_checkpoint_is_refused_with_what_to_do(config, latest, words, done):
    folder = trained(config, range(1, 11)).folder
    (folder.checkpoints / "latest").write_bytes(latest)
    if done:
        (folder.path / "result.json").write_text("{}")
    problem = refused(config)
    assert words in problem
    assert "latest names" in problem
    assert "delete that file to go on from the newest there, step-000010" in problem
    (folder.checkpoints / "latest").unlink()
    if done:
        assert "done with 10 steps" in refused(config)
    else:
        assert opened(config).checkpoint.step == 10


def test_settings_that_cannot_be_read_are_refused(config):
    folder = trained(config, range(1, 3)).folder
    folder.config.write_bytes(b"\xff\xfe")
    assert "the settings of the run there cannot be read" in refused(config)


def test_a_last_line_that_was_cut_off_goes_aside_too(config):
    folder = trained(config, range(1, 3)).folder
    with folder.metrics.open("a") as file:
        file.write('{"kind": "tra')
    assert steps_of(opened(config).folder) == [1, 2]


@pytest.mark.parametrize(
    "left",
    [["lock"], ["lock", "logs"], ["checkpoints", "logs", "trajectories"], ["config.yaml"], ["config.yaml", "logs"]],
)
def test_a_run_that_was_killed_while_it_began_begins_again(config, tmp_path, left):
    whole = opened(settings(tmp_path, name="other")).folder
    for name in left:
        target = tmp_path / "one" / name
        target.parent.mkdir(exist_ok=True)
        if name == "config.yaml":
            target.write_text(whole.config.read_text())
        elif name == "lock":
            target.write_text("process 1\n")
        else:
            target.mkdir()
    run = opened(config)
    assert run.checkpoint is None
    assert run.folder.trajectories.is_dir()
    assert "python" in json.loads(run.folder.versions.read_text())


def test_other_settings_are_refused_by_name_but_for_those_that_change_nothing(config, tmp_path):
    trained(config, range(1, 3))
    other = dataclasses.replace(config, learner=dataclasses.replace(config.learner, lr=0.5, workers=1, timeout=9.0))
    other = dataclasses.replace(other, env=dataclasses.replace(config.env, kwargs={"size": 6}))
    problem = refused(other)
    assert f"learner.lr ({config.learner.lr} there, 0.5 now)" in problem
    assert "env.kwargs ({} there, {'size': 6} now)" in problem
    assert "workers" not in problem
    assert "timeout" not in problem
    longer = settings(tmp_path, steps=20, eval_every=5, save_every=1, keep_checkpoints=1)
    longer = dataclasses.replace(longer, engine=dataclasses.replace(config.engine, port=1234))
    run = opened(longer)
    assert run.checkpoint.step == 2
    assert config_from_yaml(run.folder.config.read_text()) == longer
    assert config_from_yaml((run.folder.path / "config.yaml.before-resume-1").read_text()) == config


def test_shared_prefixes_may_change_unless_they_decide_what_an_optimizer_step_holds(config):
    trained(config, range(1, 3))
    shared = dataclasses.replace(config, learner=dataclasses.replace(config.learner, shared_prefix=True))
    assert not list(refusals(shared))
    folder = run_path(config)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("updates_per_step: 1", "updates_per_step: 2"))
    several = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, updates_per_step=2))
    assert not list(refusals(several))
    assert "learner.shared_prefix (False there, True now)" in refused(
        dataclasses.replace(several, learner=shared.learner)
    )


@pytest.mark.parametrize("role", ["judge", "teacher"])
def test_the_endpoint_of_a_judge_or_teacher_may_move_but_not_go(tmp_path, role):
    def at(url):
        plain = settings(tmp_path)
        return dataclasses.replace(plain, **{role: dataclasses.replace(getattr(plain, role), url=url)})

    trained(at("http://one:8000/v1"), range(1, 3))
    assert not list(refusals(at("http://two:8000/v1")))
    assert f"{role}.url (http://one:8000/v1 there, None now)" in refused(at(None))


def test_a_run_that_is_done_is_refused_unless_it_shall_go_further(config, tmp_path):
    folder = trained(config, range(1, 11)).folder
    assert opened(config).checkpoint.step == 10  # killed after its last step: what is missing is written
    (folder.path / "result.json").write_text("{}")
    assert "already holds a run that is done with 10 steps" in refused(config)
    further = opened(settings(tmp_path, steps=12))
    assert further.checkpoint.step == 10
    assert not (folder.path / "result.json").exists()


def test_a_run_past_the_steps_that_are_asked_for_is_refused(config, tmp_path):
    trained(config, range(1, 5))
    with pytest.raises(ConfigError, match=r"trainer\.steps=3: .* is at step 4 already"):
        open_run(settings(tmp_path, steps=3))


def test_never_refuses_what_is_there(config, tmp_path):
    trained(config, range(1, 3))
    assert "already holds a run: choose another name" in refused(settings(tmp_path, resume="never"))
    assert opened(settings(tmp_path, resume="never", name="new")).checkpoint is None


def test_a_path_goes_on_with_that_folder_and_nothing_else(config, tmp_path):
    folder = trained(config, range(1, 3)).folder
    elsewhere = settings(tmp_path / "other", name="other", resume=str(folder.path))
    assert run_path(elsewhere) == folder.path
    assert opened(elsewhere).checkpoint.step == 2
    assert "no run to go on with" in refused(settings(tmp_path, resume=str(tmp_path / "missing")))


def test_a_folder_with_other_things_is_refused(config, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "thesis.tex").touch()
    assert "already holds other things" in refused(config)


@pytest.mark.parametrize("cause", ["Not a directory", "No locks available"])
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(config, tmp_path, monkeypatch, cause):
    def without_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # as on some shared file systems

    if cause == "No locks available":
        monkeypatch.setattr(locks.fcntl, "flock", without_locks)
    else:
        (tmp_path / "file").write_text("")
        config = replace(config, trainer=replace(config.trainer, runs_dir=str(tmp_path / "file")))
    with pytest.raises(OSError, match=rf"one: cannot be written \({cause}\): choose another trainer.runs_dir"):
        open_run(config)


def test_a_run_that_lives_is_refused_and_named(config, tmp_path):
    folder = trained(config, range(1, 3)).folder
    script = "import sys, pathlib; from agentgym.storage.locks import hold; hold(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        problem = refused(config)
        assert f"is being written (process {other.pid})" in problem
        other.communicate(b"\n")
    assert opened(config).checkpoint.step == 2


@pytest.mark.parametrize("name", ["one", "a b", "it's", "x=1"])
def test_the_command_to_go_on_needs_nothing_but_the_folder(tmp_path, name):
    began = compose(["+env=frozen_lake", "learner.lr=0.5", f"trainer.runs_dir={tmp_path}", "env.kwargs.size=6"])
    folder = RunFolder(tmp_path / name)
    folder.write_settings(began)
    command, *words = resume_command(folder)
    config = compose(words)
    assert (command, run_path(config)) == ("agent-train", folder.path)
    assert dataclasses.replace(config, trainer=began.trainer) == began
    assert list(refusals(config)) == []
    again = compose([*words, "trainer.steps=99", "learner.workers=1", "env.url=[http://a:1/x]", "env.kwargs.size=7"])
    assert (again.trainer.steps, again.learner.workers, again.env.url) == (99, 1, ["http://a:1/x"])
    assert "env.kwargs (" in refused(again)
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        compose([*words, "trainer.stepz=1"])
