"""HTTP routes: health, metrics, environments, tasks, schemas and sandboxes, and the WebSockets of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentgym.service.openenv import routes as openenv
from agentgym.service.openenv.schemas import SCHEMAS
from agentgym.service.protocol import sandbox_frames, schemas
from agentgym.service.protocol.frames import NAME, Refused, text_of_json
from agentgym.service.protocol.sandbox_frames import PATH, SERVED
from agentgym.service.server.http_connections import refusal
from agentgym.service.server.metrics import CONTENT_TYPE, Memory, exposition
from agentgym.service.worker.protocol_handler import handler_class

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

# Answered without a token: what probes of a cluster ask.
OPEN_PATHS = ("/health", "/ready")


def add_routes(app: web.Application, server: EnvServer) -> None:
    told = Routes(server)
    get = app.router.add_get
    get("/health", told.health)
    get("/ready", told.ready)
    get("/metrics", told.metrics)
    get("/schema", told.schema)
    get("/envs", told.envs)
    get("/envs/{id:.+}/tasks", told.tasks)
    get("/envs/{id:.+}/schema", told.env_schema)
    handler_class(NAME)  # imported now: once sessions come, there may be no file left to open
    get("/envs/{id:.+}/session", told.session, allow_head=False)
    get("/envs/{id:.+}", told.env)  # after all others under /envs/
    if server.settings.sandbox is not None:
        handler_class(sandbox_frames.NAME)
        get(PATH, told.sandboxes)
        get(f"{PATH}/session", told.sandbox_session, allow_head=False)
    if server.settings.envs:
        openenv.add_routes(app, server)


class Routes:
    def __init__(self, server: EnvServer):
        self._server = server
        self._memory = Memory()

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def ready(self, _: web.Request) -> web.Response:
        sessions = self._server.sessions
        ready = sessions.forks.ready and not sessions.draining
        load = {"sessions": len(sessions.open), "max_sessions": sessions.most}
        told = {"ready": ready, "draining": sessions.draining, **load}
        return web.json_response(told, status=200 if ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        text = exposition(self._server, await self._memory.look(self._server))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def schema(self, _: web.Request) -> web.Response:
        """Our protocol's schemas, and OpenEnv's of the first environment, which its clients look for here."""
        return _json(schemas.protocol() | (SCHEMAS if self._server.settings.envs else {}))

    async def envs(self, _: web.Request) -> web.Response:
        return _json({"envs": [await self._about_or_error(id) for id in self._server.settings.envs]})

    async def env(self, request: web.Request) -> web.Response:
        return _json(await self._about(self._env_id(request)))

    async def env_schema(self, request: web.Request) -> web.Response:
        return _json(schemas.of_env(await self._about(self._env_id(request))))

    async def tasks(self, request: web.Request) -> web.Response:
        id = self._env_id(request)
        start, stop = _whole(request, "start", 0), _whole(request, "stop", None)
        split = request.query.get("split", "train")
        return _json(await self._server.ask_tasks({"env": id, "split": split, "start": start, "stop": stop}))

    async def session(self, request: web.Request) -> web.StreamResponse:
        return await self._server.open_session(request, self._env_id(request), NAME)

    async def sandboxes(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(await self._server.ask_tasks({"sandboxes": request.query.get("image")}))
        except web.HTTPNotFound as error:
            return refusal(404, "NO_SANDBOX", error.text or "")

    async def sandbox_session(self, request: web.Request) -> web.StreamResponse:
        return await self._server.open_session(request, SERVED, sandbox_frames.NAME)

    def _env_id(self, request: web.Request) -> str:
        id = request.match_info["id"]
        if id not in self._server.settings.envs:
            served = ", ".join(self._server.settings.envs) or "none"
            raise web.HTTPNotFound(text=f"no environment {id!r} here; there are {served}")
        return id

    async def _about_or_error(self, id: str) -> dict[str, Any]:
        """One that cannot be made in time, or whose making kills its process, does not hide the others."""
        try:
            return await self._about(id)
        except Refused as refused:
            return {"id": id, "error": str(refused)}

    async def _about(self, id: str) -> dict[str, Any]:
        spec = self._server.settings.envs[id]
        about: dict[str, Any] = {"id": id, "description": spec.description, "tags": list(spec.tags)}
        about |= {"nondeterministic": spec.nondeterministic, "splits": await self._server.ask_tasks({"env": id})}
        return about | await self._server.ask_tasks({"env": id, "about": True})


def _json(value: Any) -> web.Response:
    return web.json_response(value, dumps=text_of_json)


def _whole(request: web.Request, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise web.HTTPBadRequest(text=f"{name} is a whole number from 0 on, not {text!r:.50}")
    return int(text)
