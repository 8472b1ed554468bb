"""OpenEnv's routes on our server: for the first environment at the root, and for each under its id.

A WebSocket at /ws is handed to a worker that speaks `openenv`. HTTP requests become frames of a session that the
server itself talks to: `POST /reset` and `/step` take one for a single request. JSON-RPC is in `mcp.py`, the Task API
in `tasks.py`.
"""

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


def add_routes(app: web.Application, server: SessionServer) -> None:
    envs = list(server.settings.envs)
    for env, listed, prefix in [(envs[0], envs, ""), *((env, [env], f"/{env}") for env in envs)]:
        app.router.add_routes(OpenEnvRoutes(server, env, listed, prefix).routes(app))


class OpenEnvRoutes:
    """OpenEnv's routes for one environment; `listed` are those whose tasks are told."""

    def __init__(self, server: SessionServer, env: str, listed: list[str], prefix: str):
        self.env = env
        self.prefix = prefix
        self._server = server
        self._listed = listed
        self._mcp = McpRoutes(server, env)

    def routes(self, app: web.Application) -> list[web.RouteDef]:
        app.on_shutdown.append(self._mcp.close)
        tasks = TaskRoutes(self._listed, self._server.ask_tasks)
        handlers: dict[str, Handler] = {
            "/reset": self.reset,
            "/step": self.step,
            "/state": _telling(schemas.FRESH_STATE),  # of sessions it is told over WebSockets
            "/metadata": _telling(schemas.metadata_of(self._server.settings.envs[self.env])),
            "/schema": _telling(schemas.SCHEMAS),
            "/mcp": self._mcp.answer,
            "/list_environments": _telling(self._listed),
            "/{env_name}/splits": tasks.splits,
            "/{env_name}/tasks": tasks.list_tasks,
            "/{env_name}/num_tasks": tasks.num_tasks,
            "/{env_name}/task": tasks.task,
            "/{env_name}/task_range": tasks.task_range,
        }
        if self.prefix:  # else it is the server's own
            handlers["/health"] = _telling({"status": "healthy"})
        openapi = schemas.openapi_of(f"OpenEnv interface of {self.env}", PATHS)
        return [
            web.get(f"{self.prefix}/ws", self.socket),
            web.get(f"{self.prefix}/openapi.json", _telling(openapi)),
            *(
                web.route("*" if path == "/mcp" else PATHS[path][0], self.prefix + _pattern(path), handler)
                for path, handler in handlers.items()
            ),
        ]

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


def _pattern(path: str) -> str:
    return path.replace("{env_name}", "{env_name:.+}")


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
