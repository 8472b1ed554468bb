"""Sessions for HTTP requests. `EnvServer` adds the listening and the routes."""

import socket
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from agentgym.core.registration import EnvSpec
from agentgym.service.protocol.frames import CAPACITY, NAME, RESUME_HEADER, SUBPROTOCOL, Refused, text_of_json
from agentgym.service.protocol.sandbox_frames import SERVED
from agentgym.service.server.events import Unauthorized
from agentgym.service.server.handshake import check_handshake, hand_over, has_said_more
from agentgym.service.server.http_connections import HttpConnections
from agentgym.service.server.local_session import Line
from agentgym.service.server.sessions import Sessions
from agentgym.service.server.settings import ServeSettings
from agentgym.service.server.task_listing import Listing
from agentgym.service.server.tokens import Tokens

SPARE_CONNECTIONS = 128  # of HTTP, beside two for each session


class SessionServer:
    """Opens sessions. `served` are environments and sandboxes as the zygote knows them."""

    def __init__(self, settings: ServeSettings):
        self.settings = settings
        self.served = dict(settings.envs)
        if settings.sandbox is not None:
            self.served[SERVED] = sandbox_spec(settings.sandbox)
        self.sessions = Sessions(settings, self.served)
        self.forks = self.sessions.forks
        self.listing = Listing(self.forks)
        self.tokens = Tokens(settings.tokens, settings.token_file)
        self.unauthorized = Unauthorized()
        # Fewer than the files that this process may open: accept() without one left would be tried in a loop.
        most = 2 * settings.max_sessions + SPARE_CONNECTIONS
        self.connections = HttpConnections(most, settings.limits.message_seconds)

    def owner_of(self, request: web.Request) -> str | None:
        """The name of a request's token; "" if the server has no tokens; None if the token is wrong or missing."""
        return self.tokens.owner_of(request.headers.get("Authorization", ""))

    def env_id(self, request: web.Request) -> str:
        """The served environment in the request's path. Raises 404 if it is unknown."""
        id = request.match_info["id"]
        if id not in self.settings.envs:
            served = ", ".join(self.settings.envs) or "none"
            raise web.HTTPNotFound(text=f"no environment {id!r} here; there are {served}")
        return id

    async def ask_tasks(self, question: dict[str, Any]) -> Any:
        """The answer of `task_catalogue.tell_tasks`. Raises 404 for its errors, `Refused` if it gives no answer."""
        try:
            return await self.listing.ask(question)
        except LookupError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        except (TimeoutError, OSError) as error:
            what = "sandboxes" if "sandboxes" in question else "tasks"
            raise Refused(CAPACITY, f"{what} cannot be read now: {error or 'it takes too long'}") from None

    async def open_session(self, request: web.Request, env: str, protocol: str) -> web.StreamResponse:
        """Answer a WebSocket handshake with a session, new or resumed. Raises `Refused`; the guard answers it."""
        if wrong := check_handshake(request):
            headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            return refusal(426, "UPGRADE_REQUIRED", wrong, headers)
        if has_said_more(request):
            answer = refusal(400, "BAD_REQUEST", "a client waits for the answer to its handshake before it says more")
            answer.force_close()
            return answer
        offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        subprotocol = SUBPROTOCOL if protocol == NAME and SUBPROTOCOL in offered else None
        token = request.headers.get(RESUME_HEADER) or request.query.get("resume")
        owner = self.owner_of(request) or ""
        sessions = self.sessions
        session = sessions.claim(token, env, protocol, owner) if token else sessions.reserve(env, protocol, owner)
        try:
            descriptor, response, over = await hand_over(request, subprotocol)
        except BaseException as error:
            if not token:
                sessions.release(session)
            if isinstance(error, Refused):
                sessions.refused[error.code] += 1
            raise
        if token:
            sessions.attach(session, descriptor)
        else:
            sessions.begin(session, descriptor)
        if over is not None:
            await over.wait()
            if request.protocol is not None:
                request.protocol.connection_lost(None)  # the relay replaced it on the transport
        return response

    def open_line(self, request: web.Request, env: str, protocol: str) -> Line:
        """A new session with the server itself as its client. Raises as `open_session`."""
        session = self.sessions.reserve(env, protocol, self.owner_of(request) or "")
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self.sessions.release(session)
            self.sessions.refused[CAPACITY] += 1
            raise Refused(CAPACITY, f"no connection to one more session: {error.strerror}") from None
        session.local = True
        self.sessions.begin(session, theirs.detach())
        return Line(ours)


def sandbox_spec(settings: Mapping[str, Any]) -> EnvSpec:
    """The EnvSpec by which the zygote serves sandboxes; loading it imports what workers need."""
    return EnvSpec(id=SERVED, entry_point="agentgym.sandbox.served:told", kwargs=settings)


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An HTTP error response with a JSON body."""
    body = {"error": {"code": code, "message": message}}
    answer = web.json_response(body, status=status, headers=headers, dumps=text_of_json)
    if status in (429, 503):
        answer.force_close()  # where a balancer stands between, the next try is then led to another server
    return answer
