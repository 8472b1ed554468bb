"""Questions as tasks: XQuAD or HotpotQA if available, or 52 shipped ones about an invented country.

A task's `answer` is the list of its gold answers. `metadata["corpus"]` names the corpus that answers it, and
`metadata["hops"]` is a chain of searches that leads there: a query and the id of its passage each.
`metadata["difficulty"]` is the chain's length.
"""

from typing import Any

from agentgym import datasets
from agentgym.core.messages import text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.data_sets import HOTPOT, XQUAD
from agentgym_envs.own_tasks import own_tasks
from agentgym_envs.search import hotpot, xquad
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split

DATA = ("auto", "own", "xquad", "hotpot_qa")


def load_questions(split: str = "train", data: str = "auto") -> TaskSet:
    """The tasks of a split; `source` says where they come from. "auto" is XQuAD if its file is there, else own."""
    check_split("search", split)
    check_choice("data", data, DATA)
    if data == "hotpot_qa":
        return TaskSet(hotpot.tasks(split), name=f"search/{split}", source=str(datasets.locate(HOTPOT)))
    if data == "xquad" or (data == "auto" and datasets.locate(XQUAD)):
        return TaskSet(xquad.tasks(split), name=f"search/{split}", source=str(datasets.locate(XQUAD)))
    tasks = own_questions(split)
    if data == "auto":
        datasets.tell_shipped(tasks, 'For XQuAD run "agentgym data get xquad".')
    return tasks


def own_questions(split: str) -> TaskSet:
    """The shipped questions, of two or three searches: 38 train, 14 test."""
    source = "the project's own questions"
    return own_tasks("agentgym_envs.search", "own/questions.jsonl", split, _own_task, name="search", source=source)


def golds_of(task: Task) -> list[str]:
    if not task.messages:
        raise ValueError(f"task {task.id!r} has no messages: the question is missing")
    golds = [task.answer] if isinstance(task.answer, str) else task.answer
    if not isinstance(golds, list | tuple) or not golds or not all(isinstance(g, str) and g.strip() for g in golds):
        raise ValueError(
            f"task {task.id!r}: the answer must be a text or a list of texts that all count, not {golds!r:.100}"
        )
    return list(golds)


def queries_of(task: Task) -> list[str]:
    hops: Any = task.metadata.get("hops")
    if hops:
        return [str(hop["query"]) for hop in hops]
    return [text_of(task.messages[-1])]


def _own_task(record: dict[str, Any], id: str) -> Task:
    hops = record["hops"]
    metadata = {"split": record["split"], "corpus": "own", "hops": hops, "difficulty": len(hops)}
    return Task(id, (user(record["question"]),), record["answers"], metadata=metadata)
