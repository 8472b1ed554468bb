"""School word problems as tasks: GSM8K if available, else 40 shipped problems; and SVAMP (arXiv 2103.07191)."""

import re
from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.data_sets import GSM8K_HUB, SVAMP
from agentgym_envs.math.answers import number_of
from agentgym_envs.math.arithmetic import compute, parse, written
from agentgym_envs.splits import check_split, own_tasks, split_of

_ANNOTATION = re.compile(r"<<([^<>]*)>>")  # GSM8K marks every calculation: 3 + 4 = <<3+4=7>>7


def load_word_problems(split: str = "train") -> TaskSet:
    """The tasks of a split, from `AGENTGYM_DATA`, Hugging Face or the package; `source` says which.

    A task has the question as its message, the gold number (text) as its answer and the worked solution in GSM8K's form
    in `metadata["solution"]`. `metadata["difficulty"]` is the number of marked calculations in it, if any.
    """
    check_split("gsm8k", split)
    return datasets.load(
        f"gsm8k/{split}.jsonl",
        split,
        name=f"gsm8k/{split}",
        parse=lambda record, place: _task(record, f"gsm8k-{split}-{place}", split),
        shipped=lambda: own_word_problems(split),
        hub=GSM8K_HUB,
    )


def own_word_problems(split: str) -> TaskSet:
    def make(record: dict[str, Any], id: str) -> Task:
        return _task(record, id, split)

    source = "the project's own word problems"
    return own_tasks("agentgym_envs.math", "problems.jsonl", split, make, name="gsm8k", source=source)


def _task(record: dict[str, Any], id: str, split: str) -> Task:
    solution = record["answer"]
    gold = solution.rpartition("####")[2].strip()
    if number_of(gold) is None:
        raise ValueError(f"no gold number after '####' in the answer {solution!r:.200}")
    metadata = {"split": split, "solution": solution}
    steps = len(_ANNOTATION.findall(solution))
    return Task(id, (user(record["question"]),), gold, metadata=metadata | ({"difficulty": steps} if steps else {}))


def solution_of(task: Task) -> str:
    """A right reply: the worked solution without annotations, or the bare answer without one."""
    solution = task.metadata.get("solution")
    return _ANNOTATION.sub("", solution) if isinstance(solution, str) else f"#### {task.answer}"


def calculations_of(task: Task) -> list[str]:
    """The expressions annotated in the worked solution, in order, without their results."""
    marks = _ANNOTATION.findall(str(task.metadata.get("solution", "")))
    return [mark.rpartition("=")[0] for mark in marks if "=" in mark]


def load_svamp(split: str = "train") -> TaskSet:
    """The problems of a split, by a hash of their text, from `svamp/svamp.jsonl` in the data folder."""
    check_split("svamp", split)
    file = datasets.require("svamp", SVAMP)
    found = TaskSet.from_jsonl(file, parse=_svamp_task, name="svamp")
    tasks = [task for task in found if split_of(str(task.messages[0]["content"])) == split]
    return TaskSet(tasks, name=f"svamp/{split}", source=str(file))


def _svamp_task(record: dict[str, Any], place: int) -> Task:
    """A task from a record: `Body`, `Question`, `Answer`, and `Equation`, an expression for the answer."""
    body = record["Body"].strip()
    question = f"{body}{'' if body.endswith(('.', ',', '?')) else ','} {record['Question'].strip()}"
    answer, expression = written(compute(parse(str(record["Answer"])))), record["Equation"].strip()
    solution = f"<<{expression}={answer}>>\n#### {answer}"
    return Task(f"svamp-{place}", (user(question),), answer, metadata={"solution": solution})
