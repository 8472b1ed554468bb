"""Reads instances from files or the Hugging Face hub.

`read_instances` knows the records of SWE-bench (Lite, Verified, Multilingual, Multimodal's text part), SWE-Gym,
SWE-smith, R2E-Gym and NeMo Gym, by their fields; `records.py` says which those are.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentgym import datasets
from agentgym_envs.swe_bench.instance import Instance, InstanceError
from agentgym_envs.swe_bench.records import instance_of

__all__ = ["Instance", "InstanceError", "read_instances"]
_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_instances(source: str | Path, split: str = "test") -> list[Instance]:
    """The instances of a file (.jsonl, .json, .parquet), or of a data set on the hub ("princeton-nlp/SWE-bench_Lite").

    Args:
        split: of the data set on the hub; a file is read whole.

    Raises InstanceError for a record that is no instance or an id that comes twice, FileNotFoundError for a missing
    file, ImportError for Parquet without pyarrow, and `datasets.DownloadError` if the hub cannot be asked.
    """
    instances: dict[str, tuple[Instance, str]] = {}
    for place, record in _records(source, split):
        instance = instance_of(record, place)
        if instance.id in instances:
            before = instances[instance.id][1]
            raise InstanceError(f"{place}: instance_id: {instance.id!r} is in {before} too: remove one of them")
        instances[instance.id] = instance, place
    if not instances:
        raise InstanceError(f"{source}: there is no instance in it")
    return [instance for instance, _ in instances.values()]


def _records(source: str | Path, split: str) -> Iterable[tuple[str, Any]]:
    """Each record with the place where it stands."""
    path = Path(source).expanduser()
    if not path.is_file():
        name = str(source)
        if path.suffix in _SUFFIXES or name.count("/") != 1 or name.startswith(("/", ".", "~")):
            remedy = 'give a file (.jsonl, .json, .parquet) or a data set of the hub ("owner/name")'
            raise FileNotFoundError(f"{name}: there is no such file: {remedy}")
        return ((f"{name}, {split}, row {number}", row) for number, row in enumerate(_hub_rows(name, split), 1))
    if path.suffix == ".parquet":
        return ((f"{path}, row {number}", row) for number, row in enumerate(_parquet_rows(path), 1))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InstanceError(f"{path}: is not UTF-8 text ({error}): save it as UTF-8") from error
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        return (
            (f"{path}, line {number}", _json(line, f"{path}, line {number}")) for number, line in lines if line.strip()
        )
    if path.suffix == ".json":
        return _of_json(_json(text, str(path)), path)
    raise InstanceError(f"{path}: cannot tell its format by its name: end it in {', '.join(_SUFFIXES)}")


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InstanceError(f"{place}: is not JSON: {error}; is the file cut off, or of another format?") from error


def _of_json(content: Any, path: Path) -> Iterable[tuple[str, Any]]:
    """One record, a list of them, or an object of records by id."""
    if isinstance(content, dict):
        if not all(isinstance(value, dict) for value in content.values()) or "responses_create_params" in content:
            return [(str(path), content)]
        return [(f"{path}, {name!r}", {"instance_id": name, **value}) for name, value in content.items()]
    if isinstance(content, list):
        return [(f"{path}, record {number}", record) for number, record in enumerate(content, 1)]
    raise InstanceError(f"{path}: is {type(content).__name__}, not a record or a list of records")


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        return list(parquet.read_table(path).to_pylist())
    except (ArrowException, OSError) as error:
        raise InstanceError(f"{path}: is not Parquet: {error}") from error


def _hub_rows(name: str, split: str) -> list[dict[str, Any]]:
    hub = datasets.HubData(name)
    cached = datasets.from_cache(hub, split)
    if cached is not None:
        return cached[0]
    if problem := datasets.no_hub():
        raise datasets.DownloadError(f"cannot read {name}: {problem}, or give a file of its records")
    try:
        return datasets.download(hub, split)
    except Exception as error:  # the hub's client raises many types
        raise datasets.DownloadError(f"cannot read {name} ({split}): {error}") from error
