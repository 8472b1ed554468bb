"""Runs as the page shows them: one run with its files, and the runs under the named folders. Nothing outside these is read."""

import hashlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from agentgym.core.usage_error import UsageError
from agentgym.viewer.index import BackgroundThread, EpisodeFile, MetricsFile, NotServed, is_inside, open_regular, parsed
from agentgym.viewer.query import Found, Query, TextSearch, find
from agentgym.viewer.rows import EpisodeRow

Kind = Literal["evaluation", "training"]
FOLDERS: dict[Kind, str] = {"evaluation": "episodes", "training": "trajectories"}
MOST_SEARCHES = 4
MOST_SMALL_FILE = 64 * 2**20
STEP = re.compile(r"(train|eval)-(\d+)")


def run_id(path: Path) -> str:
    return re.sub(r"[^\w.@+-]+", "-", path.name).strip("-.") or "run"


class Run:
    """A run folder. Its files are looked at again by `refresh`, and read by `advance`.

    Attributes:
        path: the folder, resolved. Files outside it are never read, even through links.
        made: values made of each file, by what they are and its name, with the state in which it was then.
    """

    def __init__(self, id: str, path: Path, kind: Kind):
        self.id, self.path, self.kind = id, path, kind
        self.files: dict[str, EpisodeFile] = {}
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.manifest: dict[str, Any] = {}
        self.made: dict[tuple[str, str], tuple[tuple[int, int], Any]] = {}
        self._manifest_problem: str | None = None
        self._manifest_seen = (-1, -1)
        self._thread = BackgroundThread("index")
        self._lock = threading.Lock()
        self._searches: OrderedDict[str, TextSearch] = OrderedDict()

    def refresh(self) -> None:
        with self._lock:
            if self.kind == "evaluation":
                self._read_manifest()
            cells = {str(cell.get("file", "")): str(cell.get("name", "")) for cell in self.cells}
            folder = self.path / FOLDERS[self.kind]
            if not is_inside(folder, self.path):
                self.files = {}
                return
            paths = [p for p in folder.glob("*.jsonl") if not p.name.startswith(".") and is_inside(p, self.path)]
            planned = {file: place for place, file in enumerate(cells)}
            paths.sort(key=lambda p: (planned.get(f"{folder.name}/{p.name}", len(planned)), _in_order(p.name)))
            files = {p.stem: self.files.get(p.stem) or EpisodeFile(p, "", self.kind == "evaluation") for p in paths}
            for stem, file in files.items():
                file.name = cells.get(f"{folder.name}/{stem}.jsonl") or stem
            self.files = files

    def _read_manifest(self) -> None:
        path = self.path / "run.json"
        try:
            found = path.stat()
            seen = (found.st_mtime_ns, found.st_size)
            if seen == self._manifest_seen:
                return
            self._manifest_seen = seen
            manifest = parsed(small_file(self.path, path.name))
            if not isinstance(manifest, dict) or not isinstance(manifest.get("cells"), list):
                raise ValueError("has no list of cells")
        except (OSError, ValueError) as error:
            self.manifest, self._manifest_problem = {}, f"run.json: {error}"
        else:
            self.manifest, self._manifest_problem = manifest, None

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [cell for cell in self.manifest.get("cells", []) if isinstance(cell, dict)]

    @property
    def problems(self) -> list[str]:
        """Parts of the run that cannot be read, one line each."""
        found = [self._manifest_problem] if self._manifest_problem else []
        for file in (*self.files.values(), self.metrics):
            if file.problem:
                more = f" ({file.broken} lines in all)" if file.broken > 1 else ""
                found.append(f"{file.problem}{more}")
        return found

    @property
    def indexing(self) -> float:
        files = list(self.files.values())
        total = sum(file.size for file in files) or 1
        return 1.0 if all(f.share == 1.0 for f in files) else min(0.9999, sum(f.read_to for f in files) / total)

    def advance(self, seconds: float) -> None:
        """Read new records in a thread; returns when all are read, or after this time while the thread continues."""
        self.refresh()
        if behind := [file for file in self.files.values() if file.changed()]:
            self._thread.run(lambda: read_all(behind), seconds)

    def listed(self, query: Query, seconds: float) -> tuple[list[Found], float]:
        """The rows that a query finds, and the share of rows in which its text was searched."""
        files = list(self.files.values())
        planned = {str(cell.get("name", "")) for cell in self.cells}
        if query.cell and query.cell not in planned | {file.name for file in files}:
            raise NotServed(f"run {self.id} has no cell {query.cell!r}")
        found = find(files, query)
        if not query.text:
            return found, 1.0
        with self._lock:
            search = self._searches.pop(query.text.lower(), None) or TextSearch(query.text)
            self._searches[query.text.lower()] = search
            while len(self._searches) > MOST_SEARCHES:
                self._searches.popitem(last=False)[1].stop()
        search.go_on(files, seconds)
        return [(file, row) for file, row in found if search.has(file, row.start)], search.share(files)

    def strays(self) -> list[str]:
        """`run.json`, and files that it or the folders name, that lie elsewhere or are no plain files."""
        named = [str(cell.get("file", "")) for cell in self.cells]
        folder = FOLDERS[self.kind]
        here = [f"{folder}/{path.name}" for path in (self.path / folder).glob("*.jsonl")]
        paths = {name: self.path / name for name in ("run.json", folder, *named, *here)}
        return [
            name
            for name, path in paths.items()
            if not is_inside(path, self.path) or (path.exists() and not path.is_file() and not path.is_dir())
        ]

    def episode(self, key: str) -> tuple[EpisodeFile, EpisodeRow]:
        """The file and the row of a key. Raises NotServed if there is no such episode."""
        stem, _, start = key.rpartition(":")
        file = self.files.get(stem)
        row = file.row_at(int(start)) if file and start.isascii() and start.isdigit() and len(start) < 20 else None
        if file is None or row is None:
            reading = "" if self.indexing == 1.0 else " so far: its files are still being read"
            raise NotServed(f"run {self.id} has no episode {key!r}{reading}")
        return file, row

    def cell(self, name: str) -> dict[str, Any]:
        return next((cell for cell in self.cells if cell.get("name") == name), {})

    def row_json(self, file: EpisodeFile, row: EpisodeRow) -> dict[str, Any]:
        training = self.kind == "training"
        step = STEP.fullmatch(file.path.stem) if training else None
        values = {name: getattr(row, name) for name in EpisodeRow.__slots__ if name not in ("start", "size")}
        return {
            "key": f"{file.path.stem}:{row.start}",
            "cell": file.name,
            "agent": "policy" if training else agent_name(self.cell(file.name)),
            **values,
            "tags": list(row.tags),
            "finishes": list(row.finishes),
            "step": int(step[2]) if step else None,
        }


def _in_order(name: str) -> tuple[int, str]:
    """Steps in their order, an evaluation before the training of the same step; other files by name."""
    step = STEP.match(name)
    return (int(step[2]) if step else 0, name)


def read_all(files: Iterable[EpisodeFile]) -> None:
    for file in files:
        file.update()


def agent_name(cell: dict[str, Any]) -> str:
    agent = cell.get("agent")
    return str(agent.get("name", "")) if isinstance(agent, dict) else ""


def small_file(folder: Path, name: str) -> bytes:
    """The content of a small file. Raises OSError if it cannot be read, is too large, or is outside the folder."""
    if not is_inside(folder / name, folder):
        raise OSError("it is outside the run's folder")
    with open_regular(folder / name) as file:
        content = file.read(MOST_SMALL_FILE + 1)
    if len(content) > MOST_SMALL_FILE:
        raise OSError(f"it is larger than {MOST_SMALL_FILE >> 20} MiB")
    return content


def text_in(folder: Path, name: str) -> str:
    """The text of a file in a folder; "" where it cannot be read."""
    try:
        return small_file(folder, name).decode("utf-8", "replace")
    except OSError:
        return ""


def object_in(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in a JSON file of a folder; None if it cannot be read."""
    try:
        value = parsed(small_file(folder, name))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def newest(paths: Iterable[Path]) -> float:
    """The time of the last write to these files, in unix seconds; 0 if none exists."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


# How deep below a named folder runs are looked for, and in how many folders at most.
DEPTH = 4
MOST_FOLDERS = 20_000
LOOK_SECONDS = 1.0
# Of one run, before the next one is begun beside it.
READ_SECONDS = 600.0
_NOT_RUNS = frozenset({"__pycache__", "node_modules", "checkpoints", "episodes", "trajectories", "logs", "model"})
_MANIFEST_START = 64 * 1024


class Runs:
    """The runs under some resolved folders, by id. Ids do not change when other runs appear."""

    def __init__(self, roots: list[Path]):
        self.roots = roots
        self._found: dict[str, Run] = {}
        self._by_path: dict[Path, Run] = {}
        self._ids: dict[str, Path] = {}
        self.looked = 0.0
        self._thread = BackgroundThread("runs")
        self._lock = threading.Lock()

    def look(self) -> list[Run]:
        """The current runs; searched for at most once a second."""
        with self._lock:
            if time.monotonic() - self.looked > LOOK_SECONDS or not self.looked:
                self._by_path = {path: self._run(path, kind) for path, kind in run_folders(self.roots)}
                self._found = {run.id: run for run in self._by_path.values()}
                self.looked = time.monotonic()
            return list(self._found.values())

    def get(self, id: str) -> Run:
        """Raises NotServed if there is no such run."""
        run = self._found.get(id) or next((run for run in self.look() if run.id == id), None)
        if run is None:
            raise NotServed(f"there is no run {id!r}")
        return run

    def advance_all(self, seconds: float) -> None:
        """Read new records of all evaluations, the newest first, in one thread that may outlast this call."""
        runs = list(self._found.values())
        for run in runs:
            if run.kind == "training":
                run.refresh()
        newest_first = sorted(runs, key=lambda run: newest([run.path / "run.json"]), reverse=True)

        def read() -> None:
            for run in newest_first:
                if run.kind == "evaluation":
                    run.advance(READ_SECONDS)

        self._thread.run(read, seconds)

    def _run(self, path: Path, kind: Kind) -> Run:
        known = self._by_path.get(path)
        if known is not None and known.kind == kind:
            return known
        id = run_id(path)
        if self._ids.setdefault(id, path) != path:
            id = f"{id}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
            self._ids[id] = path
        return Run(id, path, kind)


def roots_of(paths: Sequence[Path]) -> list[Path]:
    """The folders that were named, resolved. Raises UsageError if one is not there, or is no folder."""
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
    entries = [entry for entry in entries if entry.name not in _NOT_RUNS and entry.name[0] != "."]
    # A link to itself is no folder for `isdir`, and an error for the entry.
    folders = [Path(e.path) for e in entries if (os.path.isdir(e) if e.is_symlink() else e.is_dir())]
    return [path.resolve() for path in folders if is_inside(path, root)]


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
