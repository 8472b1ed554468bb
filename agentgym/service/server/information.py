"""HTTP routes about the server: health, metrics, environments, tasks and schemas."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentgym.service.protocol import schemas
from agentgym.service.protocol.frames import text_of_json
from agentgym.service.server.metrics import CONTENT_TYPE, Memory, exposition

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer

# Answered without a token: what probes of a cluster ask.
OPEN_PATHS = ("/health", "/ready")


def add_routes(app: web.Application, server: EnvServer) -> None:
    told = Information(server)
    get = app.router.add_get
    get("/health", told.health)
    get("/ready", told.ready)
    get("/metrics", told.metrics)
    get("/schema", told.schema)
    get("/envs", told.envs)
    get("/envs/{id:.+}/tasks", told.tasks)
    get("/envs/{id:.+}/schema", told.env_schema)


def add_last(app: web.Application, server: EnvServer) -> None:
    """Add the route that must come after all others under /envs/."""
    app.router.add_get("/envs/{id:.+}", Information(server).env)


class Information:
    def __init__(self, server: EnvServer):
        self._server = server
        self._memory = Memory()

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def ready(self, _: web.Request) -> web.Response:
        sessions = self._server.sessions
        ready = self._server.forks.ready and not sessions.draining
        load = {"sessions": len(sessions.open), "max_sessions": sessions.most}
        told = {"ready": ready, "draining": sessions.draining, **load}
        return web.json_response(told, status=200 if ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        text = exposition(self._server, await self._memory.look(self._server))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def schema(self, _: web.Request) -> web.Response:
        """`GET /schema`: our protocol's, and OpenEnv's of the first environment, which its clients look for here."""
        told = schemas.protocol()
        if self._server.settings.envs:
            told |= importlib.import_module("agentgym.service.openenv.schemas").SCHEMAS
        return _json(told)

    async def envs(self, _: web.Request) -> web.Response:
        return _json({"envs": [await self._about(id) for id in self._server.settings.envs]})

    async def env(self, request: web.Request) -> web.Response:
        return _json(await self._about(self._server.env_id(request)))

    async def env_schema(self, request: web.Request) -> web.Response:
        return _json(schemas.of_env(await self._about(self._server.env_id(request))))

    async def tasks(self, request: web.Request) -> web.Response:
        id = self._server.env_id(request)
        start, stop = _whole(request, "start", 0), _whole(request, "stop", None)
        split = request.query.get("split", "train")
        return _json(await self._server.ask_tasks({"env": id, "split": split, "start": start, "stop": stop}))

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
