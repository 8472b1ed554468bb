"""Retrievers: BM25 in this process, the same program in a sandbox, or any server that speaks the usual form.

A retriever that fails raises, and so fails the episode: a question that could not be looked up is no wrong answer.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from agentgym_envs.search.corpora import index_of
from agentgym_envs.search.passages import Passage, Retriever, RetrieverError, passages_in
from agentgym_envs.search.sandboxed import SandboxRetriever

ATTEMPTS = 3
FIRST_WAIT = 0.25  # seconds before the second attempt; doubled before the third
LONGEST_ANSWER = 16 << 20  # bytes
BUSY = (429, 500, 502, 503, 504)


def open_retriever(kind: str, corpus: str | None, timeout: float, backend: str | None) -> Retriever:
    """A retriever by its name: "bm25", "sandbox", or the URL of a server, which has its own corpus."""
    check_kind(kind)
    if kind not in ("bm25", "sandbox"):
        return HttpRetriever(kind, timeout)
    if corpus is None:
        raise ValueError('the task names no corpus: give corpus= to the environment, or metadata={"corpus": ...}')
    return LocalRetriever(corpus) if kind == "bm25" else SandboxRetriever(corpus, timeout, backend)


def check_kind(kind: str) -> None:
    if kind not in ("bm25", "sandbox") and not kind.startswith(("http://", "https://")):
        raise ValueError(f'retriever must be "bm25", "sandbox" or a URL that begins with http, not {kind!r}')


class LocalRetriever(Retriever):
    """BM25 in this process: one index for all environments."""

    def __init__(self, corpus: str):
        self._index = index_of(corpus)

    def search(self, query: str, topk: int) -> list[Passage]:
        return [passage for passage, _ in self._index.search(query, topk)]


class HttpRetriever(Retriever):
    """Any server that answers `POST {"queries": [query], "topk": k, "return_scores": true}`.

    A server that does not answer in time, refuses the connection, or is busy (429, 5xx) is asked `ATTEMPTS` times.

    Args:
        url: where to post, with its path: "http://localhost:8000/retrieve".
        timeout: seconds that each attempt may take.
    """

    def __init__(self, url: str, timeout: float):
        self._url = url
        self._timeout = timeout

    def search(self, query: str, topk: int) -> list[Passage]:
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        try:
            return passages_in(self._asked(body), topk)
        except RetrieverError as error:
            raise RetrieverError(f"the retriever {self._url} {error}") from error

    def _asked(self, body: bytes) -> Any:
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._ask(body)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY:
                    raise RetrieverError(f"answered {error.code}: {error.read(300)!r}") from error
                problem = f"answered {error.code}"
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                problem = f"cannot be reached: {getattr(error, 'reason', error)!r}"
            if attempt < ATTEMPTS:
                time.sleep(wait)
                wait *= 2
        raise RetrieverError(f"{problem} (asked {ATTEMPTS} times, {self._timeout:g} s each at most)")

    def _ask(self, body: bytes) -> Any:
        """One attempt. The limit of the socket is for each piece; the clock is for all of them."""
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + self._timeout
        parts: list[bytes] = []
        size = 0
        with urllib.request.urlopen(request, timeout=self._timeout) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > LONGEST_ANSWER:
                    raise RetrieverError(f"answered more than {LONGEST_ANSWER >> 20} MB")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"took longer than {self._timeout:g} s")
            if answer.length:  # read1 takes an early end for the end
                raise http.client.IncompleteRead(b"", answer.length)
        try:
            return json.loads(b"".join(parts))
        except ValueError as error:
            raise RetrieverError(f"answered no JSON: {b''.join(parts)[:200]!r}") from error
