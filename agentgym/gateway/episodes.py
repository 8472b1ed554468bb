"""An episode: its key, limits and calls; which request is a retry of which; and its lines of the record, from which it is made again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.core.messages import assistant
from agentgym.gateway.calls import ModelAnswer, ModelCall, Refused
from agentgym.gateway.tree import Call, Tree

EXPIRES_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Limits:
    """Limits of one episode; None: no limit. The call that would exceed one gets an empty answer, those after it an error.

    Attributes:
        turns: answered calls.
        tokens: read and written by the model. A call's `max_tokens` is cut to what is left.
        seconds: since the episode was opened; a call that began before goes on.
        cost: US dollars, by the gateway's prices.
    """

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (number and value > 0):
                raise ValueError(f"the limit of {name} is a positive number, not {value!r:.50}")


@dataclass(eq=False)
class Exchange:
    """One request and its answers, however often its client asks for them.

    Attributes:
        number: of its first call; the others follow.
        turn: which of the exchanges with the same digest it is; no two that were answered are the same.
        pieces: what was told so far: the place of the answer, TEXT or REASONING, and the text.
        answers: once they are on disk.
        clients: connections that wait for it (False) or were sent all of it (True).
        delivered: whether a client has all of it, as far as its connection tells.
        instructed: the prompt begins with the `instructions` of a Responses request.
    """

    number: int
    digest: str
    turn: int
    id: str
    began: float
    key: str | None = None
    limit: str | None = None
    instructed: bool = False
    calls: list[ModelCall] = field(default_factory=list)
    pieces: list[tuple[int, str, str]] = field(default_factory=list)
    answers: list[Call] = field(default_factory=list)
    error: Refused | None = None
    clients: dict[object, bool] = field(default_factory=dict)
    delivered: bool = False
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.answers) or self.error is not None

    def tell(self, place: int, kind: str, text: str) -> None:
        if text:
            self.pieces.append((place, kind, text))
            self.wake()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def news(self, seen: int, seconds: float | None = None) -> None:
        """Wait until it is done or there are more than `seen` pieces, at most so many seconds."""
        if self.done or len(self.pieces) > seen:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait([future], timeout=seconds)


class Episode:
    """One episode. `gateway.open` makes it."""

    def __init__(self, id: str, key_digest: str, limits: Limits, seed: int | None, expires: float, opened: float):
        self.id, self.key_digest, self.limits, self.seed = id, key_digest, limits, seed
        self.expires, self.opened = expires, opened
        self.tree = Tree()
        self.by_id: dict[str, Exchange] = {}
        self.ended: str | None = None  # why
        self.complete = False
        self.limit: str | None = None  # that was reached
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.turns = self.tokens = 0
        self.cost = 0.0
        self.changed = Counter[str]()  # settings that were not honoured
        self._by_digest: dict[str, list[Exchange]] = {}
        self._next = 0
        self._news: list[int] = []  # exchanges that were delivered since the last line
        self._arguments: dict[str, str] = {}  # of tool calls, as sampled

    # ---- requests

    def find(self, digest: str, again: bool, key: str | None) -> Exchange | None:
        """The exchange that a request is a retry of; None: it is a new one.

        Its client says so, by the same `Idempotency-Key` (`key`) or by a count of tries (`again`); or an equal request has nobody
        any more who waits for its answer or has got it.
        """
        same = self._by_digest.get(digest, [])
        if key is not None:
            return next((each for each in same if each.key == key), None)
        lost = next((each for each in same if not each.clients and not each.delivered), None)
        return lost or (same[-1] if same and again else None)

    def begin(self, digest: str, key: str | None, calls: list[ModelCall]) -> Exchange:
        """A new exchange. Raises `Refused` after the limit was reached; the call that reaches it is not to be sampled."""
        if self.ended is not None:
            raise Refused(403, f"the episode has ended: {self.ended}", "episode_ended")
        if self.limit is not None:
            raise Refused(403, f"the episode has reached its limit of {self.limit}", "episode_limit")
        same = self._by_digest.setdefault(digest, [])
        turn = next(n for n in range(len(same) + 1) if all(each.turn != n for each in same))
        exchange = Exchange(self._next, digest, turn, self._name(self._next), time.time(), key, self._reached(calls))
        self.limit = exchange.limit
        self._next += len(calls)
        if exchange.limit is None:
            self.turns += len(calls)
        exchange.calls = calls
        for place, call in enumerate(calls):
            if self.seed is not None:
                call.used["seed"] = _number(f"{self.seed}/{digest}/{turn}/{place}")
        same.append(exchange)
        self.by_id[exchange.id] = exchange
        return exchange

    def _reached(self, calls: Sequence[ModelCall]) -> str | None:
        """The limit that calls would exceed. Cuts their `max_tokens` to what is left."""
        limits = self.limits
        if limits.turns is not None and self.turns + len(calls) > limits.turns:
            return "turns"
        if limits.seconds is not None and time.time() - self.opened >= limits.seconds:
            return "seconds"
        if limits.cost is not None and self.cost >= limits.cost:
            return "cost"
        for call in calls if limits.tokens is not None else ():
            call.tokens_left = (limits.tokens or 0) - self.tokens
            # At least so much of the prompt is read.
            left = call.tokens_left - (call.after.depth if call.after else 0)
            if left < 1:
                return "tokens"
            call.used["max_tokens"] = min(call.used.get("max_tokens", left), left)
        return None

    def arguments_of(self, id: str, value: Any) -> str:
        """A tool call's arguments as they were sampled, if the value is theirs: a protocol may carry only the value."""
        said = self._arguments.get(id)
        if said is not None:
            try:
                if json.dumps(json.loads(said)) == json.dumps(value):
                    return said
            except ValueError:
                if isinstance(value, dict) and said in value.values():
                    return said
        return json.dumps(value, ensure_ascii=False)

    # ---- answers

    def polite(self, exchange: Exchange) -> list[Call]:
        """The empty answers that end an episode at its limit."""
        nothing = ModelAnswer(assistant(""), finish_reason="length")
        return [Tree().grown(exchange.number + n, ModelCall(""), nothing, "") for n in range(len(exchange.calls))]

    def answered(self, exchange: Exchange, answers: list[Call], cost: float) -> None:
        """Its answers are on disk."""
        exchange.answers = answers
        exchange.calls, exchange.pieces = [], []  # a stream that runs takes the rest from the answers
        if exchange.limit is None:
            self.cost += cost
            for call in answers:
                self.tree.add(call)
                self.changed.update(call.changed)
                usage = call.usage
                self.tokens += usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
                for said in call.message.get("tool_calls") or ():
                    self._arguments[said["id"]] = said["function"]["arguments"]
        exchange.wake()

    def failed(self, exchange: Exchange, error: Refused) -> None:
        """Its retry is a new exchange."""
        exchange.error = error
        self._by_digest[exchange.digest].remove(exchange)
        del self.by_id[exchange.id]
        if exchange.limit is None:
            self.turns -= len(exchange.calls)
        else:
            self.limit = None
        exchange.wake()

    def sent(self, exchange: Exchange, client: object) -> None:
        exchange.clients[client] = True

    def left(self, exchange: Exchange, client: object, lost: bool) -> None:
        """A client is gone, or has asked for something else; `lost`: what it was sent may not have reached it."""
        if exchange.clients.pop(client, False) and not lost and not exchange.delivered:
            exchange.delivered = True
            self._news.append(exchange.number)

    # ---- the record

    def opening(self) -> dict[str, Any]:
        limits = {name: value for name, value in vars(self.limits).items() if value is not None}
        times = {"opened": self.opened, "expires": self.expires}
        return {"open": self.id, "key": self.key_digest, "limits": limits, "seed": self.seed, **times}

    def line(self, exchange: Exchange, protocol: str, model: str, answers: Sequence[Call], cost: float) -> dict[str, Any]:
        """An answered exchange, and the exchanges that were delivered since the last such line."""
        names = ("number", "digest", "turn", "began", "key", "limit", "instructed")
        about = {name: value for name in names if (value := getattr(exchange, name)) not in (None, False)}
        calls = [call.to_json() for call in answers]
        told = {"protocol": protocol, "model": model, "ended": time.time(), "cost": cost, "calls": calls}
        return {"episode": self.id, **about, **told, **self.news()}

    def news(self) -> dict[str, list[int]]:
        delivered, self._news = self._news, []
        return {"delivered": delivered} if delivered else {}

    def read(self, line: Mapping[str, Any]) -> None:
        """Take a line of the record that is not the opening. Raises KeyError, TypeError, ValueError for another one."""
        if "calls" in line:
            number, digest = line["number"], line["digest"]
            given = {name: line[name] for name in ("key", "limit", "instructed") if name in line}
            exchange = Exchange(number, digest, line["turn"], self._name(number), line["began"], **given)
            self._by_digest.setdefault(digest, []).append(exchange)
            self.by_id[exchange.id] = exchange
            answers = [self.tree.read(call) for call in line["calls"]]
            self.limit = exchange.limit or self.limit
            self.turns += len(answers) if exchange.limit is None else 0
            self._next = max(self._next, number + len(answers))
            self.answered(exchange, answers, line["cost"])
        for number in line.get("delivered", ()):
            self.by_id[self._name(number)].delivered = True
        if "reward" in line:
            self.reward, self.metrics = line["reward"], line["metrics"]
        if "end" in line:
            self.ended, self.complete = line["end"], line["complete"]

    def _name(self, number: int) -> str:
        return hashlib.blake2b(f"{self.id}/{number}".encode(), digest_size=12).hexdigest()

    # ---- what is told of it

    def undelivered(self) -> set[int]:
        """The calls whose answers no client has, as far as is known. What an answered call goes on from was delivered."""
        gone = set()
        for exchange in self.by_id.values():
            has_it = exchange.delivered or any(exchange.clients.values())
            if not has_it and not any(call.children or call.followers for call in exchange.answers):
                gone |= {call.number for call in exchange.answers}
        return gone

    def share(self) -> dict[str, Any]:
        """See `Tree.share`."""
        return self.tree.share(self.undelivered(), incomplete=self.ended is not None and not self.complete)

    def to_json(self) -> dict[str, Any]:
        used = {"turns": self.turns, "tokens": self.tokens, "cost": self.cost}
        state = {"ended": self.ended, "complete": self.complete, "limit": self.limit}
        graded = {"reward": self.reward, "metrics": self.metrics, "changed": dict(self.changed), "share": self.share()}
        limits = {name: value for name, value in vars(self.limits).items() if value is not None}
        return {"id": self.id, **state, "expires": self.expires, "limits": limits, "used": used, **graded}


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
