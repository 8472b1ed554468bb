"""Corpora by name, each read and indexed once per process, and the questions that they answer.

"own" is the project's, 81 passages about a country that does not exist; "xquad" and "hotpot_qa" are the paragraphs of
those data sets. Any other name is the path of a JSON Lines file.

A task's `answer` is the list of its gold answers. `metadata["corpus"]` names the corpus that answers it, and
`metadata["hops"]` is a chain of searches that leads there: a query and the id of its passage each.
"""

import importlib.util
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agentgym import datasets
from agentgym.core.install import pip_install
from agentgym.core.messages import text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.data_sets import HOTPOT, XQUAD
from agentgym_envs.search.bm25 import Index
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split, own_records, own_tasks, split_of

DATA = ("auto", "own", "xquad", "hotpot_qa")
T = TypeVar("T")
Passage = Mapping[str, str]  # id, title, text

_lock = threading.RLock()
_corpora: dict[str, tuple[Passage, ...]] = {}
_indexes: dict[str, Index] = {}


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it for ever
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def passages_of(name: str) -> tuple[Passage, ...]:
    """The passages of a corpus; a file's lines have `id`, and either `title` and `text` or `contents` (title first)."""
    return _once(_corpora, name, lambda: _read(name))


def index_of(name: str) -> Index:
    require_bm25s()
    return _once(_indexes, name, lambda: Index(passages_of(name)))


def require_bm25s() -> None:
    if importlib.util.find_spec("bm25s") is None:
        raise ImportError(f"BM25 in this process needs bm25s: {pip_install('agentgym-toolkit[search]')}")


def corpus_lines(name: str) -> str:
    return "".join(json.dumps(passage) + "\n" for passage in passages_of(name))


def passage_of(record: Mapping[str, Any], id: str) -> Passage:
    """A passage from a document that has `title` and `text`, or `contents` with the title in its first line."""
    title, text = record.get("title"), record.get("text")
    if isinstance(record.get("contents"), str) and not isinstance(text, str):
        first, _, rest = record["contents"].partition("\n")
        # Where there is one line only, it is the text.
        title, text = (first.strip().strip('"'), rest) if rest.strip() else (title or "", first)
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise ValueError(f"neither title and text nor contents in {dict(record)!r:.200}")
    return {"id": id, "title": title or "", "text": text.strip()}


def _once(cache: dict[str, T], name: str, make: Callable[[], T]) -> T:
    """The cached value; one thread makes it while the others wait."""
    if name not in cache:  # without the lock: a search must not wait while another corpus is indexed
        with _lock:
            if name not in cache:
                cache[name] = make()
    return cache[name]


def _read(name: str) -> tuple[Passage, ...]:
    if name == "own":
        passages: list[Passage] = [*own_records("agentgym_envs.search", "own/passages.jsonl")]
    elif name == "xquad":
        passages = _xquad_passages()
    elif name == "hotpot_qa":
        passages = _hotpot_passages()
    elif name.endswith(".jsonl"):
        passages = _from_file(Path(name))
    else:
        raise ValueError(f'no corpus {name!r}: it is "own", "xquad", "hotpot_qa" or the path of a .jsonl file')
    if not passages:
        raise ValueError(f"the corpus {name!r} has no passages")
    id, times = Counter(passage["id"] for passage in passages).most_common(1)[0]
    if times > 1:
        raise ValueError(f"the corpus {name!r} has two passages with the id {id!r}")
    return tuple(passages)


def _from_file(path: Path) -> list[Passage]:
    if not path.is_file():
        raise FileNotFoundError(f"the corpus {path} is no file: name a JSON Lines file of passages")
    passages = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                passages.append(passage_of(record, str(record["id"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: not a passage, which has an id, and a title and a text or contents: {error!r}"
                ) from error
    return passages


# ---- questions


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


def _hotpot_passages() -> list[Passage]:
    """Every paragraph that stands beside a question, each once; its id is its title."""
    found: dict[str, Passage] = {}
    for record in _hotpot_records():
        context = record["context"]
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            found.setdefault(title, {"id": title, "title": title, "text": "".join(sentences).strip()})
    return list(found.values())


def _hotpot_tasks(split: str) -> list[Task]:
    """A question belongs to "test" or "train" as `split_of` says of its id."""
    found = []
    for record in _hotpot_records():
        if split_of(record["id"]) != split:
            continue
        hops = [{"query": title, "passage": title} for title in dict.fromkeys(record["supporting_facts"]["title"])]
        metadata = {"split": split, "corpus": "hotpot_qa", "type": record.get("type", ""), "hops": hops}
        if record.get("type"):
            metadata["tags"] = [record["type"]]
        if record.get("level"):
            metadata["difficulty"] = record["level"]
        asked = (user(record["question"]),)
        found.append(Task(f"hotpot-{record['id']}", asked, [record["answer"]], metadata=metadata))
    return found


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


def _xquad_passages() -> list[Passage]:
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
