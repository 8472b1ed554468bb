"""The routes of sandboxes: GET /sandboxes for information, WS /sandboxes/session for one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentgym.core.registration import EnvSpec
from agentgym.service.protocol.frames import CAPACITY, Refused
from agentgym.service.protocol.sandbox_frames import NAME, PATH, SERVED
from agentgym.service.worker.handlers import handler_class

if TYPE_CHECKING:
    from agentgym.service.server.env_server import EnvServer


def spec_of(settings: Mapping[str, Any]) -> EnvSpec:
    """The EnvSpec by which the zygote serves sandboxes; loading it imports what workers need."""
    return EnvSpec(id=SERVED, entry_point="agentgym.sandbox.served:told", kwargs=settings)


def add_routes(app: web.Application, server: EnvServer) -> None:
    handler_class(NAME)  # imported now: once sessions come, there may be no file left to open

    async def told(request: web.Request) -> web.Response:
        try:
            found = await server.listing.ask({"sandboxes": request.query.get("image")})
        except LookupError as error:
            return web.json_response({"error": {"code": "NO_SANDBOX", "message": str(error)}}, status=404)
        except (TimeoutError, OSError) as error:
            raise Refused(CAPACITY, f"sandboxes cannot be looked at now: {error or 'it takes too long'}") from None
        return web.json_response(found)

    async def session(request: web.Request) -> web.StreamResponse:
        return await server.open_session(request, SERVED, NAME)

    app.router.add_get(PATH, told)
    app.router.add_get(f"{PATH}/session", session, allow_head=False)
