"""SVAMP: one-step word problems with misleading numbers (arXiv 2103.07191)."""

from __future__ import annotations

from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.math.arithmetic import compute, parse, written
from agentgym_envs.splits import check_split, split_of

PATH = "svamp/svamp.jsonl"


def load_svamp(split: str = "train") -> TaskSet:
    """The problems of a split, by a hash of their text, from `svamp/svamp.jsonl` in the data folder.

    Raises:
        ValueError: no such split.
        FileNotFoundError: the file is missing.
    """
    check_split("svamp", split)
    file = datasets.require("svamp", PATH)
    tasks = [task for task in TaskSet.from_jsonl(file, parse=_task, name="svamp") if _split(task) == split]
    return TaskSet(tasks, name=f"svamp/{split}", source=str(file))


def _task(record: dict[str, Any], place: int) -> Task:
    """A task from a record: `Body`, `Question`, `Answer`, and `Equation`, an expression for the answer."""
    body = record["Body"].strip()
    question = f"{body}{'' if body.endswith(('.', ',', '?')) else ','} {record['Question'].strip()}"
    answer, expression = written(compute(parse(str(record["Answer"])))), record["Equation"].strip()
    solution = f"<<{expression}={answer}>>\n#### {answer}"
    return Task(f"svamp-{place}", (user(question),), answer, metadata={"solution": solution})


def _split(task: Task) -> str:
    return split_of(str(task.messages[0]["content"]))
