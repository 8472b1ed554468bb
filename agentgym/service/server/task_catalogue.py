"""Tasks of the served environments, read in a separate process: environment code may hang or crash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from agentgym.core.registration import EnvSpec, parameters
from agentgym.core.tasks import TaskSet
from agentgym.core.tracebacks import text_of_error
from agentgym.service.protocol.frames import METHODS
from agentgym.service.protocol.sandbox_frames import SERVED
from agentgym.storage.jsonl import line_of

if TYPE_CHECKING:  # which starts this process
    from agentgym.service.server.forks import Forks

SPLITS = ("train", "validation", "test")
PAGE = 1000
SECONDS = 60.0
_LIMIT = 1 << 30  # bytes of a page


def tell_tasks(server: socket.socket, specs: dict[str, EnvSpec], tasks: dict[str, TaskSet]) -> None:
    """Answer questions, a JSON object a line, until the server closes, with {"result": ...} or {"error": ...}.

    {"env", "split", "start", "stop"} asks for a page of tasks, {"env"} for the splits, {"env", "about"} for tools and
    methods, {"sandboxes": image} for the sandboxes and whether they have this image.
    """
    sets = {(id, "train"): found for id, found in tasks.items()}

    def tasks_of(id: str, split: str) -> TaskSet:
        if (id, split) not in sets:
            sets[id, split] = specs[id].tasks(split)
        return sets[id, split]

    # The server may close while an answer is on its way.
    with contextlib.suppress(ConnectionError), server.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            asked = json.loads(line)
            try:
                told: dict[str, Any] = {"result": _answer(asked, specs, tasks_of)}
            except BaseException as error:  # an environment may raise anything, and the next question is another's
                said = text_of_error(error)
                told = {"error": said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"}
            lines.write(line_of(told))
            lines.flush()


def _answer(asked: dict[str, Any], specs: dict[str, EnvSpec], tasks_of: Any) -> dict[str, Any]:
    if "sandboxes" in asked:
        from agentgym.sandbox.served import told

        return told(specs[SERVED].kwargs, asked["sandboxes"])
    id = asked["env"]
    if "about" in asked:
        return _about(specs[id])
    if "split" in asked:
        found = tasks_of(id, asked["split"])
        size, start = len(found), asked["start"]
        stop = min(size, start + PAGE, size if asked["stop"] is None else asked["stop"])
        page = {"split": asked["split"], "start": start, "stop": max(start, stop)}
        return {**page, "tasks": [found[index].to_json() for index in range(start, stop)], **_described(found)}
    splits = {}
    for split in SPLITS:
        with contextlib.suppress(Exception):  # no such split, or its data are not here
            splits[split] = _described(tasks_of(id, split))
    return splits


def _about(spec: EnvSpec) -> dict[str, Any]:
    from agentgym.core.env import close_unused  # it imports Gymnasium, which the server itself does without

    try:
        env: Any = spec.make()
        facts = facts_of(spec, env)
    except BaseException as error:  # so does every session; the list has the other environments
        return {"error": f"{type(error).__name__}: {text_of_error(error)}"[:2000]}
    with contextlib.suppress(BaseException):  # it may close only what `init` makes, and sessions do not mind either
        close_unused(env)
    return facts


def facts_of(spec: EnvSpec, env: Any) -> dict[str, Any]:
    """The facts by which a client stands in for an environment. `kwargs` are all its arguments that are JSON."""
    made_with = {}
    for parameter in parameters(spec.load())[0]:
        if parameter.default is not parameter.empty:
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(parameter.default)
                made_with[parameter.name] = parameter.default
    made_with |= spec.kwargs
    return {
        "tools": list(env.get_wrapper_attr("tools")),
        "methods": [name for name in METHODS if env.has_wrapper_attr(name)],
        "max_turns": getattr(env.unwrapped, "max_turns", None),
        "kwargs": {name: value for name, value in made_with.items() if name not in ("tasks", "render_mode")},
    }


def _described(found: TaskSet) -> dict[str, Any]:
    return {"size": len(found), "name": found.name, "source": found.source}


class Listing:
    """The server's side: asks one question at a time. A process that takes too long is killed, and another started."""

    def __init__(self, forks: Forks):
        self._forks = forks
        self._key = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()

    async def ask(self, question: dict[str, Any]) -> Any:
        """The answer of `tell_tasks`. Raises LookupError for its errors, or OSError."""
        async with self._asking:
            try:
                async with asyncio.timeout(SECONDS):
                    reader, writer = await self._opened()
                    writer.write(line_of(question).encode())
                    await writer.drain()
                    line = await reader.readline()
                if not line:
                    raise ConnectionError("the process that reads tasks died")
            except BaseException:
                self.close()
                raise
        answer = json.loads(line)
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer["result"]

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():  # it has died since, with the zygote maybe
            self.close()
        if self._streams is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._streams = await asyncio.open_connection(sock=ours, limit=_LIMIT)
                self._key = self._forks.fork("tasks", {}, [theirs.detach()])
        return self._streams

    async def rest(self) -> None:
        """End the process until the next question, to free its memory."""
        async with self._asking:
            if self._streams is not None:
                self._streams[1].close()  # the process waits for a question, and ends
                self._streams = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
            self._forks.kill(self._key)
