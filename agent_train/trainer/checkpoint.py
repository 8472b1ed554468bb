"""One step of a run on disk, written whole or not at all while training continues, and found by the run that resumes it.

    checkpoints/step-000010/       what transformers and vLLM load: config, weights, tokenizer
        ROLE/                      the same of each role that learns beside the policy, as a critic does
        players/NAME/              the same of a player's own policy; its state is in state/players/NAME/
        state/ROLE/                `torch.distributed.checkpoint` of each role that learns (agent_train/learner/state.py)
        progress.json              where the loop is, and how long `metrics.jsonl` was
        tasks.json                 which tasks come next, of a run that plays episodes (agent_train/rollout/draws.py)
        manifest.json              size and SHA-256 of every file above; written last
    checkpoints/latest             the name of the newest

A folder gets its name when all of it is on the disk. One without a manifest that fits is never used. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.trainer.run_folder import RunFolder, step_of
from agentgym.storage.files import write_json, write_text

if TYPE_CHECKING:
    from agent_train.learner.actor_group import Learner

FORMAT = 1
MANIFEST, PROGRESS, TASKS = "manifest.json", "progress.json", "tasks.json"
_EXPORT, _UNFINISHED, REPLACED, _REMOVED = ".export", ".unfinished-", ".replaced-", ".removed-"
CLOSE_SECONDS = 3.0  # a run that is stopped has to end within seconds


class CheckpointError(RuntimeError):
    """A checkpoint is not whole, or could not be written."""


class OtherVersionError(CheckpointError):
    """A checkpoint is whole, and of another version of this package."""


@dataclass(frozen=True)
class Progress:
    """The loop's state between two training steps."""

    step: int = 0  # training steps done, which is the version of the weights too
    kl_coef: float = 0.0  # the coefficient of the KL to the reference in the next step
    episodes: int = 0  # finished ones, trained on or dropped
    tokens: int = 0  # of these
    ratings: dict[str, float] = field(default_factory=dict)  # see `agent_train.rollout.past`


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, where the loop was, the length of `metrics.jsonl`, and the seconds the run had taken."""

    path: Path
    progress: Progress
    metrics_bytes: int = 0
    elapsed: float = 0.0

    @property
    def step(self) -> int:
        return self.progress.step

    def state(self, name: str) -> Path:
        """The folder that `Learner.load_state` takes of the learner of this name."""
        return self.path / "state" / name

    def tasks(self) -> dict[str, Any]:
        """The state that `Draws` takes."""
        found: dict[str, Any] = json.loads((self.path / TASKS).read_text(encoding="utf-8"))
        return found


@dataclass
class Checkpoints:
    """Saves the steps of one run, one at a time, while training continues. Use it as an async context manager.

    A save that fails is told by `note`, and leaves the earlier ones. On leaving the block the last one gets CLOSE_SECONDS more.
    """

    run: RunFolder
    keep: int  # how many of the newest stay; at least 1
    timeout: float  # seconds that writing one may take
    note: Callable[[str], None]  # takes a line for people
    elapsed: Callable[[], float] = lambda: 0.0  # tells the seconds that the run has taken
    dump: Collection[int] = ()  # steps to replay: the checkpoint before each stays too
    _writing: asyncio.Task[None] | None = None
    _failed: str = ""
    _late: bool = False  # the ranks may still write what was given up, and take no other meanwhile

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing], timeout=CLOSE_SECONDS)
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def save(
        self, progress: Progress, learners: Sequence[Learner], tasks: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to save a step: returns when the ranks have copied their state. The save before is waited for first.

        Each learner is written as a Hugging Face folder too, the first as the checkpoint itself. `tasks` is the state of the run's
        `Draws`.
        """
        await self.settle()
        step = progress.step
        folder = self.run.checkpoints / f"{_UNFINISHED}{_name(step)}.{os.getpid()}"
        self._late = self._late and not await _written(learners)
        if self._late:
            await self._give_up(step, folder, "the ranks still write the one before")
            return
        try:
            size = self.run.metrics.stat().st_size if self.run.metrics.exists() else 0
            await asyncio.to_thread(begin, self.run, folder)
            record = {"progress": asdict(progress), "metrics_bytes": size, "elapsed": self.elapsed()}
            write_json(folder / PROGRESS, record)
            if tasks is not None:
                write_text(folder / TASKS, json.dumps(tasks))
        except OSError as error:
            await self._give_up(step, folder, str(error))
            return
        for number, learner in enumerate(learners):
            await learner.save_state(folder / "state" / learner.name, folder / (learner.name if number else _EXPORT))
        self._writing = asyncio.create_task(self._write(step, folder, learners))

    async def settle(self) -> None:
        """Wait until the save that was begun last is whole, or has failed and was told."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def finish(self) -> None:
        """As `settle`, at the end of a run."""
        await self.settle()
        if self._failed:
            raise CheckpointError(self._failed)

    async def _write(self, step: int, folder: Path, learners: Sequence[Learner]) -> None:
        """Wait for the ranks, and make the folder a checkpoint."""
        self._failed = ""
        try:
            async with asyncio.timeout(self.timeout):
                said = await asyncio.gather(*(learner.state_saved() for learner in learners))
            failed = next((text for text in said if text), "")
            if not failed:  # without a limit: it cannot be stopped half way
                committing = asyncio.ensure_future(
                    asyncio.to_thread(commit, self.run, folder, step, self.keep, self.dump)
                )
                try:
                    await asyncio.shield(committing)
                finally:  # or the run could go back to a checkpoint and be overtaken by this one
                    await asyncio.wait([committing])
        except TimeoutError:
            failed, self._late = f"it took longer than {self.timeout:g} s", True
        except OSError as error:
            failed = str(error)
        if failed:
            await self._give_up(step, folder, failed)

    async def _give_up(self, step: int, folder: Path, failed: str) -> None:
        """Remove the folder, and tell why. The free space is told because torch's writer can hide that the disk was full."""
        free = await asyncio.to_thread(_free_megabytes, self.run.checkpoints)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        newest = self.run.latest_checkpoint()
        stays = f"the newest is {newest.name}" if newest else "there is none yet"
        self._failed = f"the checkpoint of step {step} was not saved ({failed}{free}): {stays}"
        whole = self.run.checkpoints / _name(step)
        if whole.is_dir():  # what failed came after
            named = f"the file latest names {newest.name if newest else 'none'}"
            but = "what it replaces was not removed" if newest == whole else named
            self._failed = (
                f"the checkpoint of step {step} was saved, and a resumed run finds it; but {but} ({failed}{free})"
            )
        self.note(self._failed)


async def _written(learners: Sequence[Learner]) -> bool:
    """True once the ranks have ended their writes, successfully or not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await asyncio.gather(*(learner.state_saved() for learner in learners))
            return True
    return False


def commit(run: RunFolder, folder: Path, step: int, keep: int, dump: Collection[int] = ()) -> None:
    """Make `folder` the checkpoint of a step, and the latest; then the turns up to it go, and all but the `keep` newest
    and those before a step of `dump`.

    Whenever the machine stops in between, the checkpoint before or this one is found whole.
    """
    if (folder / _EXPORT).is_dir():
        for path in sorted((folder / _EXPORT).iterdir()):
            # A model that is a checkpoint of another run has that one's, beside the tokenizer.
            if path.name not in (MANIFEST, PROGRESS, TASKS):
                path.rename(folder / path.name)
        shutil.rmtree(folder / _EXPORT)
    sums = {str(path.relative_to(folder)): _sum(path) for path in _files(folder)}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": sums})
    for path in [*_files(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _to_disk(path)
    _to_disk(run.metrics)
    final = run.checkpoints / _name(step)
    replaced = run.checkpoints / f"{REPLACED}{_name(step)}"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    folder.rename(final)
    _to_disk(run.checkpoints)
    write_text(run.checkpoints / "latest", final.name + "\n")
    _to_disk(run.checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    run.forget_turns(step)
    for old in run.saved_checkpoints()[: -max(keep, 1)]:
        if old != final and step_of(old) + 1 not in dump:
            # Under another name first: half of a checkpoint must not have the name of one. `begin` removed earlier ones.
            shutil.rmtree(old.rename(old.with_name(f"{_REMOVED}{old.name}")), ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """A folder of `checkpoints/` whose files are all as its manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise OtherVersionError(f"{path}: its format is {manifest['format']}, not {FORMAT}")
        for name, said in manifest["files"].items():
            if not (path / name).is_file() or _sum(path / name) != said:
                raise CheckpointError(f"{path}: not whole: {name} is not as it was written")
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        if wrong := sorted(record["progress"].keys() ^ asdict(Progress()).keys()):
            raise OtherVersionError(f"{path}: {wrong[0]!r} of its progress is missing or unknown")
        return Checkpoint(path, Progress(**record["progress"]), record["metrics_bytes"], record["elapsed"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not whole: {error or type(error).__name__}") from error


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest checkpoint of a run that is whole, and what is wrong with those after it. Only for the run's writer.

    One that was being replaced when the machine stopped has its name back afterwards. OtherVersionError: another version wrote
    the newest that can be read.
    """
    for replaced in run.checkpoints.glob(f"{REPLACED}*"):
        final = run.checkpoints / replaced.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
    torn: list[CheckpointError] = []
    for path in reversed(run.saved_checkpoints()):
        try:
            return read_checkpoint(path), torn
        except OtherVersionError:
            raise
        except CheckpointError as error:
            torn.append(error)
    return None, torn


def newest_before(run: RunFolder, step: int) -> Checkpoint | None:
    """The newest whole checkpoint from which a step can be trained again. Changes nothing."""
    for path in reversed(run.saved_checkpoints()):
        if step_of(path) < step:
            with contextlib.suppress(CheckpointError):
                return read_checkpoint(path)
    return None


def begin(run: RunFolder, folder: Path) -> None:
    """Make an empty folder, and remove what earlier crashes left."""
    for left in (_UNFINISHED, _REMOVED):
        for path in run.checkpoints.glob(f"{left}*"):
            shutil.rmtree(path, ignore_errors=True)
    for half in run.checkpoints.glob(".latest.*.tmp"):
        half.unlink(missing_ok=True)
    folder.mkdir(parents=True)


def _free_megabytes(folder: Path) -> str:
    """The free space of a folder's disk, for a message; "" if the folder is gone."""
    with contextlib.suppress(OSError):
        return f"; its disk has {shutil.disk_usage(folder).free / 1e6:,.1f} MB free"
    return ""


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _to_disk(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, to disk, on file systems that can."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
