"""Questions as tasks: XQuAD or HotpotQA if available, or 52 shipped ones about an invented country; and paragraphs.

A task's `answer` is the list of its gold answers. `metadata["corpus"]` names the corpus that answers it, and
`metadata["hops"]` is a chain of searches that leads there: a query and the id of its passage each.
`metadata["difficulty"]` is the chain's length.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentgym import datasets
from agentgym.core.messages import text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.data_sets import HOTPOT, XQUAD
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split, own_tasks, split_of

DATA = ("auto", "own", "xquad", "hotpot_qa")


def load_questions(split: str = "train", data: str = "auto") -> TaskSet:
    """The tasks of a split; `source` says where they come from. "auto" is XQuAD if its file is there, else own."""
    check_split("search", split)
    check_choice("data", data, DATA)
    if data == "hotpot_qa":
        return TaskSet(_hotpot_tasks(split), name=f"search/{split}", source=str(datasets.locate(HOTPOT)))
    if data == "xquad" or (data == "auto" and datasets.locate(XQUAD)):
        return TaskSet(_xquad_tasks(split), name=f"search/{split}", source=str(datasets.locate(XQUAD)))
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


# ---- HotpotQA (distractor, validation): 7,405 questions over two Wikipedia paragraphs each


def hotpot_passages() -> list[dict[str, str]]:
    """Every paragraph that stands beside a question, each once; its id is its title."""
    found: dict[str, dict[str, str]] = {}
    for record in _hotpot_records():
        context = record["context"]
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            found.setdefault(title, {"id": title, "title": title, "text": "".join(sentences).strip()})
    return list(found.values())


def _hotpot_tasks(split: str) -> list[Task]:
    """A question belongs to "test" or "train" as `split_of` says of its id."""
    return [_hotpot_task(record, split) for record in _hotpot_records() if split_of(record["id"]) == split]


def _hotpot_task(record: dict[str, Any], split: str) -> Task:
    titles = dict.fromkeys(record["supporting_facts"]["title"])
    hops = [{"query": title, "passage": title} for title in titles]
    metadata = {"split": split, "corpus": "hotpot_qa", "type": record.get("type", ""), "hops": hops}
    if record.get("type"):
        metadata["tags"] = [record["type"]]
    if record.get("level"):
        metadata["difficulty"] = record["level"]
    return Task(f"hotpot-{record['id']}", (user(record["question"]),), [record["answer"]], metadata=metadata)


def _hotpot_records() -> Iterator[dict[str, Any]]:
    path = datasets.require("hotpot_qa", HOTPOT)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                _ = record["id"], record["question"], record["answer"], record["supporting_facts"]["title"]
                _ = record["context"]["title"], record["context"]["sentences"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a row of hotpotqa/hotpot_qa: {error!r}") from error
            yield record


# ---- XQuAD in English: 240 paragraphs of 48 Wikipedia articles, and 1,190 questions of one paragraph each


def xquad_passages() -> list[dict[str, str]]:
    """The paragraphs: "xquad-03-1" is the second of the fourth article."""
    return [
        {"id": id, "title": title, "text": str(paragraph["context"])} for id, title, paragraph in _xquad_paragraphs()
    ]


def _xquad_tasks(split: str) -> list[Task]:
    """An article belongs to "test" or "train" as `split_of` says of its title."""
    found = []
    for id, title, paragraph in _xquad_paragraphs():
        if split_of(title) != split:
            continue
        for asked in paragraph["qas"]:
            question = " ".join(asked["question"].split())
            golds = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
            hops = [{"query": question, "passage": id}]
            metadata = {"split": split, "corpus": "xquad", "article": title, "hops": hops}
            found.append(Task(f"xquad-{asked['id']}", (user(question),), golds, metadata=metadata))
    return found


def _xquad_paragraphs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The id, the article's title and the content of each paragraph in `XQUAD`, which is in its official form."""
    path = datasets.require("xquad", XQUAD)
    try:
        for number, article in enumerate(json.loads(path.read_text(encoding="utf-8"))["data"]):
            for place, paragraph in enumerate(article["paragraphs"]):
                _ = paragraph["context"], [(q["id"], q["question"], q["answers"]) for q in paragraph["qas"]]
                yield f"xquad-{number:02}-{place}", article["title"].replace("_", " "), paragraph
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not XQuAD in its official form: {error!r}") from error
