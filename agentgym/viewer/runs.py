"""Finds the runs under the named folders. Nothing outside them is read."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.core.usage_error import UsageError
from agentgym.viewer.index import NotServed, open_regular
from agentgym.viewer.run import Kind, Run, is_inside, newest, run_id

# How deep below a named folder runs are looked for, and in how many folders at most.
DEPTH = 4
MOST_FOLDERS = 20_000
LOOK_SECONDS = 1.0
# Of one run, before the next one is begun beside it.
READ_SECONDS = 600.0
_NOT_RUNS = frozenset({"__pycache__", "node_modules", "checkpoints", "episodes", "trajectories", "logs", "model"})
_MANIFEST_START = 64 * 1024


@dataclass
class Runs:
    """The runs under some resolved folders, by id. Ids do not change when other runs appear."""

    roots: list[Path]
    found: dict[str, Run] = field(default_factory=dict)
    _by_path: dict[Path, Run] = field(default_factory=dict)
    _ids: dict[str, Path] = field(default_factory=dict)
    _looked: float = 0.0
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> list[Run]:
        """The current runs; searched for at most once a second."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS or not self._looked:
                now = dict(run_folders(self.roots))
                self._by_path = {path: self._run(path, kind) for path, kind in now.items()}
                self.found = {run.id: run for run in self._by_path.values()}
                self._looked = time.monotonic()
            return list(self.found.values())

    def get(self, id: str) -> Run:
        """Raises NotServed if there is no such run."""
        run = self.found.get(id) or next((run for run in self.look() if run.id == id), None)
        if run is None:
            raise NotServed(f"there is no run {id!r}")
        return run

    def advance_all(self, seconds: float) -> None:
        """Read what is new of all evaluations, the newest first, in one thread that goes on after this long."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                evaluations = [run for run in self.found.values() if run.kind == "evaluation"]
                self._thread = threading.Thread(target=_read_runs, args=(evaluations,), name="runs", daemon=True)
                self._thread.start()
            thread = self._thread
        for run in self.found.values():
            if run.kind == "training":
                run.refresh()
        thread.join(seconds)

    def _run(self, path: Path, kind: Kind) -> Run:
        known = self._by_path.get(path)
        if known is not None and known.kind == kind:
            return known
        id = run_id(path)
        if self._ids.setdefault(id, path) != path:
            id = f"{id}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
            self._ids[id] = path
        return Run(id, path, kind)


def _read_runs(runs: list[Run]) -> None:
    for run in sorted(runs, key=lambda run: newest([run.path / "run.json"]), reverse=True):
        run.advance(READ_SECONDS)


def roots_of(paths: Sequence[Path]) -> list[Path]:
    """The folders that were named, resolved.

    Raises:
        UsageError: one is not there, or is no folder.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no folder {path}")
        if not path.is_dir():
            raise UsageError(f"{path} is not a folder: name a run folder, or a folder of runs")
    return list(dict.fromkeys(path.resolve() for path in paths))


def run_folders(roots: Sequence[Path]) -> Iterator[tuple[Path, Kind]]:
    """The run folders under some folders, and what they are. Links that lead out of their root are passed over."""
    seen = set()
    for root in roots:
        waiting = [(root, 0)]
        looked = 0
        while waiting and looked < MOST_FOLDERS:
            folder, depth = waiting.pop(0)
            looked += 1
            if folder in seen:
                continue
            seen.add(folder)
            kind = kind_of(folder)
            if kind:
                yield folder, kind
            elif depth < DEPTH:
                waiting += [(child, depth + 1) for child in _children(folder, root)]


def _children(folder: Path, root: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    names = [Path(e.path) for e in entries if e.name not in _NOT_RUNS and e.name[0] != "." and _is_folder(e)]
    return [path.resolve() for path in names if is_inside(path, root)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def kind_of(folder: Path) -> Kind | None:
    try:
        if (folder / "run.json").is_file() and _is_evaluation(folder):
            return "evaluation"
        if (folder / "config.yaml").is_file() and any((folder / n).exists() for n in ("metrics.jsonl", "trajectories")):
            return "training"
    except OSError:
        return None
    return None


def _is_evaluation(folder: Path) -> bool:
    """True if `run.json` says so. A broken one counts if there is a folder of episodes, so that the page shows it."""
    try:
        with open_regular(folder / "run.json") as file:
            start = file.read(_MANIFEST_START)
        if len(start) == _MANIFEST_START:
            return b'"evaluation"' in start
        manifest = json.loads(start)
        return isinstance(manifest, dict) and manifest.get("kind") == "evaluation"
    except (OSError, ValueError, RecursionError):
        return (folder / "episodes").is_dir()
