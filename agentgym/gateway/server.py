"""The gateway: an endpoint in front of a backend, by which agents are known by their keys and all that is sampled for them is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from agentgym.gateway import anthropic, chat, completions, responses
from agentgym.gateway.calls import Backend, ModelCall, Refused, Settings, Stream
from agentgym.gateway.episodes import EXPIRES_SECONDS, Episode, Exchange, Limits
from agentgym.gateway.record import Record, RecordError
from agentgym.gateway.upstream import Passed
from agentgym.storage import locks

if TYPE_CHECKING:
    from agentgym.gateway.tree import Call

FILE = "calls.jsonl"
MOST_BYTES = 64 << 20  # of a request
PING_SECONDS = 10.0
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# What a retry may say otherwise: whether it is streamed.
_STREAMED = re.compile(rb',\s*"stream(?:_options)?"\s*:\s*(?:true|false|\{[^}]*\})|"stream(?:_options)?"\s*:\s*(?:true|false|\{[^}]*\})\s*,')
_log = logging.getLogger("agentgym.gateway")


class _Route(NamedTuple):
    protocol: Any  # a module: `read`, `whole`, `error`
    stream: type[Stream]


_ROUTES = {
    "/v1/chat/completions": _Route(chat, chat.ChatStream),
    "/v1/completions": _Route(completions, completions.CompletionStream),
    "/v1/responses": _Route(responses, responses.ResponseStream),
    "/v1/messages": _Route(anthropic, anthropic.MessageStream),
}
_COUNT, _MODELS, _EMBEDDINGS, _EPISODES = "/v1/messages/count_tokens", "/v1/models", "/v1/embeddings", "/v1/episodes"


class Connection(web.RequestHandler[Any]):
    """A client's connection. It knows whose answer it sent last, until that is known to have arrived or not."""

    asked: tuple[Episode, Exchange] | None = None

    def ask(self, episode: Episode, exchange: Exchange) -> None:
        self.leave(lost=False)  # who asks again has read the answer before
        exchange.clients[self] = False
        self.asked = (episode, exchange)

    def leave(self, lost: bool) -> None:
        if self.asked is not None:
            episode, exchange = self.asked
            self.asked = None
            episode.left(exchange, self, lost)

    def connection_lost(self, exc: BaseException | None) -> None:
        there: socket.socket | None = self.transport.get_extra_info("socket") if self.transport else None
        # A client that closes without having read all resets the connection.
        failed = exc is not None or (there is not None and there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self.leave(lost=bool(failed))
        super().connection_lost(exc)


class Gateway:
    """An endpoint for agents; an async context manager. Started again in a folder, it goes on with the episodes there.

    Args:
        backend: what samples.
        folder: gets the record, `calls.jsonl`. One gateway at a time writes there.
        settings: what is done with settings that tokens could not be trained with.
        limits: of episodes that are opened without their own.
        admin_key: opens, grades and ends episodes by HTTP; None makes one.
        passed: endpoints of other models by the names that agents ask for. What they say is not recorded.
        cost_of: US dollars of a model's usage; None where it has no price.
        public_url: under which agents reach it, where that is not its own address.
    """

    def __init__(
        self,
        backend: Backend,
        folder: str | Path,
        *,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        limits: Limits = Limits(),  # noqa: B008 - frozen
        host: str = "127.0.0.1",
        port: int = 0,
        admin_key: str | None = None,
        passed: Mapping[str, Passed] | None = None,
        cost_of: Callable[[str, Mapping[str, int]], float | None] | None = None,
        public_url: str | None = None,
    ):
        self.backend, self.folder = backend, Path(folder)
        self.settings, self.limits = settings, limits
        self.host, self.port = host, port
        self.admin_key = admin_key or new_key()
        self.episodes: dict[str, Episode] = {}
        self._passed = dict(passed or {})
        self._cost_of = cost_of
        self._public_url = public_url
        self._by_key: dict[str, Episode] = {}
        self._tools: set[str] = set()  # digests of schemas that are in the record
        self._digests: dict[int, tuple[Any, str]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Gateway:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = locks.hold(self.folder)
        self.record = Record(self.folder / FILE)
        await asyncio.to_thread(self._read_all)
        loop = asyncio.get_running_loop()

        def request(*given: Any) -> web.BaseRequest:
            return web.BaseRequest(*given, loop, client_max_size=MOST_BYTES)

        self._http = web.Server(self._answer, request_factory=request)
        options = {"loop": loop, "access_log": None, "keepalive_timeout": 600.0, "lingering_time": 1.0}
        self._listening = await loop.create_server(lambda: Connection(self._http, **options), self.host, self.port)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        if self._running:
            await asyncio.wait(self._running)
        await self._http.shutdown(1.0)
        for episode in self.episodes.values():
            if news := episode.news():
                self.record.note({"episode": episode.id, **news})
        await self.record.close()
        locks.os.close(self._lock)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self._public_url or f"http://{host}:{self.port}"

    def _read_all(self) -> None:
        for number, line in enumerate(self.record.lines(), start=1):
            try:
                if "open" in line:
                    given = line["key"], Limits(**line["limits"]), line["seed"], line["expires"], line["opened"]
                    self._know(Episode(line["open"], *given))
                elif "schemas" in line:
                    self._tools.add(line["tools"])
                elif "forget" in line:
                    self._forget(line["forget"])
                elif "passed" not in line:
                    self.episodes[line["episode"]].read(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.record.path}:{number}: not a line of a record: {error!r}") from error

    def _know(self, episode: Episode) -> None:
        self.episodes[episode.id] = self._by_key[episode.key_digest] = episode

    # ---- what a run does with episodes

    async def open(
        self, id: str | None = None, limits: Limits | None = None, seed: int | None = None, seconds: float = EXPIRES_SECONDS
    ) -> tuple[Episode, str]:
        """A new episode and its key, which works for so many seconds. By a `seed` its calls have seeds of their own.

        ValueError: there is one of this id.
        """
        id = id or secrets.token_hex(8)
        if id in self.episodes:
            raise ValueError(f"there is an episode {id!r} already")
        key, now = new_key(), time.time()
        episode = Episode(id, _digest(key), limits or self.limits, seed, now + seconds, now)
        self._know(episode)
        try:
            await self.record.write(episode.opening())
        except RecordError:
            self._forget(id)
            raise
        return episode, key

    async def reward(self, id: str, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """Set an episode's reward; the last one counts. KeyError: there is no such episode. Raises RecordError."""
        line = {"episode": self.episodes[id].id, "reward": reward, "metrics": dict(metrics or {})}
        await self.record.write(line)
        self.episodes[id].read(line)

    async def end(self, id: str, reason: str = "ended", complete: bool = True) -> None:
        """Answer no more calls of an episode; an incomplete one is not to be trained on. Raises as `reward`."""
        line = {"episode": self.episodes[id].id, "end": reason, "complete": complete, **self.episodes[id].news()}
        await self.record.write(line)
        self.episodes[id].read(line)

    def forget(self, id: str) -> None:
        """Give an episode's memory back. It stays in the record."""
        self._forget(id)
        self.record.note({"forget": id})

    def _forget(self, id: str) -> None:
        del self._by_key[self.episodes.pop(id).key_digest]

    # ---- HTTP

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, key = request.path, None
        if path.startswith("/episodes/"):
            key, _, path = path.removeprefix("/episodes/").partition("/")
            path = f"/{path}"
        protocol = _ROUTES[path].protocol if path in _ROUTES else anthropic if path == _COUNT else chat
        try:
            if path.startswith(_EPISODES):
                return await self._admin(request, path.removeprefix(_EPISODES).strip("/"))
            return await self._served(request, path, self._episode(request, key))
        except RecordError as error:
            refused = Refused(507, f"nothing is answered that is not recorded, and {error}", "record")
        except web.HTTPRequestEntityTooLarge:
            refused = Refused(413, f"a request has at most {MOST_BYTES >> 20} MiB")
        except RecursionError:
            refused = Refused(400, "the request is nested too deeply")
        except Refused as error:
            refused = error
        return web.json_response(protocol.error(refused), status=refused.status)

    def _episode(self, request: web.BaseRequest, key: str | None) -> Episode:
        found = self._by_key.get(_digest(key if key is not None else _key_of(request)))
        if found is None or found.expires < time.time():
            raise Refused(401, "no episode has this key, or it has expired", "invalid_api_key")
        return found

    async def _served(self, request: web.BaseRequest, path: str, episode: Episode) -> web.StreamResponse:
        if path == _MODELS and request.method == "GET":
            return web.json_response(self._models("anthropic-version" in request.headers))
        if request.method != "POST" or path not in (*_ROUTES, _COUNT, _EMBEDDINGS):
            raise Refused(404, f"{request.method} {path:.100} is not served here")
        raw = await request.read()
        body = _object(raw)
        if passed := self._passed.get(str(body.get("model"))):
            status, response = await passed.forward(request, path, raw)
            self.record.note({"episode": episode.id, "passed": body["model"], "path": path, "status": status})
            return response
        if path == _EMBEDDINGS:
            raise Refused(404, f"no model {body.get('model')!r:.80} is served here", "model_not_found")
        if path == _COUNT:
            (call,) = self._read(anthropic, body, episode)
            return web.json_response({"input_tokens": await self.backend.count(call)})
        exchange = self._exchange(request, path, raw, body, episode)
        if body.get("stream") is True:
            return await self._stream(request, episode, exchange, _ROUTES[path].stream(body, exchange))
        await exchange.news(1 << 60)
        if exchange.error is not None:
            raise exchange.error
        response = web.json_response(_ROUTES[path].protocol.whole(body, exchange))
        await response.prepare(request)
        await response.write_eof()
        _sent(request, episode, exchange)
        return response

    def _models(self, of_anthropic: bool) -> dict[str, Any]:
        if of_anthropic:
            data = [{"type": "model", "id": id, "display_name": id, "created_at": "1970-01-01T00:00:00Z"} for id in self._names()]
            return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        data = [{"id": id, "object": "model", "created": 0, "owned_by": "agentgym"} for id in self._names()]
        return {"object": "list", "data": data}

    def _names(self) -> list[str]:
        return [*self.backend.models, *self._passed]

    def _read(self, protocol: Any, body: dict[str, Any], episode: Episode) -> list[ModelCall]:
        try:
            calls: list[ModelCall] = protocol.read(body, episode)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Refused(400, f"the request does not have this protocol's form: {error!r:.200}") from error
        for call in calls:
            left_out, call.after = call.changed, episode.tree.last_said(call.messages)
            self.settings.settle(call, self.backend)
            call.changed += left_out
        return calls

    def _exchange(
        self, request: web.BaseRequest, path: str, raw: bytes, body: dict[str, Any], episode: Episode
    ) -> Exchange:
        """The exchange of a request: one that it is a retry of, or a new one, which is begun."""
        digest = hashlib.blake2b(path.encode() + _STREAMED.sub(b"", raw), digest_size=16).hexdigest()
        key = request.headers.get("Idempotency-Key")
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        exchange = episode.find(digest, again, key)
        if exchange is None:
            protocol = _ROUTES[path].protocol
            calls = [
                ModelCall(**vars(call) | {"used": dict(call.used)}) if copy else call
                for call in self._read(protocol, body, episode)
                for copy in range(call.used.pop("n", 1))
            ]
            exchange = episode.begin(digest, key, calls)
            exchange.instructed = protocol is responses and bool(body.get("instructions"))
            task = asyncio.create_task(self._sample(episode, exchange, path, str(body.get("model", ""))))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        if isinstance(request.protocol, Connection):  # else the client has left
            request.protocol.ask(episode, exchange)
        return exchange

    async def _sample(self, episode: Episode, exchange: Exchange, path: str, model: str) -> None:
        """Answer an exchange and record it, whether or not its client stays."""
        try:
            if exchange.limit is not None:
                answers, cost, lines = episode.polite(exchange), 0.0, []
            else:
                answers, cost, lines = await self._sampled(episode, exchange)
            name = path.removeprefix("/v1/")
            await self.record.write(*lines, episode.line(exchange, name, model, answers, cost))
            self._tools.update(line["tools"] for line in lines)
            episode.answered(exchange, answers, cost)
        except Refused as error:
            episode.failed(exchange, error)
        except RecordError as error:
            episode.failed(exchange, Refused(507, f"nothing is answered that is not recorded, and {error}", "record"))
        except Exception as error:
            _log.exception("agentgym gateway: episode %s: the engine failed", episode.id)
            episode.failed(exchange, Refused(500, f"the engine failed: {error!r:.500}", "engine"))

    async def _sampled(self, episode: Episode, exchange: Exchange) -> tuple[list[Call], float, list[dict[str, Any]]]:
        """The answers of an exchange, what they cost, and the lines of schemas that the record does not have."""

        async def answered(place: int, call: ModelCall) -> Call:
            def told(kind: str, text: str) -> None:
                exchange.tell(place, kind, text)

            answer = await self.backend.answer(call, episode.id, told)
            return episode.tree.grown(exchange.number + place, call, answer, self._digest_of(call.tools))

        calls = exchange.calls
        if len(calls) == 1:
            answers = [await answered(0, calls[0])]
        else:
            answers = await asyncio.gather(*(answered(place, call) for place, call in enumerate(calls)))
        cost = 0.0
        if self._cost_of is not None:
            cost = sum(self._cost_of(self.backend.models[0], answer.usage) or 0.0 for answer in answers)
        new = {answer.tools: call.tools for answer, call in zip(answers, calls, strict=True) if answer.tools}
        lines = [{"tools": digest, "schemas": tools} for digest, tools in new.items() if digest not in self._tools]
        return answers, cost, lines

    def _digest_of(self, tools: list[dict[str, Any]]) -> str:
        return hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=12).hexdigest() if tools else ""

    async def _stream(
        self, request: web.BaseRequest, episode: Episode, exchange: Exchange, stream: Stream
    ) -> web.StreamResponse:
        """Send what is told while it is told, and the end once it is on disk. An early error still has its own status."""
        response: web.StreamResponse | None = None
        seen = 0
        while True:
            await exchange.news(seen, PING_SECONDS)
            pieces, seen = exchange.pieces[seen:], max(seen, len(exchange.pieces))
            if response is None:
                if exchange.error is not None:
                    raise exchange.error
                response = web.StreamResponse(headers=_STREAM)
                await response.prepare(request)
                await response.write(stream.begin() or Stream.PING)
            out = b"".join(stream.piece(*piece) for piece in pieces)
            if exchange.error is not None:
                out += stream.failed(exchange.error)
            elif exchange.done:
                out += stream.end()
            await response.write(out or stream.PING)
            if exchange.done:
                break
        await response.write_eof()
        if exchange.error is None:
            _sent(request, episode, exchange)
        return response

    # ---- the run's own routes

    async def _admin(self, request: web.BaseRequest, path: str) -> web.Response:
        if not hmac.compare_digest(_key_of(request).encode(), self.admin_key.encode()):
            raise Refused(401, "this takes the gateway's admin key", "invalid_api_key")
        id, _, verb = path.partition("/")
        body = _object(await request.read() or b"{}")
        try:
            if request.method == "POST" and not id:
                return web.json_response(await self._opened(body))
            if id not in self.episodes:
                raise Refused(404, f"there is no episode {id!r:.80}")
            if (request.method, verb) == ("POST", "reward"):
                reward = body.get("reward")
                if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                    raise ValueError(f"reward is a number, not {reward!r:.50}")
                await self.reward(id, reward, body.get("metrics"))
            elif (request.method, verb) == ("POST", "end"):
                await self.end(id, str(body.get("reason", "ended")), body.get("complete", True) is True)
            elif (request.method, verb) != ("GET", ""):
                raise Refused(404, f"{request.method} {request.path:.100} is not served here")
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error)) from error
        return web.json_response(self.episodes[id].to_json())

    async def _opened(self, body: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(**body["limits"]) if "limits" in body else None
        given = body.get("id"), limits, body.get("seed"), float(body.get("expires_seconds", EXPIRES_SECONDS))
        episode, key = await self.open(*given)
        return {"id": episode.id, "key": key, **self.addresses(key), "expires": episode.expires}

    def addresses(self, key: str) -> dict[str, str]:
        """Where an agent reaches its episode: with the key beside, or with the key in the address."""
        return {"base_url": f"{self.url}/v1", "keyed_url": f"{self.url}/episodes/{key}/v1"}


def new_key() -> str:
    return f"ag-{secrets.token_urlsafe(24)}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _key_of(request: web.BaseRequest) -> str:
    headers = request.headers
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    return headers.get("x-api-key") or headers.get("api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object")
    return value


def _sent(request: web.BaseRequest, episode: Episode, exchange: Exchange) -> None:
    connection, transport = request.protocol, request.transport
    if isinstance(connection, Connection) and connection.asked and transport is not None and not transport.is_closing():
        episode.sent(exchange, connection)
