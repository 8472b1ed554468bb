"""One run as the page shows it: files of episodes, metrics, and the files beside them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentgym.viewer.index import EpisodeFile, GrowingLines, NotServed, open_regular, parsed
from agentgym.viewer.query import Found, Query, Search, find
from agentgym.viewer.rows import Numbers, Row

Kind = Literal["evaluation", "training"]
FOLDERS: dict[Kind, str] = {"evaluation": "episodes", "training": "trajectories"}
MOST_SEARCHES = 4
MOST_SMALL_FILE = 64 * 2**20
STEP = re.compile(r"(train|eval)-(\d+)")


def run_id(path: Path) -> str:
    return re.sub(r"[^\w.@+-]+", "-", path.name).strip("-.") or "run"


@dataclass
class Run:
    """A run folder. Its files are looked at again by `refresh`, and read by `advance`.

    Attributes:
        path: the folder, resolved. Files outside it are never read, even through links.
        numbers, results: of each file, with the state in which it was when they were made.
    """

    id: str
    path: Path
    kind: Kind
    files: dict[str, EpisodeFile] = field(default_factory=dict)
    metrics: GrowingLines = field(init=False)
    manifest: dict[str, Any] = field(default_factory=dict)
    manifest_problem: str | None = None
    numbers: dict[str, tuple[tuple[int, int], Numbers]] = field(default_factory=dict)
    results: dict[str, tuple[tuple[int, int], dict[str, Any]]] = field(default_factory=dict)
    _manifest_seen: tuple[int, int] = (-1, -1)
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _searches: OrderedDict[str, Search] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.metrics = GrowingLines(self.path / "metrics.jsonl")

    def refresh(self) -> None:
        with self._lock:
            if self.kind == "evaluation":
                self._read_manifest()
            cells = {str(c.get("file", "")): str(c.get("name", "")) for c in self.cells}
            folder = self.path / FOLDERS[self.kind]
            if not is_inside(folder, self.path):
                self.files = {}
                return
            names = [p.name for p in folder.glob("*.jsonl") if not p.name.startswith(".") and is_inside(p, self.path)]
            files = {}
            planned = {file: place for place, file in enumerate(cells)}
            for name in sorted(names, key=lambda n: (planned.get(f"{folder.name}/{n}", len(planned)), _in_order(n))):
                stem = name.removesuffix(".jsonl")
                cell = cells.get(f"{folder.name}/{name}") or stem
                file = self.files.get(stem) or EpisodeFile(folder / name, cell, self.kind == "evaluation")
                file.name = cell
                files[stem] = file
            self.files = files

    def _read_manifest(self) -> None:
        path = self.path / "run.json"
        try:
            found = path.stat()
            seen = (found.st_mtime_ns, found.st_size)
            if seen == self._manifest_seen:
                return
            self._manifest_seen = seen
            manifest = json_file(path, self.path)
            if not isinstance(manifest, dict) or not isinstance(manifest.get("cells"), list):
                raise ValueError("has no list of cells")
        except (OSError, ValueError) as error:
            self.manifest, self.manifest_problem = {}, f"run.json: {error}"
        else:
            self.manifest, self.manifest_problem = manifest, None

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [cell for cell in self.manifest.get("cells", []) if isinstance(cell, dict)]

    @property
    def problems(self) -> list[str]:
        """Parts of the run that cannot be read, one line each."""
        found = [self.manifest_problem] if self.manifest_problem else []
        for file in self.files.values():
            if file.problem:
                more = f" ({file.broken} lines in all)" if file.broken > 1 else ""
                found.append(f"{file.problem}{more}")
        if self.metrics.broken:
            found.append(f"metrics.jsonl: {self.metrics.broken} lines are not JSON objects")
        return found

    @property
    def indexing(self) -> float:
        files = list(self.files.values())
        total = sum(file.size for file in files) or 1
        return 1.0 if all(f.share == 1.0 for f in files) else min(0.9999, sum(f.read_to for f in files) / total)

    def advance(self, seconds: float) -> None:
        """Read what is new in a thread; returns when all is read, or after this long, while the thread goes on."""
        self.refresh()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                behind = [file for file in self.files.values() if file.changed()]
                if not behind:
                    return
                self._thread = threading.Thread(target=_read_all, args=(behind,), name="index", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(seconds)

    def listed(self, query: Query, seconds: float) -> tuple[list[Found], float]:
        """The rows that a query finds, and the share of rows in which its text was searched."""
        files = list(self.files.values())
        planned = {str(cell.get("name", "")) for cell in self.cells}
        if query.cell and query.cell not in planned | {file.name for file in files}:
            raise NotServed(f"run {self.id} has no cell {query.cell!r}")
        found = find(files, query)
        if not query.text:
            return found, 1.0
        search = self._search(query.text)
        search.go_on(files, seconds)
        share = search.share(files)
        return [(file, row) for file, row in found if search.has(file, row.start)], share

    def strays(self) -> list[str]:
        """Files that its folders or `run.json` name and that lie elsewhere or are no plain files."""
        named = [str(cell.get("file", "")) for cell in self.cells]
        folder = FOLDERS[self.kind]
        here = [f"{folder}/{path.name}" for path in (self.path / folder).glob("*.jsonl")]
        return [name for name in [folder, *named, *here] if not self._own(self.path / name)]

    def _own(self, path: Path) -> bool:
        return is_inside(path, self.path) and (path.is_file() or path.is_dir() or not path.exists())

    def _search(self, text: str) -> Search:
        with self._lock:
            search = self._searches.pop(text.lower(), None) or Search(text)
            self._searches[text.lower()] = search
            while len(self._searches) > MOST_SEARCHES:
                self._searches.popitem(last=False)[1].stop()
            return search

    def episode(self, key: str) -> tuple[EpisodeFile, Row]:
        """The file and the row of a key.

        Raises:
            NotServed: there is no such episode.
        """
        stem, _, start = key.rpartition(":")
        file = self.files.get(stem)
        row = file.row_at(int(start)) if file and start.isascii() and start.isdigit() and len(start) < 20 else None
        if file is None or row is None:
            reading = "" if self.indexing == 1.0 else " so far: its files are still being read"
            raise NotServed(f"run {self.id} has no episode {key!r}{reading}")
        return file, row

    def row_json(self, file: EpisodeFile, row: Row) -> dict[str, Any]:
        stem = file.path.name.removesuffix(".jsonl")
        training = self.kind == "training"
        step = STEP.fullmatch(stem) if training else None
        cell: dict[str, Any] = next((c for c in self.cells if c.get("name") == file.name), {})
        values = {name: getattr(row, name) for name in Row.__slots__ if name not in ("start", "size")}
        return {
            "key": f"{stem}:{row.start}",
            "cell": file.name,
            "agent": "policy" if training else agent_name(cell),
            **values,
            "tags": list(row.tags),
            "finishes": list(row.finishes),
            "step": int(step[2]) if step else None,
        }


def _in_order(name: str) -> tuple[int, str]:
    """Steps in their order, an evaluation before the training of the same step; other files by name."""
    step = STEP.match(name)
    return (int(step[2]) if step else 0, name)


def _read_all(files: Iterable[EpisodeFile]) -> None:
    for file in files:
        file.update()


def agent_name(cell: dict[str, Any]) -> str:
    agent = cell.get("agent")
    return str(agent.get("name", "")) if isinstance(agent, dict) else ""


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path, with links resolved, is inside a resolved folder."""
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):
        return False


def small_file(path: Path, folder: Path) -> bytes:
    """The content of a small file.

    Raises:
        OSError: it cannot be read, is too large, or is outside the folder.
    """
    if not is_inside(path, folder):
        raise OSError("it is outside the run's folder")
    with open_regular(path) as file:
        content = file.read(MOST_SMALL_FILE + 1)
    if len(content) > MOST_SMALL_FILE:
        raise OSError(f"it is larger than {MOST_SMALL_FILE >> 20} MiB")
    return content


def json_file(path: Path, folder: Path) -> Any:
    """The value of a JSON file in a folder. Raises OSError as `small_file`, and ValueError if it is no JSON."""
    return parsed(small_file(path, folder))


def text_file(path: Path, folder: Path) -> str | None:
    """The text of a file in a folder; None where it cannot be read."""
    try:
        return small_file(path, folder).decode("utf-8", "replace")
    except OSError:
        return None


def json_or_none(path: Path, folder: Path) -> dict[str, Any] | None:
    """The object in a JSON file of a folder; None if it cannot be read."""
    try:
        value = json_file(path, folder)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def newest(paths: Iterable[Path]) -> float:
    """The time of the last write to these files, in unix seconds; 0 if none exists."""
    times = [0.0]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)
