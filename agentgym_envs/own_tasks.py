"""Tasks shipped with the package: JSON Lines files beside the environments, each record with its split."""

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from agentgym.core.tasks import Task, TaskSet


def own_records(package: str, file: str) -> list[dict[str, Any]]:
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def own_tasks(
    package: str, file: str, split: str, make: Callable[[dict[str, Any], str], Task], *, name: str, source: str
) -> TaskSet:
    """The tasks of a split, with the ids "own-train-0", "own-train-1" and so on; `make` gets a record and the id."""
    records = [record for record in own_records(package, file) if record["split"] == split]
    if not records:
        raise ValueError(f"{source} have no split {split!r}; they have train, test")
    tasks = [make(record, f"own-{split}-{place}") for place, record in enumerate(records)]
    return TaskSet(tasks, name=f"{name}/{split}", source=source)
