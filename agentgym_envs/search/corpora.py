"""Corpora by name: passages with an id, a title and a text, each corpus read and indexed once per process.

"own" is the project's, 81 passages about a country that does not exist. "xquad" and "hotpot_qa" are the paragraphs of those
data sets. Any other name is the path of a JSON Lines file.
"""

import importlib.util
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agentgym_envs.search.bm25 import Index
from agentgym_envs.search.questions import hotpot_passages, xquad_passages
from agentgym_envs.splits import own_records

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
    """The passages of a corpus; read once per process.

    Args:
        name: "own", "xquad", "hotpot_qa", or a path ending in ".jsonl", whose lines are objects with `id`, and either `title`
            and `text` or `contents`, whose first line is then the title.
    """
    return _once(_corpora, name, lambda: _read(name))


def index_of(name: str) -> Index:
    """The BM25 index of a corpus; built once per process, and only read after that."""
    require_bm25s()
    return _once(_indexes, name, lambda: Index(passages_of(name)))


def require_bm25s() -> None:
    if importlib.util.find_spec("bm25s") is None:
        raise ImportError('BM25 in this process needs bm25s: pip install "agentgym-toolkit[search]"')


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
        passages = [*xquad_passages()]
    elif name == "hotpot_qa":
        passages = [*hotpot_passages()]
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
