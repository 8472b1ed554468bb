"""Problems of mathematics as tasks: MATH if available, else 52 shipped problems."""

from __future__ import annotations

import re
from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import answer_in
from agentgym_envs.own_tasks import own_tasks
from agentgym_envs.splits import check_split

# MATH-500 is a part of MATH's own test set, so the two share no problem.
HUBS = {
    "train": (datasets.HubData("DigitalLearningGmbH/MATH-lighteval"), "train"),
    "test": (datasets.HubData("HuggingFaceH4/MATH-500"), "test"),
}
OWN_SOURCE = "the project's own problems"


def load_problems(split: str = "train") -> TaskSet:
    """The tasks of a split, from `AGENTGYM_DATA`, Hugging Face or the package; `source` says which.

    A task has the problem as its message and the gold answer in LaTeX. `metadata` has `subject`, and `program` (prints
    the answer) for shipped problems or `solution` (worked) for MATH.
    """
    check_split("math_python", split)
    hub, hub_split = HUBS[split]

    def parse(record: dict[str, Any], place: int) -> Task:
        return task_of(record, f"math-{split}-{place}", split)

    return datasets.load(
        f"math/{split}.jsonl",
        hub_split,
        name=f"math/{split}",
        parse=parse,
        shipped=lambda: own_problems(split),
        hub=hub,
    )


def own_problems(split: str) -> TaskSet:
    return own_tasks(
        "agentgym_envs.math.math_python",
        "problems.jsonl",
        split,
        lambda record, id: task_of(record, id, split),
        name="math",
        source=OWN_SOURCE,
    )


def task_of(record: dict[str, Any], id: str, split: str) -> Task:
    """A task from a record: `problem`, and `answer`, or `solution` with the answer in its last `\\boxed{}` as in MATH."""
    answer = record.get("answer")
    if not answer:
        stated = answer_in(str(record.get("solution", "")), "boxed")
        answer = stated.text if stated else ""
    if not answer:
        raise ValueError(f"{id}: no answer, and none in \\boxed{{}} in the solution")
    kept = {key: record[key] for key in ("level", "program", "solution") if record.get(key)}
    subject = record.get("subject") or record.get("type") or ""
    labels: dict[str, Any] = {"tags": [subject]} if subject else {}
    level = re.fullmatch(r"(?:Level )?(\d+)", str(record.get("level", "")))
    if level:
        labels["difficulty"] = int(level[1])
    metadata = {"split": split, "subject": subject, **kept, **labels}
    return Task(id, (user(record["problem"]),), str(answer), metadata=metadata)


def check_problem(task: Task) -> None:
    if not task.messages:
        raise ValueError(f"task {task.id!r} has no messages: the problem is missing")
    if not isinstance(task.answer, str | int | float) or isinstance(task.answer, bool) or not str(task.answer).strip():
        raise ValueError(f"task {task.id!r}: the answer must be LaTeX or a number, not {task.answer!r:.100}")
