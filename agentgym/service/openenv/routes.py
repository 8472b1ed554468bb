"""OpenEnv's routes on our server: for the first environment at the root, and for each under its id.

HTTP requests become frames of a session that the server itself talks to, which /reset and /step take for one request.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentgym.service.openenv import schemas
from agentgym.service.openenv.handler import error_frame
from agentgym.service.openenv.mcp import NAME, McpRoutes, counts, open_line, told
from agentgym.service.openenv.play import whole_number
from agentgym.service.protocol.frames import Refused
from agentgym.service.server.http_connections import body_of

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

Json = dict[str, Any]
MOST_LISTED = 1_000  # tasks that one answer holds; `num_tasks` tells how many there are
_SPLIT_TYPES = ("train", "validation", "test")
PATHS: Mapping[str, tuple[str, str]] = {
    "/reset": ("post", "begin an episode and show its opening"),
    "/step": ("post", "play an episode of one step"),
    "/state": ("get", "the state of an environment that was not reset"),
    "/health": ("get", "whether the server is well"),
    "/metadata": ("get", "name and description"),
    "/schema": ("get", "JSON schemas of actions, observations and states"),
    "/mcp": ("post", "JSON-RPC: tools/list, tools/call, openenv/session/create, openenv/session/close"),
    "/list_environments": ("get", "the names that the task routes take"),
    "/{env_name}/splits": ("get", "the splits of the tasks"),
    "/{env_name}/tasks": ("post", "tasks of a split"),
    "/{env_name}/num_tasks": ("post", "how many tasks a split has"),
    "/{env_name}/task": ("post", "one task"),
    "/{env_name}/task_range": ("post", "tasks from start up to stop"),
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, server: EnvServer) -> None:
    envs = list(server.settings.envs)
    for env, listed, prefix in [(envs[0], envs, ""), *((env, [env], f"/{env}") for env in envs)]:
        app.router.add_routes(OpenEnvRoutes(server, env, listed, prefix).routes(app))


class OpenEnvRoutes:
    """OpenEnv's routes for one environment; `listed` are those whose tasks are told."""

    def __init__(self, server: EnvServer, env: str, listed: list[str], prefix: str):
        self.env = env
        self.prefix = prefix
        self._server = server
        self._listed = listed
        self._mcp = McpRoutes(server, env)

    def routes(self, app: web.Application) -> list[web.RouteDef]:
        app.on_shutdown.append(self._mcp.close)
        handlers: dict[str, Handler] = {
            "/reset": self.reset,
            "/step": self.step,
            "/state": _telling(schemas.FRESH_STATE),  # of sessions it is told over WebSockets
            "/metadata": _telling(schemas.metadata_of(self._server.settings.envs[self.env])),
            "/schema": _telling(schemas.SCHEMAS),
            "/mcp": self._mcp.answer,
            "/list_environments": _telling(self._listed),
            "/{env_name}/splits": self.splits,
            "/{env_name}/tasks": self.list_tasks,
            "/{env_name}/num_tasks": self.num_tasks,
            "/{env_name}/task": self.task,
            "/{env_name}/task_range": self.task_range,
        }
        if self.prefix:  # else it is the server's own
            handlers["/health"] = _telling({"status": "healthy"})
        openapi = schemas.openapi_of(f"OpenEnv interface of {self.env}", PATHS)
        routes = [web.get(f"{self.prefix}/ws", self.socket), web.get(f"{self.prefix}/openapi.json", _telling(openapi))]
        for path, handler in handlers.items():
            method = "*" if path == "/mcp" else PATHS[path][0]
            routes.append(web.route(method, self.prefix + path.replace("{env_name}", "{env_name:.+}"), handler))
        return routes

    async def reset(self, request: web.Request) -> web.Response:
        """`POST /reset`: the first observation of an episode, which ends at once."""
        body = await object_of(request)
        with contextlib.closing(open_line(self._server, request, self.env)) as line:
            return _http(await line.ask(json.dumps({"type": "reset", "data": body})))

    async def step(self, request: web.Request) -> web.Response:
        """`POST /step`: an episode of one step. Arguments of `reset` may stand beside the action."""
        body = await object_of(request)
        action = body.pop("action", None)
        if not isinstance(action, dict):
            raise invalid("missing" if action is None else "dict_type", "action", action)
        with contextlib.closing(open_line(self._server, request, self.env)) as line:
            begun = await line.ask(json.dumps({"type": "reset", "data": body}))
            if json.loads(begun).get("type") != "observation":
                return _http(begun)
            return _http(await line.ask(json.dumps({"type": "step", "data": action})))

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`WS /ws`: a new session, or with `?session_id=` one that was made over HTTP."""
        if request.query.get("session_id"):
            return await self._mcp.attached(request)
        try:
            return await self._server.open_session(request, self.env, NAME)
        except Refused as refused:
            return await told(request, error_frame("CAPACITY_REACHED", str(refused), **counts(self._server)))

    async def splits(self, request: web.Request) -> web.Response:
        names = await self._server.ask_tasks({"env": self._env(request)})
        return web.json_response([{"name": n, "type": n if n in _SPLIT_TYPES else "validation"} for n in names])

    async def list_tasks(self, request: web.Request) -> web.Response:
        """The first `MOST_LISTED` of a split."""
        env, _, page = await self._asked(request, stop=MOST_LISTED)
        return web.json_response({"tasks": page["tasks"], "env_name": env})

    async def num_tasks(self, request: web.Request) -> web.Response:
        _, _, page = await self._asked(request)
        return web.json_response({"num_tasks": page["size"]})

    async def task(self, request: web.Request) -> web.Response:
        env, body, page = await self._asked(request, "index")
        index = whole_number(body.get("index"))
        if index is None:
            raise invalid("int_type", "index", body.get("index"))
        if not 0 <= index < page["size"]:
            return answered(400, "Invalid task index")
        page = await self._server.ask_tasks({"env": env, "split": body["split"], "start": index, "stop": index + 1})
        return web.json_response({"task": page["tasks"][0]})

    async def task_range(self, request: web.Request) -> web.Response:
        """At most `MOST_LISTED`, counted from `start`."""
        env, body, page = await self._asked(request, "start", "stop")
        ends = {name: whole_number(body.get(name)) for name in ("start", "stop")}
        for name, end in ends.items():
            if end is None and body.get(name) is not None:
                raise invalid("int_type", name, body.get(name))
        start, stop, _ = slice(ends["start"], ends["stop"]).indices(page["size"])
        stop = max(start, min(stop, start + MOST_LISTED))
        page = await self._server.ask_tasks({"env": env, "split": body["split"], "start": start, "stop": stop})
        return web.json_response({"tasks": page["tasks"]})

    def _env(self, request: web.Request) -> str:
        name = request.match_info["env_name"]
        if found := [env for env in self._listed if env.lower() == name.lower()]:
            return found[0]
        raise _json_error(web.HTTPNotFound, f"unknown environment {name!r}")

    async def _asked(self, request: web.Request, *others: str, stop: int = 0) -> tuple[str, Json, Json]:
        """The environment that a request names, its body, and the tasks up to `stop` of the split that it names."""
        env = self._env(request)
        body = await object_of(request)
        split = body.get("split")
        if unknown := body.keys() - {"split", *others}:
            raise invalid("extra_forbidden", min(unknown), body)
        if not isinstance(split, str):
            raise invalid("string_type", "split", split)
        return env, body, await self._server.ask_tasks({"env": env, "split": split, "start": 0, "stop": stop})


def _telling(value: Any) -> Handler:
    async def tell(_: web.Request) -> web.Response:
        return web.json_response(value)

    return tell


def _http(frame: str) -> web.Response:
    told = json.loads(frame)
    data = told.get("data", {})
    if told.get("type") == "observation":
        return web.json_response(data)
    if data.get("code") == "VALIDATION_ERROR":
        return answered(422, data.get("errors", []))
    return answered(500, data.get("message", "no answer"))


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
