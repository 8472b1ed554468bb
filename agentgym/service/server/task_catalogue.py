"""Tasks of the served environments, read in a separate process: environment code may hang or crash."""

import contextlib
import json
import socket
from typing import Any

from agentgym.core.registration import EnvSpec, parameters
from agentgym.core.tasks import TaskSet
from agentgym.service.protocol.frames import METHODS
from agentgym.service.protocol.sandbox_frames import SERVED
from agentgym.storage.jsonl import line_of

SPLITS = ("train", "validation", "test")
PAGE = 1000


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
            except Exception as error:
                told = {"error": f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
            lines.write(line_of(told))
            lines.flush()


def _answer(asked: dict[str, Any], specs: dict[str, EnvSpec], tasks_of: Any) -> dict[str, Any]:
    if "sandboxes" in asked:
        from agentgym.sandbox.served import told

        return told(specs[SERVED].kwargs, asked["sandboxes"])
    if "about" in asked:
        return _about(specs[asked["env"]])
    return _page(asked, tasks_of) if "split" in asked else _splits(asked["env"], tasks_of)


def _about(spec: EnvSpec) -> dict[str, Any]:
    from agentgym.core.env import close_unused  # it imports Gymnasium, which the server itself does without

    try:
        env: Any = spec.make()
    except Exception as error:  # so does every session; the list has the other environments
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    facts = facts_of(spec, env)
    close_unused(env)
    return facts


def facts_of(spec: EnvSpec, env: Any) -> dict[str, Any]:
    """The facts by which a client stands in for an environment."""
    return {
        "tools": list(env.get_wrapper_attr("tools")),
        "methods": [name for name in METHODS if env.has_wrapper_attr(name)],
        "max_turns": getattr(env.unwrapped, "max_turns", None),
        "kwargs": _made_with(spec),
    }


def _made_with(spec: EnvSpec) -> dict[str, Any]:
    """All arguments of an environment, defaults included, except defaults that are not JSON."""
    made_with = {}
    for parameter in parameters(spec.load())[0]:
        if parameter.default is not parameter.empty:
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(parameter.default)
                made_with[parameter.name] = parameter.default
    return {name: value for name, value in {**made_with, **spec.kwargs}.items() if name not in ("tasks", "render_mode")}


def _page(asked: dict[str, Any], tasks_of: Any) -> dict[str, Any]:
    found = tasks_of(asked["env"], asked["split"])
    size, start = len(found), asked["start"]
    stop = min(size, start + PAGE, size if asked["stop"] is None else asked["stop"])
    return {
        "split": asked["split"],
        "start": start,
        "stop": max(start, stop),
        "tasks": [found[index].to_json() for index in range(start, stop)],
        **_described(found),
    }


def _splits(id: str, tasks_of: Any) -> dict[str, Any]:
    splits = {}
    for split in SPLITS:
        with contextlib.suppress(Exception):  # no such split, or its data are not here
            splits[split] = _described(tasks_of(id, split))
    return splits


def _described(found: TaskSet) -> dict[str, Any]:
    return {"size": len(found), "name": found.name, "source": found.source}
