"""Passages: what corpora hold and retrievers answer."""

import json
from collections.abc import Mapping
from typing import Any

Passage = Mapping[str, str]  # id, title, text


class Retriever:
    def search(self, query: str, topk: int) -> list[Passage]:
        """At most `topk` passages, best first."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what it holds. May be called twice."""


class RetrieverError(RuntimeError):
    """A retriever could not be reached, or its answer holds no passages."""


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


def passages_in(answer: Any, topk: int) -> list[Passage]:
    """The passages of an answer to one query: `{"result": [[{"document": {...}, "score": ...}, ...]]}`."""
    try:
        (hits,) = answer["result"]
        documents = [hit.get("document", hit) for hit in hits[:topk]]
        return [passage_of(d, str(d.get("id") or f"result-{n}")) for n, d in enumerate(documents, 1)]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise RetrieverError(
            'answered in another form than {"result": [[{"document": {"contents": ...}, "score": ...}]]}: '
            f"{error!r} in {json.dumps(answer, default=str):.300}"
        ) from error
