"""A BM25 index over passages. The environment imports this file, and a sandbox runs it as a program.

So it uses only the standard library, numpy and bm25s. The program takes the path of a corpus (JSON Lines: `id`,
`title`, `text`), reads framed requests from standard input and answers each on file descriptor 3; see `answer`.

Scores are Lucene's BM25 with k1 = 1.5, b = 0.75: the sum over the query's words t of log(1 + (N - n_t + 0.5) / (n_t +
0.5)) * f / (f + k1 * (1 - b + b * length / mean length)), where n_t of N passages contain t, and f is t's frequency in
the passage. Ties are ordered by id.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

K1, B = 1.5, 0.75
REPLY = 3  # the file descriptor of replies
_WORD = re.compile(r"\w+")
_STOP_WORDS = """a an and are as at be been but by can did do does for from had has have he her his how i in into is it its me my
no not of on or our s she so such t than that the their them then there these they this to was we were what when where which
who whom whose why will with would you your"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def words_of(text: str) -> list[str]:
    """The indexed words of a text: runs of letters and digits in lower case, without stop words."""
    return [word for word in _WORD.findall(text.casefold()) if word not in STOP_WORDS]


class Index:
    """A BM25 index, read-only once built, so many threads may search it."""

    def __init__(self, passages: Sequence[Mapping[str, str]]):
        import bm25s  # imported here: it takes most of a second where numba is installed

        # Sorted by id, so a stable sort orders equal scores by id.
        self.passages = sorted(passages, key=lambda passage: passage["id"])
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary.setdefault
        numbers = [
            [number(word, len(self._vocabulary)) for word in words_of(f"{p['title']} {p['text']}")]
            for p in self.passages
        ]
        if not self._vocabulary:
            raise ValueError(f"a corpus of {len(self.passages)} passages has no words to index")
        self.bm25 = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        self.bm25.index((numbers, dict(self._vocabulary)), create_empty_token=False, show_progress=False)

    def search(self, query: str, topk: int) -> list[tuple[Mapping[str, str], float]]:
        """At most `topk` passages that share a word with the query, best first, with their scores (float32)."""
        import numpy as np

        wanted = [self._vocabulary[word] for word in words_of(query) if word in self._vocabulary]
        if not wanted or topk < 1:
            return []
        scores = self.bm25.get_scores_from_ids(wanted)
        found = np.flatnonzero(scores > 0)
        if len(found) > topk:
            # Keep all passages that tie with the last one: a partition alone would choose among them arbitrarily.
            last = np.partition(scores[found], -topk)[-topk]
            found = found[scores[found] >= last]
        best = found[np.argsort(-scores[found], kind="stable")][:topk]
        return [(self.passages[place], float(scores[place])) for place in best]


def answer(index: Index, request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to `{"queries": [...], "topk": k}`: for each query its documents with scores."""

    def document(passage: Mapping[str, str]) -> dict[str, str]:
        kept = {name: passage[name] for name in ("id", "title", "text")}
        return {**kept, "contents": f'"{passage["title"]}"\n{passage["text"]}'}

    found = (index.search(query, request["topk"]) for query in request["queries"])
    return {"result": [[{"document": document(p), "score": score} for p, score in hits] for hits in found]}


def serve(index: Index, requests: BinaryIO, replies: BinaryIO) -> None:
    while header := requests.read(4):
        reply = json.dumps(answer(index, json.loads(requests.read(int.from_bytes(header, "big"))))).encode()
        replies.write(len(reply).to_bytes(4, "big") + reply)
        replies.flush()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as corpus:
        passages = [json.loads(line) for line in corpus]
    serve(Index(passages), sys.stdin.buffer, os.fdopen(REPLY, "wb"))
