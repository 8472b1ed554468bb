"""A run that loses a part goes back by itself. The parts are doubles here, which fail as they are told; `test_soak.py` kills real ones."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from dataclasses import replace

import pytest
from rich.console import Console
from run_cases import clock, group, learned
from test_resume_folder import save, settings, steps_of

from agent_train.cluster import files
from agent_train.cluster.files import RunFiles
from agent_train.cluster.placement import PlacementError
from agent_train.config.schema import Config, TrainerConfig
from agent_train.engine.base import EngineError, EngineLostError
from agent_train.learner.actor_group import LearnerError, RankLostError
from agent_train.report.metrics import step_metrics
from agent_train.report.tracking import Tracker
from agent_train.trainer import run
from agent_train.trainer.checkpoint import Checkpoints, Progress
from agent_train.trainer.loop import TrainerContext, train
from agent_train.trainer.resume import open_run
from agent_train.trainer.rl import StepError
from agent_train.trainer.run_folder import RunFolder
from agent_train.weights.sync import WeightSyncError, WeightTransferError


class Parts:
    """A double of a run's parts. Each opening of them takes the steps told, saving those in `saves`, and then raises, if it shall."""

    def __init__(self, config, *openings, saves=()):
        self.config, self.openings, self.saves = config, list(openings), saves
        self.resumed = []  # the step that each opening began at

    @contextlib.asynccontextmanager
    async def open(self, config, folder, tracker, checkpoint):
        self.resumed.append(checkpoint.step if checkpoint else None)
        steps, failure = self.openings.pop(0)
        for step in steps:
            tracker.train_step(step_metrics(step, [group("t", [1.0, 0.0])], clock(), step, **learned()))
            if step in self.saves:
                save(folder, step)
        if failure is signal.SIGINT:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if failure:
            raise failure
        yield None


def trained(parts, monkeypatch, terminal=False):
    """Have the run train; its folder and what it said. Raises as the run does."""

    async def train(context):
        pass

    monkeypatch.setattr(run, "open_rl", parts.open)
    monkeypatch.setattr(run, "train", train)
    opened, stop = open_run(parts.config, ["agent-train"]), run.Stop()
    with (opened.folder.path / "said").open("w+") as said:
        with Tracker(opened.folder, 10, Console(file=said, width=200, force_terminal=terminal)) as tracker:
            try:
                asyncio.run(run._until_stopped(parts.config, opened, tracker, stop, ["agent-train"]))
            finally:
                stop.done()
                os.close(opened.lock)
                summary = tracker.finish()
        said.seek(0)
        return opened.folder, said.read(), summary


def lost(rank=1):
    return RankLostError(f"learner: update: rank {rank} died: ActorDiedError: gone\nand more of it")


def test_it_goes_on_from_the_newest_checkpoint_and_counts_no_step_twice(tmp_path, monkeypatch):
    parts = Parts(settings(tmp_path), ([1, 2, 3, 4, 5], lost()), ([5, 6], None), saves=(2, 4))
    folder, said, summary = trained(parts, monkeypatch)
    assert parts.resumed == [None, 4]
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    assert (summary.steps, summary.episodes) == (6, 12)
    assert "learner: update: rank 1 died: ActorDiedError: gone; going on with one from step 4\n" in said
    (resumed,) = json.loads(folder.versions.read_text())["resumed"]
    assert (resumed["step"], resumed["lost"]) == (4, "learner: update: rank 1 died: ActorDiedError: gone")


def test_the_table_of_a_terminal_shows_no_step_that_was_taken_back(tmp_path, monkeypatch):
    parts = Parts(settings(tmp_path), ([1, 2, 3], lost()), ([], None), saves=(1,))
    _, said, _ = trained(parts, monkeypatch, terminal=True)
    assert "1/10" in said.rpartition("going on with one from step 1")[2]


@pytest.mark.parametrize(("most", "openings"), [(0, 1), (1, 2), (3, 4)])
def test_it_ends_after_so_many_losses_without_a_new_checkpoint(tmp_path, monkeypatch, most, openings):
    parts = Parts(settings(tmp_path, restarts=most), *[([1], lost(n)) for n in range(9)])
    with pytest.raises(RankLostError, match=f"rank {openings - 1} died"):
        trained(parts, monkeypatch)
    assert parts.resumed == [None] * openings


def test_a_new_checkpoint_begins_the_count_again(tmp_path, monkeypatch):
    parts = Parts(
        settings(tmp_path, restarts=1), *[([step], lost()) for step in (1, 2, 3)], ([], None), saves=(1, 2, 3)
    )
    _, said, _ = trained(parts, monkeypatch)
    assert parts.resumed == [None, 1, 2, 3]
    assert "going back to the last checkpoint" in said


def test_a_run_without_a_checkpoint_starts_again_and_says_so(tmp_path, monkeypatch):
    parts = Parts(settings(tmp_path), ([1], lost()), ([1], None))
    _, said, _ = trained(parts, monkeypatch)
    assert parts.resumed == [None, None]
    assert "starting again: there is no checkpoint yet" in said
    assert "going back" not in said


@pytest.mark.parametrize("failure", [EngineLostError("no server came back"), WeightTransferError("no link"), lost()])
def test_engines_ranks_and_links_that_are_gone_are_losses(tmp_path, monkeypatch, failure):
    parts = Parts(settings(tmp_path), ([], failure), ([], None))
    trained(parts, monkeypatch)
    assert parts.resumed == [None, None]


@pytest.mark.parametrize("kind", [LearnerError, EngineError, StepError, WeightSyncError, OSError])
def test_what_would_come_again_ends_the_run_at_once(tmp_path, monkeypatch, kind):
    parts = Parts(settings(tmp_path), ([1], kind("no memory")), ([], None))
    with pytest.raises(kind, match="no memory"):
        trained(parts, monkeypatch)
    assert parts.resumed == [None]


class Playing(TrainerContext):
    """A run that plays for long, and asks its ranks nothing meanwhile."""

    async def take_step(self, progress):
        await asyncio.sleep(60)

    async def measure(self, step):
        pass


class DyingRank:
    """A double of the ranks of a role, one of which dies."""

    async def watch(self):
        await asyncio.sleep(0.01)
        raise lost()


def test_a_rank_that_dies_ends_a_step_that_asks_it_nothing(tmp_path):
    config = settings(tmp_path)
    with Tracker(RunFolder(tmp_path), 10, Console(quiet=True)) as tracker:
        parts = {"config": config, "folder": tracker.run, "files": RunFiles(), "tracker": tracker, "checkpoints": None}
        context = Playing(**parts, learners=[DyingRank()], steps=1, resumed=Progress())
        with pytest.raises(RankLostError, match="rank 1 died"):
            asyncio.run(asyncio.wait_for(train(context), 30))


class Counting(TrainerContext):
    """A run of steps that do nothing."""

    async def take_step(self, progress):
        return replace(progress, step=progress.step + 1)

    async def measure(self, step):
        self.tracker.evaluation(step, group("t", [1.0]).trajectories)

    async def save(self, progress):
        pass


@pytest.mark.parametrize(("step", "steps", "evaluated"), [(7, 8, [0, 5, 8]), (7, 7, [0, 5, 7]), (5, 5, [0, 5])])
def test_the_end_is_evaluated_also_if_a_resumed_run_takes_no_more_steps(tmp_path, step, steps, evaluated):
    config = Config(trainer=TrainerConfig(eval_every=5, steps=steps))
    with Tracker(RunFolder(tmp_path), steps, Console(quiet=True)) as tracker:
        for before in (0, 5):
            tracker.evaluation(before, group("t", [1.0]).trajectories)
        checkpoints = Checkpoints(tracker.run, 1, 60, print)
        parts = {"config": config, "folder": tracker.run, "files": RunFiles(), "checkpoints": checkpoints}
        asyncio.run(train(Counting(**parts, tracker=tracker, learners=[], steps=steps, resumed=Progress(step))))
        assert [at for at, _ in tracker.finish().curve] == evaluated


def test_a_node_that_cannot_join_is_told_once(monkeypatch):
    looks, notes = [], []

    class Lacking(RunFiles):
        async def look(self):
            looks.append(None)
            raise PlacementError(f"10.0.0.{7 + len(looks) // 3}: model is not there")

    async def watch(lacking):
        watching = asyncio.create_task(lacking.watch())
        while len(looks) < 5:
            await asyncio.sleep(0)
        watching.cancel()

    monkeypatch.setattr(files, "LOOK_SECONDS", 0)
    asyncio.run(watch(Lacking(note=notes.append, _apart={"node": None})))
    assert notes == ["10.0.0.7: model is not there", "10.0.0.8: model is not there"]


def test_ctrl_c_while_it_opens_the_parts_again_ends_it(tmp_path, monkeypatch):
    parts = Parts(settings(tmp_path), ([], lost()), ([], signal.SIGINT), ([], None))
    began = time.monotonic()
    trained(parts, monkeypatch)
    assert parts.resumed == [None, None]
    assert time.monotonic() - began < 10


def test_the_settings_of_the_folder_stay_as_they_are(tmp_path, monkeypatch):
    config = settings(tmp_path)
    before = replace(config)
    folder, _, _ = trained(Parts(config, ([], lost()), ([], None)), monkeypatch)
    assert config == before
    assert not list(folder.path.glob("config.yaml.before*"))


@pytest.mark.parametrize("full_at", ["the start", "a step", "the end"])
def test_a_full_disk_ends_the_run_with_its_error(tmp_path, monkeypatch, capsys, full_at):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.asynccontextmanager
    async def open_parts(config, folder, tracker, checkpoint):
        tracker.evaluation(0, group("t", [1.0]).trajectories)
        if full_at == "a step":
            resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 10, limits[1]))
        tracker.train_step(step_metrics(1, [group("t", [1.0, 0.0])], clock(), 1, **learned()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        yield None

    async def train(context):
        pass

    monkeypatch.setattr(run, "open_rl", open_parts)
    monkeypatch.setattr(run, "train", train)
    config = settings(tmp_path)
    if full_at == "the start":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert run.run(config) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "agent-train: error: " in said
    assert "File too large" in said
    assert ("result.json was not written" in said) == (full_at == "the end")
