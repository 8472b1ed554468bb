"""Instances as tasks: an instance is a task's metadata, and its issue the opening message."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.splits import split_of
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.worktree import FOLDER

OWN = "swe_bench/lite_from_sdist.jsonl"
SPLITS = ("train", "test", "all")
_OPENING = """The repository of {repo} is in {folder}. Resolve this issue in it:

<issue>
{issue}
</issue>

Change the code, not the tests: hidden tests will judge your work. They were written for this issue; those that pass now must \
still pass. There is no network. Look for the cause first, reproduce it with a small script, fix it, and check the fix."""


def task_of(instance: Instance) -> Task:
    opening = _OPENING.format(repo=instance.repo, folder=FOLDER, issue=instance.problem_statement.strip())
    given = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    record = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    kept = {name: value for name, value in record.items() if value not in (None, "", [])}
    return Task(instance.id, (user(opening),), metadata={"instance": kept})


def instance_of(task: Task) -> Instance:
    """The instance of a task. Raises ValueError if it has none."""
    record = task.metadata.get("instance")
    if not isinstance(record, dict):
        raise ValueError(f"task {task.id!r} has no instance: make it with agentgym_envs.swe_bench.tasks.task_of")
    try:
        lists: dict[str, Any] = {name: tuple(record.get(name, ())) for name in ("fail_to_pass", "pass_to_pass")}
        return Instance(**{**record, **lists})
    except TypeError as error:
        raise ValueError(f"task {task.id!r}: its instance has wrong fields: {error}") from None


def load_tasks(split: str, data: str | None) -> TaskSet:
    """The tasks of a split.

    Args:
        split: of a data set on the hub, its own; of a file "train", "test" (an eighth, by a hash of the id), or "all".
        data: a file of records, here or in the data folder, or a data set's name; None: `OWN` in the data folder, of which those are taken that were
            rebuilt and verified.

    Raises ValueError if there is no such split or data, and what `read_instances` raises.
    """
    file = None if data is None else Path(data).expanduser()
    if file is None or not file.is_file():
        file = datasets.locate(OWN if data is None else data) or file
    if file is None:
        where = f"{OWN} is not in the data folder ({datasets.FOLDER_VARIABLE})"
        raise ValueError(
            f'swe_bench: {where}: put it there, or give data="FILE", or data="princeton-nlp/SWE-bench_Lite"'
        )
    name = f"swe_bench/{split}"
    if data is not None and not file.is_file():
        return TaskSet([task_of(instance) for instance in read_instances(data, split)], name=name, source=data)
    if split not in SPLITS:
        raise ValueError(f"swe_bench has no split {split!r}; it has {', '.join(SPLITS)}")
    chosen = [instance for instance in read_instances(file) if split in ("all", split_of(instance.id))]
    if data is None:
        verified = _verified(file)
        chosen = [instance for instance in chosen if instance.id in verified]
    return TaskSet([task_of(instance) for instance in chosen], name=name, source=str(file))


def _verified(file: Path) -> set[str]:
    """The ids of the records that were rebuilt, and whose gold patch was seen to resolve them."""
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {record["instance_id"] for record in records if record.get("rebuild_verified")}
