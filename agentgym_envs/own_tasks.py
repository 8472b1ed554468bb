"""Tasks shipped with the package: JSON Lines files beside the environments, each record with its split."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from agentgym.core.tasks import Task, TaskSet


def own_records(package: str, file: str) -> list[dict[str, Any]]:
    """The records of a file that a package ships.

    Args:
        package: for example "agentgym_envs.math".
        file: its path in the package's folder.
    """
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def own_tasks(
    package: str, file: str, split: str, make: Callable[[dict[str, Any], str], Task], *, name: str, source: str
) -> TaskSet:
    """The tasks of a split, with the ids "own-train-0", "own-train-1" and so on.

    Args:
        package, file: see `own_records`; each record has a `split`.
        split: which.
        make: makes a task of a record and an id.
        name: of the data set; the split is added to it.
        source: whose tasks they are, in words.

    Raises:
        ValueError: no record is of this split.
    """
    records = [record for record in own_records(package, file) if record["split"] == split]
    if not records:
        raise ValueError(f"{source} have no split {split!r}; they have train, test")
    tasks = [make(record, f"own-{split}-{place}") for place, record in enumerate(records)]
    return TaskSet(tasks, name=f"{name}/{split}", source=source)
