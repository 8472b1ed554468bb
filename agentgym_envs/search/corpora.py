"""Corpora by name: passages with an id, a title and a text, each corpus read and indexed once per process.

"own" is the project's, 81 passages about a country that does not exist. "xquad" and "hotpot_qa" are the paragraphs of those
data sets. Any other name is the path of a JSON Lines file.
"""

import importlib.util
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agentgym_envs.own_tasks import own_records
from agentgym_envs.search import hotpot, xquad
from agentgym_envs.search.bm25 import Index
from agentgym_envs.search.passages import Passage, passage_of

T = TypeVar("T")

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
    return _once(_corpora, name, lambda: _checked(name, _read(name)))


def index_of(name: str) -> Index:
    """The BM25 index of a corpus; built once per process, and only read after that."""
    require_bm25s()
    return _once(_indexes, name, lambda: Index(passages_of(name)))


def require_bm25s() -> None:
    if importlib.util.find_spec("bm25s") is None:
        raise ImportError('BM25 in this process needs bm25s: pip install "agentgym-toolkit[search]"')


def corpus_lines(name: str) -> str:
    return "".join(json.dumps(passage) + "\n" for passage in passages_of(name))


def _once(cache: dict[str, T], name: str, make: Callable[[], T]) -> T:
    """The cached value; one thread makes it while the others wait."""
    if name not in cache:  # without the lock: a search must not wait while another corpus is indexed
        with _lock:
            if name not in cache:
                cache[name] = make()
    return cache[name]


def _read(name: str) -> list[Passage]:
    if name == "own":
        return list(own_records("agentgym_envs.search", "own/passages.jsonl"))
    if name == "xquad":
        return xquad.passages()
    if name == "hotpot_qa":
        return hotpot.passages()
    if name.endswith(".jsonl"):
        return _from_file(Path(name))
    raise ValueError(f'no corpus {name!r}: it is "own", "xquad", "hotpot_qa" or the path of a .jsonl file')


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


def _checked(name: str, passages: list[Passage]) -> tuple[Passage, ...]:
    if not passages:
        raise ValueError(f"the corpus {name!r} has no passages")
    seen: set[str] = set()
    for passage in passages:
        if passage["id"] in seen:
            raise ValueError(f"the corpus {name!r} has two passages with the id {passage['id']!r}")
        seen.add(passage["id"])
    return tuple(passages)
