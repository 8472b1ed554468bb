"""OpenEnv's routes on our server: for the first environment at the root, and for each under its id.

A WebSocket at /ws is handed to a worker that speaks `openenv`. HTTP requests become frames of a session that the
server itself talks to: `POST /reset` and `/step` take one for a single request. JSON-RPC is in `mcp.py`, the Task API
in `tasks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from agentgym.service.openenv import schemas
from agentgym.service.openenv.handler import error_frame
from agentgym.service.openenv.mcp import NAME, McpRoutes, counts, once
from agentgym.service.openenv.tasks import TaskRoutes, answered, invalid, object_of
from agentgym.service.protocol.frames import Refused
from agentgym.service.server.session_server import SessionServer

Json = dict[str, Any]
REFUSED_BYTES = 1 << 16  # that are read of a client that is refused


def add_routes(app: web.Application, server: SessionServer) -> None:
    envs = list(server.settings.envs)
    everywhere = [OpenEnvRoutes(server, envs[0], envs, "")]
    everywhere += [OpenEnvRoutes(server, env, [env], f"/{env}") for env in envs]
    for one in everywhere:
        app.router.add_routes(one.routes())

    async def end(_: web.Application) -> None:
        for one in everywhere:
            one.close()

    app.on_shutdown.append(end)


class OpenEnvRoutes:
    """OpenEnv's routes for one environment; `listed` are those whose tasks are told."""

    def __init__(self, server: SessionServer, env: str, listed: list[str], prefix: str):
        self.env = env
        self.prefix = prefix
        self._server = server
        self._spec = server.settings.envs[env]
        self._tasks = TaskRoutes(listed, server.ask_tasks)
        self._mcp = McpRoutes(server, env)

    def routes(self) -> list[web.RouteDef]:
        """/health at the root is the server's own."""
        tasks = self._tasks
        named: dict[str, tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = {
            "/ws": ("GET", self.socket),
            "/reset": ("POST", self.reset),
            "/step": ("POST", self.step),
            "/state": ("GET", self.state),
            "/metadata": ("GET", self.metadata),
            "/schema": ("GET", self.schema),
            "/openapi.json": ("GET", self.openapi),
            "/mcp": ("*", self._mcp.answer),
            "/list_environments": ("GET", tasks.environments),
            "/{env_name:.+}/splits": ("GET", tasks.splits),
            "/{env_name:.+}/tasks": ("POST", tasks.list_tasks),
            "/{env_name:.+}/num_tasks": ("POST", tasks.num_tasks),
            "/{env_name:.+}/task": ("POST", tasks.task),
            "/{env_name:.+}/task_range": ("POST", tasks.task_range),
        }
        if self.prefix:
            named["/health"] = ("GET", self.health)
        return [web.route(method, self.prefix + path, handler) for path, (method, handler) in named.items()]

    def close(self) -> None:
        self._mcp.close()

    # ---- one request, one session

    async def reset(self, request: web.Request) -> web.Response:
        """`POST /reset`: the first observation of an episode, which ends at once."""
        body = await object_of(request)
        with once(self._server, request, self.env) as line:
            return _http(await line.ask(json.dumps({"type": "reset", "data": body})))

    async def step(self, request: web.Request) -> web.Response:
        """`POST /step`: an episode of one step. Arguments of `reset` may stand beside the action."""
        body = await object_of(request)
        action = body.pop("action", None)
        if not isinstance(action, dict):
            raise invalid("missing" if action is None else "dict_type", "action", action)
        with once(self._server, request, self.env) as line:
            begun = await line.ask(json.dumps({"type": "reset", "data": body}))
            if json.loads(begun).get("type") != "observation":
                return _http(begun)
            return _http(await line.ask(json.dumps({"type": "step", "data": action})))

    # ---- what there is to know

    async def state(self, _: web.Request) -> web.Response:
        """`GET /state`: of an environment that nobody has reset; sessions tell theirs over WebSockets."""
        return web.json_response(schemas.FRESH_STATE)

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def metadata(self, _: web.Request) -> web.Response:
        return web.json_response(schemas.metadata_of(self._spec))

    async def schema(self, _: web.Request) -> web.Response:
        return web.json_response(schemas.SCHEMAS)

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(schemas.openapi_of(f"OpenEnv interface of {self.env}", PATHS))

    # ---- WebSockets

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`WS /ws`: a new session, or with `?session_id=` one that was made over HTTP."""
        if request.query.get("session_id"):
            return await self._mcp.attached(request)
        try:
            return await self._server.open_session(request, self.env, NAME)
        except Refused as refused:
            # OpenEnv's clients want to be told by a frame; a status of HTTP they only report.
            socket = web.WebSocketResponse(compress=False, max_msg_size=REFUSED_BYTES)
            await socket.prepare(request)
            await socket.send_str(error_frame("CAPACITY_REACHED", str(refused), **counts(self._server)))
            await socket.close()
            return socket


def _http(frame: str) -> web.Response:
    told = json.loads(frame)
    data = told.get("data", {})
    if told.get("type") == "observation":
        return web.json_response(data)
    if data.get("code") == "VALIDATION_ERROR":
        return answered(422, data.get("errors", []))
    return answered(500, data.get("message", "no answer"))


PATHS: Mapping[str, Mapping[str, str]] = {
    "/reset": {"post": "begin an episode and show its opening"},
    "/step": {"post": "play an episode of one step"},
    "/state": {"get": "the state of an environment that was not reset"},
    "/health": {"get": "whether the server is well"},
    "/metadata": {"get": "name and description"},
    "/schema": {"get": "JSON schemas of actions, observations and states"},
    "/mcp": {"post": "JSON-RPC: tools/list, tools/call, openenv/session/create, openenv/session/close"},
    "/list_environments": {"get": "the names that the task routes take"},
    "/{env_name}/splits": {"get": "the splits of the tasks"},
    "/{env_name}/tasks": {"post": "tasks of a split"},
    "/{env_name}/num_tasks": {"post": "how many tasks a split has"},
    "/{env_name}/task": {"post": "one task"},
    "/{env_name}/task_range": {"post": "tasks from start up to stop"},
}
