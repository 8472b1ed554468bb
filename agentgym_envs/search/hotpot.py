"""HotpotQA (distractor, validation): 7,405 questions over two Wikipedia paragraphs each, 66,000 paragraphs in all.

The file is `hotpot_qa/validation.jsonl`, a row of the hub's `hotpotqa/hotpot_qa` a line: `id`, `question`, `answer`, `type`,
`supporting_facts` (`title`, `sent_id`) and `context` (`title`, `sentences`).
"""

import json
from collections.abc import Iterator
from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym_envs.data_sets import HOTPOT
from agentgym_envs.search.passages import Passage
from agentgym_envs.splits import split_of


def passages() -> list[Passage]:
    """Every paragraph that stands beside a question, each once; its id is its title."""
    found: dict[str, Passage] = {}
    for record in _records():
        context = record["context"]
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            found.setdefault(title, {"id": title, "title": title, "text": "".join(sentences).strip()})
    return list(found.values())


def tasks(split: str) -> list[Task]:
    """The questions of a split. A question belongs to "test" or "train" as `splits.split_of` says of its id."""
    return [_task(record, split) for record in _records() if split_of(record["id"]) == split]


def _task(record: dict[str, Any], split: str) -> Task:
    titles = dict.fromkeys(record["supporting_facts"]["title"])
    hops = [{"query": title, "passage": title} for title in titles]
    metadata = {"split": split, "corpus": "hotpot_qa", "type": record.get("type", ""), "hops": hops}
    if record.get("type"):
        metadata["tags"] = [record["type"]]
    if record.get("level"):
        metadata["difficulty"] = record["level"]
    return Task(f"hotpot-{record['id']}", (user(record["question"]),), [record["answer"]], metadata=metadata)


def _records() -> Iterator[dict[str, Any]]:
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
