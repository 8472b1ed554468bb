"""Retrievers: BM25 in this process, the same program in a sandbox, or any server that speaks the usual form.

A retriever that fails raises, and so fails the episode: a question that could not be looked up is no wrong answer.
"""

import http.client
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from agentgym import sandbox
from agentgym.core.agent_failure import SANDBOX_SPOILED, blame
from agentgym.sandbox import Sandbox, SandboxError, SandboxSpec, Session
from agentgym_envs.search import bm25
from agentgym_envs.search.corpora import Passage, corpus_lines, index_of, passage_of

WAITS = (0.25, 0.5)  # seconds before the second and the third attempt
LONGEST_ANSWER = 16 << 20  # bytes
BUSY = (429, 500, 502, 503, 504)
PROGRAM, CORPUS = "/private/bm25.py", "/private/corpus.jsonl"
ACQUIRE_SECONDS = 30.0  # for the sandbox,
BUILD_SECONDS = 80.0  # and for the index in it: together less than `init` may take
MEMORY = 1 << 30  # bytes

_log = logging.getLogger("agentgym.search")
_lock = threading.Lock()
_services: "dict[tuple[str, str | None], _Service]" = {}


def _begin_anew() -> None:
    global _lock, _services
    _lock, _services = threading.Lock(), {}


os.register_at_fork(after_in_child=_begin_anew)


class Retriever:
    def search(self, query: str, topk: int) -> list[Passage]:
        """At most `topk` passages, best first."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what it holds. May be called twice."""


class RetrieverError(RuntimeError):
    """A retriever could not be reached, or its answer holds no passages."""


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
        self.index = index_of(corpus)

    def search(self, query: str, topk: int) -> list[Passage]:
        return [passage for passage, _ in self.index.search(query, topk)]


class HttpRetriever(Retriever):
    """Any server that answers `POST {"queries": [query], "topk": k, "return_scores": true}` at a URL with its path.

    One that does not answer within `timeout` seconds, refuses the connection, or is busy (429, 5xx) is asked thrice.
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
        for wait in (0.0, *WAITS):
            time.sleep(wait)
            try:
                return self._ask(body)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY:
                    raise RetrieverError(f"answered {error.code}: {error.read(300)!r}") from error
                problem = f"answered {error.code}"
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                problem = f"cannot be reached: {getattr(error, 'reason', error)!r}"
        raise RetrieverError(f"{problem} (asked {1 + len(WAITS)} times, {self._timeout:g} s each at most)")

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


class SandboxRetriever(Retriever):
    """BM25 in a sandbox, one for each corpus and back end, which all environments of the process share.

    Episodes cannot touch each other, since the program keeps nothing of a query. The first environment that binds a
    task makes the sandbox; the last one that closes gives it back. `timeout` is in seconds, for one search.
    """

    def __init__(self, corpus: str, timeout: float, backend: str | None):
        self._timeout = timeout
        self._key = (corpus, backend)
        self._open = True
        with _lock:
            self._service = _services.setdefault(self._key, _Service(corpus, backend))
            self._service.users += 1
        try:
            self._service.ask({"queries": [], "topk": 1}, timeout)
        except BaseException:
            self.close()
            raise

    def search(self, query: str, topk: int) -> list[Passage]:
        return passages_in(self._service.ask({"queries": [query], "topk": topk}, self._timeout), topk)

    def close(self) -> None:
        with _lock:
            if not self._open:
                return
            self._open = False
            self._service.users -= 1
            if self._service.users:
                return
            if _services.get(self._key) is self._service:
                del _services[self._key]
        self._service.close()


class _Service:
    """The program in its sandbox. `users` belongs to the module's lock, everything else to its own."""

    def __init__(self, corpus: str, backend: str | None):
        self.users = 0
        self._corpus = corpus
        self._backend = backend
        self._lock = threading.Lock()
        self._box: Sandbox | None = None
        self._session: Session | None = None

    def ask(self, request: dict[str, Any], timeout: float) -> Any:
        """The program's answer. A sandbox that fails is replaced once, since a search changes nothing."""
        with self._lock:
            try:
                return self._ask(request, timeout)
            except SandboxError as error:
                _log.warning("search in a sandbox failed, trying a fresh one: %s", error)
            return self._ask(request, timeout)

    def close(self) -> None:
        with self._lock:
            self._discard()

    def _ask(self, request: dict[str, Any], timeout: float) -> Any:
        try:
            if self._session is None:
                self._start()
            return _exchange(self._session, request, timeout)
        except SandboxError:
            self._discard()
            raise

    def _start(self) -> None:
        self._box = sandbox.acquire(SandboxSpec(image="search", memory=MEMORY), self._backend, ACQUIRE_SECONDS)
        self._box.write(PROGRAM, Path(bm25.__file__).read_bytes())
        self._box.write(CORPUS, corpus_lines(self._corpus))
        self._session = self._box.session(["python3", "-I", PROGRAM, CORPUS])
        _exchange(self._session, {"queries": [], "topk": 1}, BUILD_SECONDS)

    def _discard(self) -> None:
        box, self._box, self._session = self._box, None, None
        if box is not None:
            box.close()


def _exchange(session: Session | None, request: dict[str, Any], timeout: float) -> Any:
    if session is None or not session.alive:
        raise SandboxError("the search program is not running")
    done = session.run(json.dumps(request), timeout=timeout)
    if done.timed_out:
        raise SandboxError(f"the search program did not answer within {timeout:g} s")
    if done.exit_code is not None or not done.reply:
        why = "ran out of memory" if done.oom_killed else f"ended with exit code {done.exit_code}"
        error = SandboxError(
            f"the search program {why}: {done.stderr.strip()[-500:] or 'no message'}"
            ' (it needs numpy and bm25s: "agentgym sandbox build search" makes an image that has them)'
        )
        if request["queries"]:  # it had answered before: where it ends twice, the query does it
            blame(error, lambda: SANDBOX_SPOILED)
        raise error
    return json.loads(done.reply)
