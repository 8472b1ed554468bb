"""XQuAD in English: 240 paragraphs of 48 Wikipedia articles, and 1,190 questions that one paragraph each answers.

Paragraphs and questions are those of SQuAD 1.1's development set. The file is `xquad/xquad.en.json` in its official form.
"""

import json
from collections.abc import Iterator
from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym_envs.data_sets import XQUAD
from agentgym_envs.search.passages import Passage
from agentgym_envs.splits import split_of


def passages() -> list[Passage]:
    """The paragraphs: "xquad-03-1" is the second of the fourth article."""
    return [
        {"id": id, "title": title, "text": str(paragraph["context"])} for id, title, paragraph in _paragraphs(_read())
    ]


def tasks(split: str) -> list[Task]:
    """The questions of a split. An article belongs to "test" or "train" as `splits.split_of` says of its title."""
    found = []
    for id, title, paragraph in _paragraphs(_read()):
        if split_of(title) != split:
            continue
        for asked in paragraph["qas"]:
            question = " ".join(asked["question"].split())
            golds = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
            hops = [{"query": question, "passage": id}]
            metadata = {"split": split, "corpus": "xquad", "article": title, "hops": hops}
            found.append(Task(f"xquad-{asked['id']}", (user(question),), golds, metadata=metadata))
    return found


def _read() -> list[dict[str, Any]]:
    path = datasets.require("xquad", XQUAD)
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        for _, _, paragraph in _paragraphs(articles):
            _ = paragraph["context"], [(asked["id"], asked["question"], asked["answers"]) for asked in paragraph["qas"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not XQuAD in its official form: {error!r}") from error
    return articles


def _paragraphs(articles: list[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for number, article in enumerate(articles):
        for place, paragraph in enumerate(article["paragraphs"]):
            yield f"xquad-{number:02}-{place}", article["title"].replace("_", " "), paragraph
