"""The data sets that environments can use: contents, files, and how to fetch them.

A package registers its data sets with `register_data`. Files are in the data folder (`datasets.folder`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym import datasets
from agentgym.core.extensions import import_path
from agentgym.core.registration import load_plugins
from agentgym.datasets import HubData
from agentgym.storage.files import write_bytes

Rows = list[dict[str, Any]]

_sources: dict[str, None] = {}  # in the order of their registration


class DownloadError(RuntimeError):
    """A data set could not be fetched; says why, and what to do."""


@dataclass(frozen=True)
class DataSet:
    """A data set that environments can use.

    `files` are the paths in the data folder that make it complete. If the hub has it, `parts` names its data sets and splits
    there, and `write` makes the files' contents of the rows of each part.
    """

    name: str
    items: str
    licence: str
    source: str
    files: tuple[str, ...]
    envs: tuple[str, ...] = ()
    parts: tuple[tuple[HubData, str], ...] = ()
    write: Callable[[Sequence[Rows]], dict[str, bytes]] | None = None


def register_data(source: str) -> None:
    """Make data sets known: `source` is "module:function" of a function that returns them, imported when needed."""
    _sources[source] = None


def data_sets() -> dict[str, DataSet]:
    """Every known data set by name, those of plugins too. Raises ValueError for an invalid one."""
    load_plugins()
    found: dict[str, DataSet] = {}
    for source in _sources:
        for data in import_path(source)():
            if data.name in found:
                raise ValueError(f"there are two data sets {data.name!r}, one of {source}")
            if bool(data.parts) != (data.write is not None):
                raise ValueError(f"data set {data.name!r} of {source}: parts and write belong together")
            found[data.name] = data
    return dict(sorted(found.items()))


def missing_files(data: DataSet) -> list[str]:
    root = datasets.folder()
    return [path for path in data.files if root is None or not (root / path).is_file()]


def fetch(data: DataSet, *, force: bool = False, seconds: float = 600.0) -> list[Path]:
    """Fetch the missing files of a data set from the hub (with `force`, all) and return those written. Raises DownloadError."""
    root = datasets.folder()
    if root is None:
        raise DownloadError(f"{datasets.FOLDER_VARIABLE} is empty: set it to a folder, or unset it")
    wanted = list(data.files) if force else missing_files(data)
    if not wanted:
        return []
    by_hand = f"put {', '.join(wanted)} into {root} by hand; it comes from {data.source}"
    if data.write is None:
        raise DownloadError(f"{data.name} is not on the Hugging Face hub: {by_hand}")
    if problem := datasets.no_hub():
        raise DownloadError(f"cannot fetch {data.name}: {problem}, or {by_hand}")
    contents = _made(data, seconds)
    for path in wanted:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(root / path, contents[path])
        except OSError as error:
            raise DownloadError(f"cannot write {root / path}: {error}") from error
    return [root / path for path in wanted]


def _made(data: DataSet, seconds: float) -> dict[str, bytes]:
    rows = []
    for hub, split in data.parts:
        try:
            rows.append(datasets.download(hub, split, seconds))
        except Exception as error:  # the hub's client raises many types
            raise DownloadError(f"cannot fetch {hub.repo} ({hub.config}, {split}): {error}") from error
    try:
        return data.write(rows) if data.write else {}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        repos = ", ".join(dict.fromkeys(hub.repo for hub, _ in data.parts))
        text = f"{repos} has an unexpected format on the hub, different from {data.name}: {error!r}"
        raise DownloadError(text) from error
