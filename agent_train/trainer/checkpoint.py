"""One step of a run on disk, written whole or not at all while training goes on, and found again by the run that resumes it.

    checkpoints/step-000010/       what transformers and vLLM load: config, weights, tokenizer
        ROLE/                      the same of each role that learns beside the policy, as a critic does
        state/ROLE/                `torch.distributed.checkpoint` of each role that learns (agent_train/learner/state.py)
        progress.json              where the loop is, and how long `metrics.jsonl` was
        manifest.json              size and SHA-256 of every file above; written last
    checkpoints/latest             the name of the newest

A folder gets its name when everything in it is on the disk. One whose manifest is missing, or does not fit, is taken by nobody.
Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent_train.trainer.progress import Progress
from agent_train.trainer.run_folder import RunFolder
from agentgym.storage.files import write_json, write_text

FORMAT = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_EXPORT = ".export"
_UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
_REMOVED = ".removed-"
_BLOCK = 1 << 22
# The end of a run that is stopped has to come within seconds.
CLOSE_SECONDS = 3.0


class CheckpointError(RuntimeError):
    """A checkpoint is not whole, or could not be written. Names the folder and what is wrong with it."""


class Saves(Protocol):
    """The methods that a checkpoint needs of a learning role; `agent_train.learner.actor_group.Learner` has them."""

    async def save_state(self, folder: Path, export: Path | None = None) -> None:
        """Copy the state and begin to write it."""
        ...

    async def state_saved(self) -> str:
        """Wait until it is written; "" or what failed."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        progress: where the loop was.
        metrics_bytes: how long `metrics.jsonl` was.
        elapsed: seconds that the run had taken.
    """

    path: Path
    progress: Progress
    metrics_bytes: int = 0
    elapsed: float = 0.0

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.progress.step

    def state(self, role: str) -> Path:
        """The folder that `Learner.load_state` takes."""
        return self.path / "state" / role


class Checkpoints:
    """Saves the steps of one run, one at a time, while training goes on. Use it as an async context manager.

    A save that fails is told by `note`, and leaves what was there. On leaving the block the last one gets CLOSE_SECONDS more.

    Args:
        run: of the run.
        keep: how many of the newest stay; at least 1.
        timeout: seconds that writing one may take.
        note: takes a line for people.
        elapsed: tells the seconds that the run has taken.
    """

    def __init__(
        self,
        run: RunFolder,
        keep: int,
        timeout: float,
        note: Callable[[str], None],
        elapsed: Callable[[], float] = lambda: 0.0,
    ):
        self._run = run
        self._keep = keep
        self._timeout = timeout
        self._note = note
        self._elapsed = elapsed
        self._writing: asyncio.Task[str] | None = None
        self._failed = ""

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing], timeout=CLOSE_SECONDS)
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def save(self, progress: Progress, learners: Mapping[str, Saves]) -> None:
        """Begin to save a step: returns when the ranks have copied their state. The save before is waited for first.

        Args:
            progress: where the loop is.
            learners: the roles that learn. Each is written as a Hugging Face folder too, the first as the checkpoint itself.

        Raises:
            LearnerError: a rank failed.
        """
        await self.settle()
        step = progress.step
        folder = self._run.checkpoints / f"{_UNFINISHED}{_name(step)}.{os.getpid()}"
        try:
            size = self._run.metrics.stat().st_size if self._run.metrics.exists() else 0
            await asyncio.to_thread(_begin, self._run, folder)
            record = {"progress": progress.to_json(), "metrics_bytes": size, "elapsed": self._elapsed()}
            write_json(folder / PROGRESS, record)
        except OSError as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._tell(step, str(error))
            return
        for number, (role, learner) in enumerate(learners.items()):
            await learner.save_state(folder / "state" / role, folder / (role if number else _EXPORT))
        self._writing = asyncio.create_task(self._write(step, folder, list(learners.values())))

    async def settle(self) -> None:
        """Wait until the save that was begun last is whole, or has failed and was told."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def finish(self) -> None:
        """As `settle`, at the end of a run.

        Raises:
            CheckpointError: the last save failed, so that what was trained since the one before is on no disk.
        """
        await self.settle()
        if self._failed:
            raise CheckpointError(self._failed)

    async def _write(self, step: int, folder: Path, learners: list[Saves]) -> str:
        """Wait for the ranks, and make the folder a checkpoint; what failed, "" for nothing."""
        try:
            async with asyncio.timeout(self._timeout):
                said = await asyncio.gather(*(learner.state_saved() for learner in learners))
            failed = next((text for text in said if text), "")
            if not failed:  # whatever it takes: it cannot be stopped half way
                await asyncio.to_thread(commit, self._run, folder, step, self._keep)
        except TimeoutError:
            failed = f"it took longer than {self._timeout:g} s"
        except OSError as error:
            failed = str(error)
        if failed:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._tell(step, failed)
        else:
            self._failed = ""
        return failed

    def _tell(self, step: int, failed: str) -> None:
        newest = self._run.latest_checkpoint()
        stays = f"the newest is {newest.name}" if newest else "there is none yet"
        self._failed = f"the checkpoint of step {step} was not saved ({failed}): {stays}"
        self._note(self._failed)


def commit(run: RunFolder, folder: Path, step: int, keep: int) -> None:
    """Make what was written into `folder` the checkpoint of a step, and the latest; then all but the `keep` newest go.

    Whenever the machine stops in between, the checkpoint before or this one is found whole.
    """
    if (folder / _EXPORT).is_dir():
        for path in sorted((folder / _EXPORT).iterdir()):
            path.rename(folder / path.name)
        (folder / _EXPORT).rmdir()
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": _sums(folder)})
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
    for old in run.saved_checkpoints()[: -max(keep, 1)]:
        if old != final:
            _remove(old)


def read_checkpoint(path: Path) -> Checkpoint:
    """A folder of `checkpoints/`, once every file of its manifest was found to be what it says.

    Raises:
        CheckpointError: the folder is torn: something is missing, cut off or changed. Or another version wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: written by another version: its format is {manifest['format']}, not {FORMAT}"
            )
        for name, said in manifest["files"].items():
            if not (path / name).is_file() or _sum(path / name) != said:
                raise CheckpointError(f"{path}: not whole: {name} is not as it was written")
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        found = Checkpoint(path, Progress.from_json(record["progress"]), record["metrics_bytes"], record["elapsed"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not whole: {error or type(error).__name__}") from error
    return found


def newest_whole(run: RunFolder) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest checkpoint of a run that is whole, and what is wrong with those after it. Only for the one who writes the run.

    One that was being replaced when the machine stopped has its name back afterwards.
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
        except CheckpointError as error:
            torn.append(error)
    return None, torn


def _begin(run: RunFolder, folder: Path) -> None:
    """An empty folder, after what earlier crashes left was removed."""
    for left in (_UNFINISHED, _REMOVED):
        for path in run.checkpoints.glob(f"{left}*"):
            shutil.rmtree(path, ignore_errors=True)
    for half in run.checkpoints.glob(".latest.*.tmp"):
        half.unlink(missing_ok=True)
    folder.mkdir(parents=True)


def _remove(path: Path) -> None:
    """Under another name first: half of a checkpoint must not have the name of one."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sums(folder: Path) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(folder)): _sum(path) for path in _files(folder)}


def _sum(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _to_disk(path: Path) -> None:
    """A file's bytes, or a folder's names, outlive a loss of power. File systems that cannot promise that are left alone."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
