"""BM25 in a sandbox: one for each corpus and back end, shared by all environments of the process.

Episodes cannot touch each other, since the program keeps nothing of a query. The first environment that binds a task
makes the sandbox; the last one that closes gives it back.
"""

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from agentgym import sandbox
from agentgym.core.agent_failure import SANDBOX_SPOILED, blame
from agentgym.sandbox import Sandbox, SandboxError, SandboxSpec, Session
from agentgym_envs.search import bm25
from agentgym_envs.search.corpora import corpus_lines
from agentgym_envs.search.passages import Passage, Retriever, passages_in

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


class SandboxRetriever(Retriever):
    """A user of the shared sandbox of a corpus. `timeout` is in seconds, for one search."""

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
