"""A checkpoint is on the disk whole or not at all, whatever stops while it is written, and the one before stays."""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from agent_train.config.schema import Config
from agent_train.trainer import checkpoint as module
from agent_train.trainer.checkpoint import (
    CheckpointError,
    Checkpoints,
    Progress,
    commit,
    newest_before,
    newest_whole,
    read_checkpoint,
)
from agent_train.trainer.run_folder import RunFolder


class Learner:
    """Stands in for the ranks of a role: writes what it is told to, when it is told to, or says that it could not."""

    def __init__(self, weights: str = "w", said: str = "", name: str = "policy"):
        self.weights, self.said, self.name = weights, said, name
        self.folders: tuple[Path | None, ...] = ()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def save_state(self, folder: Path, export: Path | None = None) -> None:
        self.folders = (folder, export)

    async def state_saved(self) -> str:
        await self.go_on.wait()
        for folder in filter(None, self.folders):
            folder.mkdir(parents=True)
            (folder / "weights").write_text(self.weights)
        return self.said


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make_folders()
    made.metrics.write_text('{"kind": "train"}\n')
    return made


def written(run: RunFolder, step: int, text: str = "weights") -> Path:
    """A folder as it is when the ranks have written everything."""
    folder = run.checkpoints / f".unfinished-step-{step:06d}.1"
    for inside in ("state/policy", "state/critic", ".export"):
        (folder / inside).mkdir(parents=True)
        (folder / inside / f"{inside[-6:]}.file").write_text(text)
    record = {"progress": dataclasses.asdict(Progress(step)), "metrics_bytes": 18, "elapsed": 2.5}
    (folder / "progress.json").write_text(json.dumps(record))
    return folder


def saved(run: RunFolder, *steps: int, keep: int = 3, text: str = "weights") -> None:
    for step in steps:
        commit(run, written(run, step, text), step, keep)


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_checkpoint_has_the_model_in_front_and_the_state_behind(run):
    saved(run, 10)
    found, torn = newest_whole(run)
    assert torn == []
    assert (found.step, found.metrics_bytes, found.elapsed) == (10, 18, 2.5)
    assert found.progress == Progress(10)
    assert (found.path / "export.file").read_text() == (found.state("critic") / "critic.file").read_text() == "weights"
    assert names(run) == ["latest", "step-000010"]
    assert run.latest_checkpoint() == found.path


def test_a_run_from_a_checkpoint_of_another_run_saves_whole_ones_without_its_progress_and_tasks(run):
    saved(run, 10)
    folder = written(run, 2)
    for name in ("manifest.json", "progress.json"):  # copied as the files of a tokenizer are
        shutil.copy(run.checkpoints / "step-000010" / name, folder / ".export")
    (folder / ".export" / "tasks.json").write_text("{}")
    commit(run, folder, 2, 3)
    found = read_checkpoint(run.checkpoints / "step-000002")
    assert found.step == 2
    assert (found.path / "export.file").is_file()
    assert not (found.path / "tasks.json").exists()


def test_the_turns_that_a_checkpoint_holds_are_removed_and_those_of_later_steps_stay(run):
    for step in (1, 2, 3):
        run.turns_of(step).touch()
    (run.turns / "mine.jsonl").touch()
    saved(run, 2)
    assert sorted(path.name for path in run.turns.iterdir()) == ["000003.jsonl", "mine.jsonl"]


def test_only_the_newest_stay(run):
    saved(run, 0, 5, 10, 1_000_000, keep=2)
    assert names(run) == ["latest", "step-000010", "step-1000000"]
    saved(run, 1_000_001, keep=0)
    assert names(run) == ["latest", "step-1000001"]


def test_the_checkpoint_before_a_step_to_replay_stays_too(run):
    for step in (0, 11, 12, 20, 30):
        commit(run, written(run, step), step, 2, dump=[12, 20])
    assert names(run) == ["latest", "step-000011", "step-000020", "step-000030"]
    assert newest_before(run, 12).step == newest_before(run, 20).step == 11
    assert newest_before(run, 11) is None
    (run.checkpoints / "step-000020" / "progress.json").write_text("")
    assert newest_before(run, 30).step == 11, "the newest that is whole"


FILE_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def in_a_child(call, number: int) -> bool:
    """Call it in a process that is gone, as by SIGKILL, before its `number`-th operation on a file. Whether it was."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event, _) -> None:
            nonlocal left
            if event in FILE_OPERATIONS:
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("step", [10, 5], ids=["a new step", "a step that is there already"])
def test_whenever_the_machine_stops_a_whole_checkpoint_is_found(run, tmp_path, step, monkeypatch):
    """Killed before every operation on a file in turn, until none is left to be killed at."""
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # hundreds of them, which a process's death asks nothing of
    saved(run, 5, text="old")
    written(run, step, "new")
    shutil.copytree(run.path, tmp_path / "before")
    found, number = set(), 0
    folder = run.checkpoints / f".unfinished-step-{step:06d}.1"
    while in_a_child(lambda: commit(run, folder, step, keep=1), number):
        checkpoint, _ = newest_whole(run)
        text = (checkpoint.path / "export.file").read_text()
        assert (checkpoint.step, text) in {(5, "old"), (step, "new")}
        found.add(text)
        assert run.latest_checkpoint().name in ("step-000005", f"step-{step:06d}")
        # What was left behind is in nobody's way.
        module.begin(run, run.checkpoints / ".unfinished-next")
        saved(run, 20, keep=1)
        assert names(run) == [".unfinished-next", "latest", "step-000020"]
        shutil.rmtree(run.path)
        shutil.copytree(tmp_path / "before", run.path)
        number += 1
    assert found == {"old", "new"}
    assert number > 20
    assert newest_whole(run)[0].step == step


DAMAGE = {
    "a file cut off": lambda path: (path / "state/policy/policy.file").write_text("wei"),
    "a file with other bytes": lambda path: (path / "export.file").write_text("WEIGHTS"),
    "a file that is gone": lambda path: (path / "state/critic/critic.file").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text((path / "manifest.json").read_text()[:80]),
    "a manifest of nothing": lambda path: (path / "manifest.json").write_text("[]"),
    "an empty progress": lambda path: (path / "progress.json").write_text(""),
    "a progress that is not its own": lambda path: (path / "progress.json").write_text(
        json.dumps({"progress": {"tasks": 1}, "metrics_bytes": 18, "elapsed": 2.5})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_named_and_passed_over(run, damage):
    saved(run, 5, 10)
    DAMAGE[damage](run.checkpoints / "step-000010")
    found, (error,) = newest_whole(run)
    assert found.step == 5
    assert str(run.checkpoints / "step-000010") in str(error)
    DAMAGE[damage](run.checkpoints / "step-000005")
    found, torn = newest_whole(run)
    assert found is None
    assert len(torn) == 2


def test_training_goes_on_while_the_files_are_written_and_saves_never_overlap(run):
    async def story() -> None:
        notes = []
        slow = Learner()
        slow.go_on.clear()
        async with Checkpoints(run, 3, 60, notes.append, lambda: 7.5) as checkpoints:
            await checkpoints.save(Progress(1), [slow])
            run.metrics.write_text('{"kind": "train"}\n{"kind": "train"}\n')
            assert run.latest_checkpoint() is None
            second = asyncio.create_task(checkpoints.save(Progress(2), [Learner("second")]))
            await asyncio.sleep(0.05)
            assert not second.done()
            slow.go_on.set()
            await second
            assert newest_whole(run)[0].step == 1
            await checkpoints.finish()
        assert notes == []

    asyncio.run(story())
    first, second = (read_checkpoint(path) for path in run.saved_checkpoints())
    assert (first.metrics_bytes, second.metrics_bytes, first.elapsed) == (18, 36, 7.5)
    assert (second.path / "weights").read_text() == "second"


def test_a_save_that_fails_is_told_and_leaves_what_was_there(run):
    saved(run, 5)

    async def story() -> list[str]:
        notes = []
        async with Checkpoints(run, 1, 60, notes.append) as checkpoints:
            await checkpoints.save(Progress(6), [Learner(), Learner(said="rank 1: unexpected pos", name="critic")])
            await checkpoints.settle()
            with pytest.raises(CheckpointError, match="step 6 was not saved"):
                await checkpoints.finish()
            await checkpoints.save(Progress(7), [Learner()])
            await checkpoints.finish()
        return notes

    (note,) = asyncio.run(story())
    why = r"rank 1: unexpected pos; its disk has [\d,]+\.\d MB free"  # torch's word for a full disk, at times
    assert re.fullmatch(rf"the checkpoint of step 6 was not saved \({why}\): the newest is step-000005", note)
    assert names(run) == ["latest", "step-000007"]


@pytest.mark.parametrize(
    ("owner", "fails", "but"),
    [
        (module, "write_text", "the file latest names step-000005"),
        (RunFolder, "forget_turns", "what it replaces was not removed"),
    ],
)
def test_a_failure_after_a_checkpoint_is_in_place_does_not_call_it_unsaved(run, monkeypatch, owner, fails, but):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    saved(run, 5)

    async def story() -> list[str]:
        notes = []
        async with Checkpoints(run, 1, 60, notes.append) as checkpoints:
            monkeypatch.setattr(owner, fails, full)
            await checkpoints.save(Progress(6), [Learner()])
            with pytest.raises(CheckpointError, match="step 6 was saved"):
                await checkpoints.finish()
        return notes

    (note,) = asyncio.run(story())
    assert f"step 6 was saved, and a resumed run finds it; but {but} ([Errno 28] No space left on device; its" in note
    assert newest_whole(run)[0].step == 6


def test_a_folder_that_cannot_be_made_and_ranks_that_are_late_are_failures_of_the_save_alone(run, tmp_path):
    async def story() -> list[str]:
        notes = []
        late = Learner()
        late.go_on.clear()
        async with Checkpoints(run, 1, 0.05, notes.append) as checkpoints:
            await checkpoints.save(Progress(1), [late])
            await checkpoints.settle()
            shutil.rmtree(run.checkpoints)
            run.checkpoints.write_text("a file")
            await checkpoints.save(Progress(2), [Learner()])
        return notes

    late, file = asyncio.run(story())
    assert late.startswith("the checkpoint of step 1 was not saved (it took longer than 0.05 s; ")
    assert late.endswith("MB free): there is none yet")
    assert "step 2 was not saved" in file


def test_while_the_ranks_still_write_what_came_too_late_they_are_asked_for_no_other(run, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)

    class Ranks(Learner):
        async def save_state(self, folder: Path, export: Path | None = None) -> None:
            assert self.go_on.is_set(), "a rank raises: the run would end"
            await super().save_state(folder, export)

    async def story() -> list[str]:
        notes = []
        async with Checkpoints(run, 3, 0.05, notes.append) as checkpoints:
            ranks = Ranks()
            await checkpoints.save(Progress(1), [ranks])
            ranks.go_on.clear()  # the disk hangs
            await checkpoints.settle()
            await checkpoints.save(Progress(2), [ranks])
            ranks.go_on.set()
            await checkpoints.save(Progress(3), [ranks])
            await checkpoints.finish()
        return notes

    late, busy = asyncio.run(story())
    assert late.startswith("the checkpoint of step 1 was not saved (it took longer than 0.05 s; ")
    assert busy.startswith("the checkpoint of step 2 was not saved (the ranks still write the one before; ")
    assert names(run) == ["latest", "step-000003"]


def test_a_learner_that_has_ended_has_saved_nothing():
    """Its answer would be that all of its no ranks are done."""
    from agent_train.learner.actor_group import Learner as Ranks

    learner = Ranks([], Config())
    learner.close()
    assert "it was closed" in asyncio.run(learner.state_saved())


def test_leaving_waits_a_moment_for_the_last_one(run):
    async def story() -> None:
        async with Checkpoints(run, 1, 60, print) as checkpoints:
            await checkpoints.save(Progress(1), [Learner()])

    asyncio.run(story())
    assert newest_whole(run)[0].step == 1
