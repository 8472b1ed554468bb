"""Finds task data: in the user's folder, then on Hugging Face, then among the tasks that an environment ships with. Also the
catalogue of data sets that packages register, and how they are fetched.

`AGENTGYM_DATA` names the folder, which holds files such as `gsm8k/test.jsonl`. Not set, it is `~/.cache/agentgym/data`, which
`agentgym data get` fills; empty, there is none. Hugging Face is asked through the `datasets` package, if installed: first its
cache, then the hub, unless `HF_HUB_OFFLINE` is set. A hub that does not answer costs a few seconds, once per process.
"""

import concurrent.futures
import functools
import importlib.util
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentgym.core.extensions import import_path
from agentgym.core.install import pip_install
from agentgym.core.registration import load_plugins
from agentgym.core.tasks import Task, TaskSet
from agentgym.storage.files import write_bytes

T = TypeVar("T")
Rows = list[dict[str, Any]]
log = logging.getLogger(__name__)

FOLDER_VARIABLE = "AGENTGYM_DATA"
PROBE_SECONDS = 3.0
DOWNLOAD_SECONDS = 120.0

noticed: set[str] = set()
_sources: dict[str, None] = {}  # of the catalogue, in the order of their registration


@dataclass(frozen=True)
class HubData:
    repo: str
    config: str = "default"
    revision: str = "main"


def folder() -> Path | None:
    """The data folder, which need not exist yet; None if `AGENTGYM_DATA` is empty."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is None:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentgym" / "data"
    return Path(named).expanduser() if named else None


def locate(path: str) -> Path | None:
    """A file in the data folder ("gsm8k/test.jsonl"), or None. Raises FileNotFoundError if `AGENTGYM_DATA` names no folder."""
    root = folder()
    if root is None:
        return None
    if not root.is_dir() and FOLDER_VARIABLE in os.environ:
        remedy = f"set it to a folder that holds {path}, or unset it"
        raise FileNotFoundError(f"{FOLDER_VARIABLE} is {str(root)!r}, which is not a folder: {remedy}")
    found = root / path
    return found if found.is_file() else None


def require(name: str, path: str) -> Path:
    found = locate(path)
    if found is None:
        where = folder() or f"no folder ({FOLDER_VARIABLE} is empty)"
        remedy = f'run "agentgym data get {name}", or set {FOLDER_VARIABLE} to a folder that has it'
        raise FileNotFoundError(f"{name}: there is no {path} in {where}: {remedy}")
    return found


def load(
    path: str,
    split: str,
    *,
    name: str,
    parse: Callable[[dict[str, Any], int], Task],
    shipped: Callable[[], TaskSet],
    hub: HubData | None = None,
) -> TaskSet:
    """The tasks of one split from the best source there is; `TaskSet.source` names it.

    Args:
        path: of a JSON Lines file in the data folder.
        parse: makes a task of a record and its position.
        shipped: the environment's own tasks, if there is no other source. A warning then says so, once per process.
    """
    file = locate(path)
    if file is not None:
        return TaskSet.from_jsonl(file, parse=parse, name=name)
    if hub is not None:
        found = from_cache(hub, split) or _from_hub(hub, split)
        if found is not None:
            rows, source = found
            return TaskSet([parse(row, i) for i, row in enumerate(rows)], name=name, source=source)
    tasks = shipped()
    instead = f"For the real data, set {FOLDER_VARIABLE} to a folder with {path}"
    if hub:
        instead += f", or allow access to {hub.repo} on Hugging Face and run: {pip_install('agentgym-toolkit[data]')}"
    tell_shipped(tasks, instead)
    return tasks


def tell_shipped(tasks: TaskSet, instead: str) -> None:
    """Warn, once per process and task set, that an environment's own tasks are used; `instead` says how to have others."""
    if tasks.name not in noticed:
        noticed.add(tasks.name)
        log.warning("%s: using %s (%d tasks). %s", tasks.name, tasks.source, len(tasks), instead)


def from_cache(hub: HubData, split: str) -> tuple[Rows, str] | None:
    """The rows of a split that `datasets` prepared before. Reads its Arrow files, so no network is asked."""
    owner, _, title = hub.repo.rpartition("/")
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or str(Path(home) / "datasets")).expanduser()
    if not is_installed():
        return None
    from datasets.naming import camelcase_to_snakecase

    title = camelcase_to_snakecase(title)
    folder = cache / f"{owner}___{title}" / hub.config
    versions: dict[Path, list[Path]] = {}
    for file in sorted(folder.glob(f"*/*/{title}-{split}*.arrow")):
        if file.stem == f"{title}-{split}" or file.stem.startswith(f"{title}-{split}-0"):
            versions.setdefault(file.parent, []).append(file)
    if not versions:
        return None
    latest = max(versions, key=lambda version: version.stat().st_mtime)
    try:
        from datasets import Dataset

        rows = [row for file in versions[latest] for row in Dataset.from_file(str(file))]
    except Exception as error:  # a broken cache is not worth a user's run: say it, go on to the next source
        log.info("cannot read the cached %s in %s: %s", hub.repo, latest, error)
        return None
    return rows, f"Hugging Face cache: {hub.repo} ({hub.config}, {split})"


def _from_hub(hub: HubData, split: str) -> tuple[Rows, str] | None:
    if no_hub() is not None:
        return None
    try:
        rows = download(hub, split)
    except Exception as error:  # the hub's client raises many types; the shipped tasks remain
        log.info("cannot get %s from the Hugging Face hub: %s", hub.repo, error)
        return None
    return rows, f"Hugging Face hub: {hub.repo} ({hub.config}, {split}, {hub.revision})"


def download(hub: HubData, split: str, seconds: float = DOWNLOAD_SECONDS) -> Rows:
    """The rows of a split, by the `datasets` package. Raises that package's errors, or TimeoutError."""

    def load_rows() -> Rows:
        from datasets import load_dataset

        return list(load_dataset(hub.repo, hub.config, split=split, revision=hub.revision))

    return call_within(seconds, load_rows, f"download of {hub.repo}")


def no_hub() -> str | None:
    """The reason why the hub cannot be reached, and the cure; None if it can be. The hub is probed once per process."""
    if not is_installed():
        return f'the package "datasets" is not installed: {pip_install("agentgym-toolkit[data]")}'
    switches = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    if {"1", "ON", "YES", "TRUE"} & set(switches):
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids it: unset it"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not _hub_answers(endpoint):
        return f"{endpoint} does not answer: check the network, or name a mirror in HF_ENDPOINT"
    return None


def is_installed() -> bool:
    return importlib.util.find_spec("datasets") is not None


@functools.cache
def _hub_answers(endpoint: str) -> bool:
    """True if the hub answers. Asked once per process, since the hub's client would retry for minutes."""

    def ask() -> bool:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as answer:
            return bool(answer.status < 500)

    try:
        return call_within(PROBE_SECONDS, ask, f"probe of {endpoint}")
    except urllib.error.HTTPError as error:
        return error.code < 500
    except Exception as error:
        log.info("the Hugging Face hub does not answer: %s", error)
        return False


def call_within(seconds: float, work: Callable[[], T], name: str) -> T:
    """Run work in a daemon thread, left behind after a time: a name lookup has no timeout. Raises TimeoutError."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    concurrent.futures.wait([outcome], seconds)
    if not outcome.done():
        raise TimeoutError(f"{name}: no answer within {seconds:g} s")
    return outcome.result()


# ---- the catalogue


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
    root = folder()
    return [path for path in data.files if root is None or not (root / path).is_file()]


def fetch(data: DataSet, *, force: bool = False, seconds: float = 600.0) -> list[Path]:
    """Fetch the missing files of a data set from the hub (with `force`, all) and return those written. Raises DownloadError."""
    root = folder()
    if root is None:
        raise DownloadError(f"{FOLDER_VARIABLE} is empty: set it to a folder, or unset it")
    wanted = list(data.files) if force else missing_files(data)
    if not wanted:
        return []
    by_hand = f"put {', '.join(wanted)} into {root} by hand; it comes from {data.source}"
    if data.write is None:
        raise DownloadError(f"{data.name} is not on the Hugging Face hub: {by_hand}")
    if problem := no_hub():
        raise DownloadError(f"cannot fetch {data.name}: {problem}, or {by_hand}")
    rows = []
    for hub, split in data.parts:
        try:
            rows.append(download(hub, split, seconds))
        except Exception as error:  # the hub's client raises many types
            raise DownloadError(f"cannot fetch {hub.repo} ({hub.config}, {split}): {error}") from error
    try:
        contents = data.write(rows)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        repos = ", ".join(dict.fromkeys(hub.repo for hub, _ in data.parts))
        text = f"{repos} has an unexpected format on the hub, different from {data.name}: {error!r}"
        raise DownloadError(text) from error
    for path in wanted:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(root / path, contents[path])
        except OSError as error:
            raise DownloadError(f"cannot write {root / path}: {error}") from error
    return [root / path for path in wanted]
