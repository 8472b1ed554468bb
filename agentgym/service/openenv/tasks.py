"""OpenEnv's Task API: which splits and tasks the served environments have."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from agentgym.service.openenv.play import whole_number
from agentgym.service.server.bodies import body_of

Json = dict[str, Any]
MOST_LISTED = 1_000  # tasks that one answer holds; `num_tasks` tells how many there are
_KINDS = ("train", "validation", "test")


class TaskRoutes:
    """The handlers of the Task API. `ask` is `EnvServer.ask_tasks`."""

    def __init__(self, envs: list[str], ask: Callable[[Json], Awaitable[Any]]):
        self._envs = envs
        self._ask = ask

    async def splits(self, request: web.Request) -> web.Response:
        names = await self._ask({"env": self._env(request)})
        return web.json_response([{"name": n, "type": n if n in _KINDS else "validation"} for n in names])

    async def list_tasks(self, request: web.Request) -> web.Response:
        """The first `MOST_LISTED` of a split."""
        env, _, page = await self._asked(request, (), 0, MOST_LISTED)
        return web.json_response({"tasks": page["tasks"], "env_name": env})

    async def num_tasks(self, request: web.Request) -> web.Response:
        _, _, page = await self._asked(request, (), 0, 0)
        return web.json_response({"num_tasks": page["size"]})

    async def task(self, request: web.Request) -> web.Response:
        env, body, page = await self._asked(request, ("index",), 0, 0)
        index = whole_number(body.get("index"))
        if index is None:
            raise invalid("int_type", "index", body.get("index"))
        if not 0 <= index < page["size"]:
            return answered(400, "Invalid task index")
        page = await self._ask({"env": env, "split": body["split"], "start": index, "stop": index + 1})
        return web.json_response({"task": page["tasks"][0]})

    async def task_range(self, request: web.Request) -> web.Response:
        """At most `MOST_LISTED`, counted from `start`."""
        env, body, page = await self._asked(request, ("start", "stop"), 0, 0)
        ends = {name: whole_number(body.get(name)) for name in ("start", "stop")}
        for name, end in ends.items():
            if end is None and body.get(name) is not None:
                raise invalid("int_type", name, body.get(name))
        start, stop, _ = slice(ends["start"], ends["stop"]).indices(page["size"])
        stop = max(start, min(stop, start + MOST_LISTED))
        page = await self._ask({"env": env, "split": body["split"], "start": start, "stop": stop})
        return web.json_response({"tasks": page["tasks"]})

    def _env(self, request: web.Request) -> str:
        name = request.match_info["env_name"]
        if found := [env for env in self._envs if env.lower() == name.lower()]:
            return found[0]
        raise _json_error(web.HTTPNotFound, f"unknown environment {name!r}")

    async def _asked(
        self, request: web.Request, others: tuple[str, ...], start: int, stop: int
    ) -> tuple[str, Json, Json]:
        """The environment that a request names, its body, and a page of the split that it names."""
        env = self._env(request)
        body = await object_of(request)
        split = body.get("split")
        if unknown := body.keys() - {"split", *others}:
            raise invalid("extra_forbidden", min(unknown), body)
        if not isinstance(split, str):
            raise invalid("string_type", "split", split)
        return env, body, await self._ask({"env": env, "split": split, "start": start, "stop": stop})


async def object_of(request: web.Request) -> Json:
    """The body of a request, an object; {} if it is empty. Raises 422 otherwise."""
    text = await body_of(request)  # not decoded as its header says: with some encodings that takes hours
    try:
        body = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid("json_invalid", "", str(error)) from error
    if not isinstance(body, dict):
        raise invalid("dict_type", "", body)
    return body


def invalid(kind: str, field: str, given: Any) -> web.HTTPException:
    """The error for a request with an invalid field, or body if `field` is ""."""
    loc = ["body", field] if field else ["body"]
    problem = {"type": kind, "loc": loc, "msg": kind.replace("_", " "), "input": given}
    return _json_error(web.HTTPUnprocessableEntity, [problem])


def answered(status: int, detail: Any) -> web.Response:
    """An error in OpenEnv's form."""
    return web.json_response({"detail": detail}, status=status)


def _json_error(kind: type[web.HTTPException], detail: Any) -> web.HTTPException:
    return kind(text=json.dumps({"detail": detail}), content_type="application/json")
