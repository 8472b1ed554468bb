"""The gateway: an endpoint in front of a model that identifies agents by their keys and records everything sampled for them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web

import agentgym.gateway.anthropic as anthropic  # noqa: PLR0402 - the package imports this module
import agentgym.gateway.chat as chat  # noqa: PLR0402 - the package imports this module
import agentgym.gateway.completions as completions  # noqa: PLR0402 - the package imports this module
import agentgym.gateway.mcp as mcp  # noqa: PLR0402 - the package imports this module
import agentgym.gateway.responses as responses  # noqa: PLR0402 - the package imports this module
from agentgym.core.messages import assistant
from agentgym.gateway.calls import Backend, ModelAnswer, ModelCall, Refused, Settings
from agentgym.gateway.episodes import DAY_SECONDS, Episode, Exchange, Limits
from agentgym.gateway.forms import levels
from agentgym.gateway.streams import Stream
from agentgym.gateway.tree import Call
from agentgym.gateway.upstream import Passed
from agentgym.storage import locks
from agentgym.storage.durable import DurableLines, NotWritten

FILE = "calls.jsonl"
MOST_BYTES = 64 << 20  # of a request
MOST_LEVELS = 100  # of a message, tool or setting: one that goes too deep for Python would be recorded, and the record never read again
PING, PING_SECONDS, CLOSE_SECONDS = b": ping\n\n", 10.0, 10.0
_PROTOCOLS: dict[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": anthropic,
}
_MCP = "/mcp"
_COUNT, _MODELS, _EMBEDDINGS, _EPISODES = "/v1/messages/count_tokens", "/v1/models", "/v1/embeddings", "/v1/episodes"
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# How an answer is wanted, which is no part of what is asked.
_MANNERS = re.compile(rb'"stream(?:_options)?"\s*:\s*(?:true|false|null|\{[^}]*\})\s*,?\s*')
_log = logging.getLogger("agentgym.gateway")


class Connection(web.RequestHandler):
    """A client's connection. It remembers the answer that it carries until that is known to have arrived or to be lost."""

    asked: tuple[Episode, Exchange] | None = None

    def ask(self, episode: Episode, exchange: Exchange) -> None:
        self.leave(lost=False)  # who asks again has read the answer before
        exchange.clients[self] = False
        self.asked = episode, exchange

    def sent(self) -> None:
        if self.asked is not None and self.transport is not None and not self.transport.is_closing():
            self.asked[1].clients[self] = True

    def leave(self, lost: bool) -> None:
        if self.asked is not None:
            episode, exchange = self.asked
            self.asked = None
            episode.left(exchange, self, lost)

    def connection_lost(self, exc: BaseException | None) -> None:
        there = self.transport.get_extra_info("socket") if self.transport is not None else None
        # A client that closes before it has read all resets the connection.
        self.leave(exc is not None or (there is not None and there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0))
        super().connection_lost(exc)


class Gateway:
    """An endpoint for agents; an async context manager. Started again in a folder, it goes on with the episodes there.

    Args:
        folder: gets the record, `calls.jsonl`. One gateway at a time writes there.
        limits: of episodes that are opened without their own.
        admin_key: opens, grades and ends episodes over HTTP; None makes one.
        passed: endpoints of other models by the names that agents ask for. What they answer is not recorded.
        cost_of: US dollars of a model's usage (see `Reply.usage`); None where it has no price.
        local: listen at a Unix socket too, `socket`, for sandboxes without network.
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
        local: bool = False,
    ):
        self.backend, self.folder, self.settings, self.limits = backend, Path(folder), settings, limits
        self.host, self.port, self.admin_key = host, port, admin_key or _new_key()
        self.episodes: dict[str, Episode] = {}
        self._passed, self.cost_of = dict(passed or {}), cost_of or (lambda model, usage: None)
        # A short path: names of sockets have at most 107 characters.
        home = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"
        for old in Path(home).glob("agentgym-gateway-*/socket") if local else ():
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                if probe.connect_ex(str(old)) == errno.ECONNREFUSED:  # its gateway was killed
                    shutil.rmtree(old.parent, ignore_errors=True)
        self._place = tempfile.TemporaryDirectory(prefix="agentgym-gateway-", dir=home) if local else None
        self.socket = f"{self._place.name}/socket" if self._place is not None else ""
        self._by_key: dict[str, Episode] = {}
        self.schemas: dict[str, list[dict[str, Any]]] = {}  # of tools, by their digests: those in the record
        self._sampling: set[asyncio.Task[None]] = set()
        self._listening: list[asyncio.Server] = []

    async def __aenter__(self) -> Gateway:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock, loop = locks.hold(self.folder), asyncio.get_running_loop()
        try:
            self.record = DurableLines(self.folder / FILE)
            self._read_record()
            made = partial(web.BaseRequest, loop=loop, client_max_size=MOST_BYTES)
            self._http = web.Server(self._answer, request_factory=made)
            options: dict[str, Any] = {"loop": loop, "access_log": None, "keepalive_timeout": 600.0}
            connect = partial(Connection, self._http, **options)
            self._listening.append(await loop.create_server(connect, self.host, self.port, backlog=1024))
            self.port = self._listening[0].sockets[0].getsockname()[1]
            if self.socket:
                self._listening.append(await loop.create_unix_server(connect, self.socket, backlog=1024))
                os.chmod(self.socket, 0o666)  # a sandbox's user is another one
        except BaseException:
            for listening in self._listening:
                listening.close()
            os.close(self._lock)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for listening in self._listening:
            listening.close()
        if self._sampling:
            _, left = await asyncio.wait(self._sampling, timeout=CLOSE_SECONDS)
            for task in left:
                task.cancel()
        await self._http.shutdown(1.0)
        for episode in self.episodes.values():
            if news := episode.news():
                self.record.note({"episode": episode.id, **news})
        await self.record.close()
        if self._place is not None:
            self._place.cleanup()
        os.close(self._lock)

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def _read_record(self) -> None:
        forgotten: set[str] = set()  # a client may get its last answer, which is a line, after its episode was freed
        for number, line in enumerate(self.record.read(), start=1):
            try:
                if "open" in line:
                    opened, expires = line["times"]
                    limits = Limits(**line["limits"])
                    episode = Episode(line["open"], line["key"], limits, opened, expires, line["seed"])
                    self.episodes[episode.id] = self._by_key[episode.key_digest] = episode
                    forgotten.discard(episode.id)
                elif "schemas" in line:
                    self.schemas[line["tools"]] = line["schemas"]
                elif "forget" in line:
                    self._drop(line["forget"])
                    forgotten.add(line["forget"])
                elif "passed" not in line and line["episode"] not in forgotten:
                    self.episodes[line["episode"]].read(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.record.path}:{number}: not a line of a record: {error!r}") from error

    # ---- what a run does with episodes

    async def open(
        self, id: str | None = None, limits: Limits | None = None, seed: int | None = None, seconds: float = DAY_SECONDS
    ) -> tuple[Episode, str]:
        """A new episode and its key, which works for so many seconds. With a `seed` each call has a seed of its own.

        ValueError: there is an episode of this id, or it is no text, or the model has no price for a limit of cost.
        NotWritten: it cannot be recorded.
        """
        id = id or secrets.token_hex(8)
        if not isinstance(id, str):
            raise ValueError(f"an episode's id is a text, not {id!r:.50}")
        if id in self.episodes:
            raise ValueError(f"there is an episode {id!r} already")
        limits, model = limits or self.limits, self.backend.models[0]
        if limits.cost is not None and self.cost_of(model, {}) is None:
            raise ValueError(f"a limit of cost needs the price of the model, and the gateway has none of {model!r}")
        key, now = _new_key(), time.time()
        episode = Episode(id, _digest(key), limits, now, now + seconds, seed)
        about = {"key": episode.key_digest, "limits": episode.limits.given(), "times": [now, episode.expires]}
        self.episodes[id] = self._by_key[episode.key_digest] = episode
        try:
            await self.record.write({"open": id, **about, "seed": seed})
        except NotWritten:
            self._drop(id)
            raise
        return episode, key

    async def reward(self, id: str, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """Set an episode's reward; the last one counts. KeyError: there is no such episode."""
        await self._tell(id, {"reward": reward, "metrics": dict(metrics or {})})

    async def end(self, id: str, reason: str = "ended", complete: bool = True, killed: bool = False) -> None:
        """Refuse further calls of an episode, and wait for those being sampled. An incomplete episode must not be trained on.

        The calls of an agent that was `killed` are cancelled: nobody waits for their answers.
        """
        episode = self.episodes[id]
        await self._tell(id, {"end": reason, "complete": complete, **episode.news()})
        for exchange in list(episode.by_id.values()):
            if killed and exchange.sampling is not None:
                exchange.sampling.cancel()
            await exchange.news()

    def forget(self, id: str) -> None:
        """Free the memory of an ended episode. It stays in the record."""
        self._drop(id)
        self.record.note({"forget": id})

    async def _tell(self, id: str, news: dict[str, Any]) -> None:
        episode = self.episodes[id]
        await self.record.write({"episode": id, **news})
        episode.read(news)

    def _drop(self, id: str) -> None:
        del self._by_key[self.episodes.pop(id).key_digest]

    # ---- HTTP

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, key = request.path, _key_of(request)
        if path.startswith("/episodes/"):
            key, _, path = path.removeprefix("/episodes/").partition("/")
            path = f"/{path}"
        try:
            if path.startswith(_EPISODES):
                return await self._admin(request, path.removeprefix(_EPISODES).strip("/"))
            episode = self._by_key.get(_digest(key))
            if episode is None or episode.expires < time.time():
                raise Refused(401, "no episode has this key, or it has expired", "invalid_api_key")
            return await self._served(request, path, episode)
        except ConnectionError:
            return web.Response()  # the client has left, as aiohttp finds when it sends this
        except NotWritten as error:
            refused = _unrecorded(error)
        except web.HTTPRequestEntityTooLarge:
            refused = Refused(413, f"a request has at most {MOST_BYTES >> 20} MiB")
        except web.RequestPayloadError as error:
            refused = Refused(400, f"the body cannot be read: {error!s:.200}")
        except Refused as error:
            refused = error
        protocol = anthropic if path.startswith("/v1/messages") else chat
        return web.json_response(protocol.error(refused), status=refused.status)

    async def _served(self, request: web.BaseRequest, path: str, episode: Episode) -> web.StreamResponse:
        if (request.method, path) == ("GET", _MODELS):  # in the forms of both protocols
            names = [*self.backend.models, *self._passed]
            old = {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "agentgym"}
            data = [{"id": id, "object": "model", "type": "model", "display_name": id, **old} for id in names]
            ends = {"first_id": names[0], "last_id": names[-1]}
            return web.json_response({"object": "list", "data": data, "has_more": False, **ends})
        if request.method != "POST" or path not in (*_PROTOCOLS, _COUNT, _EMBEDDINGS, _MCP):
            status = 405 if path == _MCP else 404
            raise Refused(status, f"{request.method} {path:.100} is not served here")
        async with episode.reading:
            raw = await request.read()
        body = _object(raw)
        if path == _MCP:
            if episode.tools is None:
                raise Refused(404, "this episode has no tools")
            answer = await mcp.answer(body, episode.tools)
            return web.Response(status=202) if answer is None else web.json_response(answer)
        if passed := self._passed.get(str(body.get("model"))):
            if episode.ended is not None:
                raise episode.over()
            status, response = await passed.forward(request, path, raw)
            self.record.note({"episode": episode.id, "passed": body["model"], "path": path, "status": status})
            return response
        if path == _EMBEDDINGS:
            raise Refused(404, f"no model {body.get('model')!r:.80} is served here", "model_not_found")
        if path == _COUNT:
            (call,) = self._calls(anthropic, body, episode)
            return web.json_response({"input_tokens": await self.backend.count(call)})
        return await self._replied(request, path, raw, body, episode)

    async def _replied(
        self, request: web.BaseRequest, path: str, raw: bytes, body: dict[str, Any], episode: Episode
    ) -> web.StreamResponse:
        # A busy loop may get to a request after its retry on another connection. One round later it knows who has gone.
        await asyncio.sleep(0)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionError("the client has gone")
        asked = _MANNERS.sub(b"", raw)
        if (head := asked.rstrip()[:-1].rstrip()).endswith(b","):  # the last was left out
            asked = head[:-1] + b"}"
        digest = hashlib.blake2b(path.encode() + asked, digest_size=16).hexdigest()
        key, again = request.headers.get("Idempotency-Key"), request.headers.get("x-stainless-retry-count", "0") != "0"
        streams, protocol, client = body.get("stream") is True, _PROTOCOLS[path], cast(Connection, request.protocol)
        exchange = episode.find(digest, again, key)
        if exchange is None:
            read = self._calls(protocol, body, episode)
            calls = [call for each in read for call in _apart(each)]
            exchange = episode.begin(digest, key, calls, instructed=bool(body.get("instructions")))
            exchange.sampling = task = asyncio.create_task(self._sample(episode, exchange, path))
            self._sampling.add(task)
            task.add_done_callback(self._sampling.discard)
        client.ask(episode, exchange)
        await (exchange.news(0, PING_SECONDS) if streams else exchange.news())
        if exchange.error is not None:  # before a stream begins, an error has its own status
            raise exchange.error
        if streams:
            response = await self._stream(request, exchange, Stream(protocol, body, exchange))
        else:
            response = web.json_response(protocol.whole(body, exchange))
            await response.prepare(request)
            await response.write_eof()
        if exchange.error is None:
            client.sent()
        return response

    def _calls(self, protocol: Any, body: dict[str, Any], episode: Episode) -> list[ModelCall]:
        try:
            calls: list[ModelCall] = protocol.read(body, episode)
            for call in calls:
                call.after, call.streams = episode.tree.last_said(call.messages), body.get("stream") is True
                for kind, given in (
                    ("message", call.new_messages()),
                    ("tool", call.tools),
                    ("setting", call.settings.values()),
                ):
                    if max(map(levels, given), default=0) > MOST_LEVELS:
                        raise Refused(400, f"a {kind} has at most {MOST_LEVELS} lists and objects inside each other")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Refused(400, f"the request does not have the form of its protocol: {error!r:.200}") from error
        for call in calls:
            self.settings.settle(call, self.backend)
        return calls

    async def _sample(self, episode: Episode, exchange: Exchange, path: str) -> None:
        """Answer an exchange and record it, whether or not its client stays."""
        tools, after = exchange.asked[0].tools, exchange.asked[0].after
        digest = after.tools if after is not None else ""
        if tools != self.schemas.get(digest, []):
            digest = hashlib.blake2b(json.dumps(tools).encode(), digest_size=12).hexdigest() if tools else ""
        try:
            asked = [self._call(episode, exchange, digest, *each) for each in enumerate(exchange.asked)]
            calls = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)  # a task takes its time
            cost = sum(self.cost_of(self.backend.models[0], call.answer.usage) or 0.0 for call in calls)
            lines = [episode.line(exchange, path.removeprefix("/v1/"), calls, cost)]
            if digest and digest not in self.schemas:
                self.schemas[digest] = tools
                lines.insert(0, {"tools": digest, "schemas": tools})
            await self.record.write(*lines)
            episode.answered(exchange, calls, cost)
        except asyncio.CancelledError:
            episode.failed(exchange, episode.over())
            raise
        except Refused as error:
            episode.failed(exchange, error)
        except NotWritten as error:
            self.schemas.pop(digest, None)
            episode.failed(exchange, _unrecorded(error))
        except Exception as error:
            _log.exception("agentgym gateway: episode %s: the engine failed", episode.id)
            episode.failed(exchange, Refused(500, f"the engine failed: {error!r:.500}", "engine"))

    async def _call(self, episode: Episode, exchange: Exchange, tools: str, place: int, call: ModelCall) -> Call:
        answer = ModelAnswer(assistant(""), finish_reason="length")  # of a call that would exceed a limit
        if exchange.limit is None:
            answer = await self.backend.answer(call, episode.id, partial(exchange.tell, place))
        for kind, whole in answer.parts():
            said = "".join([text for number, each, text in exchange.pieces if (number, each) == (place, kind)])
            if not whole.startswith(said):
                raise RuntimeError(f"the {kind} of an answer does not begin with what was told of it")
        return episode.tree.grown(exchange.number + place, call, answer, tools)

    async def _stream(self, request: web.BaseRequest, exchange: Exchange, stream: Stream) -> web.StreamResponse:
        """Send the pieces as they come, and the end once the answer is on disk."""
        response, out, seen = web.StreamResponse(headers=_EVENTS), stream.step("begin"), 0
        await response.prepare(request)
        while True:
            pieces = exchange.pieces[seen:]
            seen += len(pieces)
            out += b"".join([stream.tell(*piece) for piece in pieces])
            if exchange.done:
                out += stream.end() if exchange.error is None else stream.step("failed", exchange.error)
                # In one piece: a client that leaves at the last event resets the connection if anything behind it is unread.
                await response.write_eof(out)
                return response
            await response.write(out or stream.step("ping") or PING)
            await exchange.news(seen, PING_SECONDS)
            out = b""

    # ---- the run's own routes

    async def _admin(self, request: web.BaseRequest, path: str) -> web.Response:
        if not hmac.compare_digest(_key_of(request).encode(errors="replace"), self.admin_key.encode()):
            raise Refused(401, "this takes the gateway's admin key", "invalid_api_key")
        # An id may have slashes, such as a trajectory's, "task/0".
        id, _, verb = path.rpartition("/") if request.method == "POST" else (path, "", "")
        body = _object(await request.read() or b"{}")
        try:
            if (request.method, path) == ("POST", ""):
                limits = Limits(**body["limits"]) if "limits" in body else None
                seconds = float(body.get("expires_seconds", DAY_SECONDS))
                if not 0 < seconds < math.inf:
                    raise ValueError(f"expires_seconds is a positive number, not {seconds}")
                episode, key = await self.open(body.get("id"), limits, body.get("seed"), seconds)
                where = {"base_url": f"{self.url}/v1", "keyed_url": f"{self.url}/episodes/{key}/v1"}
                return web.json_response({"key": key, **where, **episode.to_json()})
            if id not in self.episodes:
                raise Refused(404, f"there is no episode {id!r:.80}")
            if (request.method, verb) == ("POST", "reward"):
                if not math.isfinite(body["reward"]):
                    raise ValueError(f"reward is a number, not {body['reward']!r:.50}")
                metrics = body.get("metrics") or {}
                if not all(math.isfinite(value) for value in metrics.values()):
                    raise ValueError(f"metrics are numbers by name, not {metrics!r:.80}")
                await self.reward(id, body["reward"], metrics)
            elif (request.method, verb) == ("POST", "end"):
                await self.end(id, str(body.get("reason", "ended")), body.get("complete", True) is True)
            elif request.method == "DELETE":
                episode = self.episodes[id]
                if episode.ended is None:
                    await self.end(id)
                self.forget(id)
                return web.json_response(episode.to_json())
            elif (request.method, verb) != ("GET", ""):
                raise Refused(404, f"{request.method} {request.path:.100} is not served here")
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            raise Refused(400, str(error)) from error
        return web.json_response(self.episodes[id].to_json())


def _apart(call: ModelCall) -> list[ModelCall]:
    """The `n` answers of a call as separate calls with separate seeds."""
    given, first = dict(call.used), call.used.get("seed")
    seeds = [{} if first is None else {"seed": first + place} for place in range(given.pop("n", 1))]
    return [replace(call, used={**given, **seed}) for seed in seeds]


def _new_key() -> str:
    return f"ag-{secrets.token_urlsafe(24)}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _key_of(request: web.BaseRequest) -> str:
    bearer = request.headers.get("Authorization", "").partition(" ")[2].strip()
    return request.headers.get("x-api-key") or request.headers.get("api-key") or bearer


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object")
    return value


def _unrecorded(error: NotWritten) -> Refused:
    return Refused(507, f"nothing is answered that is not recorded: {error}", "record")
