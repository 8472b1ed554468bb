"""An episode: its key, limits and calls, the retries among its requests, its lines in the record, and reading them back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentgym.gateway.calls import ModelAnswer, ModelCall, Refused
from agentgym.gateway.mcp import Tools
from agentgym.gateway.tree import Call, Tree

DAY_SECONDS = 24 * 3600.0
MOST_READ = 4  # requests of an episode that are read at a time: others wait, on the wire, so that they take no memory


@dataclass(frozen=True)
class Limits:
    """Limits of an episode; None: no limit. The call that would exceed one gets an empty answer, those after it an error."""

    turns: int | None = None  # answered calls
    tokens: int | None = None  # read and written by the model; a call's `max_tokens` is cut to what is left
    seconds: float | None = None  # since the episode was opened; a call that runs then is finished
    cost: float | None = None  # US dollars

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"the limit of {name} is a positive number, not {value!r:.50}")

    def given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(eq=False)
class Exchange:
    """A request and its answers, however often its client asks for them."""

    number: int  # of its first call; those of the others follow
    digest: str
    turn: int  # which of the exchanges with its digest it is
    began: float
    key: str | None = None
    limit: str | None = None  # that it would exceed, so that its answers are empty
    instructed: bool = False  # its prompt begins with the `instructions` of a Responses request
    id: str = ""
    asked: list[ModelCall] = field(default_factory=list)  # until they are answered
    pieces: list[tuple[int, str, str]] = field(default_factory=list)  # told so far: number of the answer, kind, text
    calls: list[Call] = field(default_factory=list)  # once they are on disk
    error: Refused | None = None
    sampling: asyncio.Task[None] | None = None
    clients: dict[object, bool] = field(default_factory=dict)  # that wait for it, or were sent all of it (True)
    delivered: bool = False  # a client has all of it, as far as connections tell
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answers(self) -> list[ModelAnswer]:
        return [call.answer for call in self.calls]

    @property
    def done(self) -> bool:
        return bool(self.calls) or self.error is not None

    def tell(self, answer: int, kind: str, text: str) -> None:
        self.pieces.append((answer, kind, text))
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self, seen: float = math.inf, seconds: float | None = None) -> None:
        """Wait until it is done or has more than `seen` pieces, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.done and len(self.pieces) <= seen:
                    await self._changed.wait()


class Episode:
    """One episode; `Gateway.open` makes it."""

    def __init__(self, id: str, key_digest: str, limits: Limits, opened: float, expires: float, seed: int | None):
        self.id, self.key_digest, self.limits, self.seed = id, key_digest, limits, seed
        self.opened, self.expires = opened, expires
        self.tree = Tree()
        self.by_id: dict[str, Exchange] = {}
        self.ended: str | None = None  # why
        self.complete = False
        self.limit: str | None = None  # that was reached
        self.tools: Tools | None = None  # that its agent may call, by MCP
        self.refused: Refused | None = None  # the error of the last call that was answered or failed
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.turns = self.tokens = 0
        self.cost = 0.0
        self.changed = Counter[str]()  # settings that were not honoured
        self.reading = asyncio.Semaphore(MOST_READ)
        self._by_digest: dict[str, list[Exchange]] = {}
        self._failed = Counter[str]()  # errors that clients got and have not tried again, by the request's digest
        self._next = 0
        self._news: list[str] = []  # exchanges that were delivered since the last line
        self._arguments: dict[str, str] = {}  # of tool calls, as sampled

    # ---- requests

    def find(self, digest: str, again: bool, key: str | None) -> Exchange | None:
        """The exchange that a request is a retry of; None: it is a new one.

        A client says so by the `Idempotency-Key` of its first try (`key`), or by a count of tries (`again`). An equal request whose
        answer nobody has got or waits for is also one.
        """
        same = self._by_digest.get(digest, [])
        if key is not None:
            return next((each for each in same if each.key == key), None)
        if again and self._failed[digest]:
            self._failed[digest] -= 1
            return None
        lost = next((each for each in same if not each.clients and not each.delivered), None)
        return lost or (same[-1] if same and again else None)

    def begin(self, digest: str, key: str | None, asked: list[ModelCall], instructed: bool) -> Exchange:
        """A new exchange. Raises `Refused` once the episode has ended, or has had its empty answer."""
        if self.ended is not None or self.limit is not None:
            raise self.over()
        same = self._by_digest.setdefault(digest, [])
        turn = min({*range(len(same) + 1)} - {each.turn for each in same})
        for place, call in enumerate(asked if self.seed is not None else ()):
            seed = hashlib.blake2b(f"{self.seed}/{digest}/{turn}/{place}".encode(), digest_size=7)
            call.used["seed"] = int.from_bytes(seed.digest())
        self.limit = self._reached(asked)
        exchange = Exchange(self._next, digest, turn, time.time(), key, self.limit, instructed, asked=asked)
        self._next += len(asked)
        self.turns += len(asked) if self.limit is None else 0
        self._know(exchange)
        return exchange

    def over(self) -> Refused:
        """The refusal of a call after the episode has ended or reached a limit."""
        why = f"has ended: {self.ended}" if self.ended is not None else f"has reached its limit of {self.limit}"
        return Refused(403, f"the episode {why}", "episode_over")

    def _know(self, exchange: Exchange) -> None:
        exchange.id = hashlib.blake2b(
            f"{self.id}/{exchange.digest}/{exchange.turn}".encode(), digest_size=12
        ).hexdigest()
        self.by_id[exchange.id] = exchange
        self._by_digest.setdefault(exchange.digest, []).append(exchange)

    def _reached(self, asked: Sequence[ModelCall]) -> str | None:
        """The limit that calls would exceed. Cuts their `max_tokens` to what is left."""
        limits = self.limits
        if limits.turns is not None and self.turns + len(asked) > limits.turns:
            return "turns"
        if limits.seconds is not None and time.time() - self.opened >= limits.seconds:
            return "seconds"
        if limits.cost is not None and self.cost >= limits.cost:
            return "cost"
        if limits.tokens is not None:
            for call in asked:  # each has a part of what is left, and reads at least the ids that it goes on from
                left = (limits.tokens - self.tokens) // len(asked) - (call.after.depth if call.after else 0)
                if left < 1:
                    return "tokens"
                call.used["max_tokens"] = min(call.used.get("max_tokens", left), left)
        return None

    def arguments_of(self, id: str, value: Any) -> str:
        """A tool call's arguments as they were sampled, from a protocol that carries only their value; else as JSON."""
        said, told = self._arguments.get(id), json.dumps(value, ensure_ascii=False)
        if said is None or list(value.values()) == [said]:  # what fits no schema comes as a text in an object
            return said or told
        try:
            return said if json.dumps(json.loads(said), ensure_ascii=False) == told else told
        except ValueError:
            return told

    # ---- answers

    def answered(self, exchange: Exchange, calls: list[Call], cost: float) -> None:
        """Its answers are on disk."""
        # A stream that runs takes the rest from the answers.
        exchange.calls, exchange.asked, exchange.pieces = calls, [], []
        self.refused = None
        self.cost += cost
        for call in calls if exchange.limit is None else ():
            self.tree.add(call)
            self.changed.update(call.asked.changed)
            self.tokens += sum(call.answer.usage.get(f"{part}_tokens", 0) for part in ("prompt", "completion"))
            for said in call.answer.message.get("tool_calls") or ():
                if "id" in said:  # records of earlier versions may lack it
                    self._arguments[said["id"]] = said["function"]["arguments"]
        exchange.wake()

    def failed(self, exchange: Exchange, error: Refused) -> None:
        """A retry of it is a new exchange."""
        exchange.error = self.refused = error
        self._failed[exchange.digest] += bool(exchange.clients)
        self._by_digest[exchange.digest].remove(exchange)
        del self.by_id[exchange.id]
        self.turns -= len(exchange.asked) if exchange.limit is None else 0
        self.limit = None if exchange.limit is not None else self.limit
        exchange.wake()

    def left(self, exchange: Exchange, client: object, lost: bool) -> None:
        """A client is gone, or asks for something else; `lost`: it may not have got all that was sent."""
        if exchange.clients.pop(client, False) and not lost and not exchange.delivered:
            exchange.delivered = True
            self._news.append(exchange.id)

    # ---- the record

    def line(self, exchange: Exchange, protocol: str, calls: Sequence[Call], cost: float) -> dict[str, Any]:
        """An answered exchange, and those that were delivered since the last such line."""
        names = ("number", "digest", "turn", "began", "key", "limit", "instructed")
        about = {name: getattr(exchange, name) for name in names}
        told = {"protocol": protocol, "ended": time.time(), "cost": cost, "calls": [call.to_json() for call in calls]}
        return {"episode": self.id, "exchange": about, **told, **self.news()}

    def news(self) -> dict[str, list[str]]:
        delivered, self._news = self._news, []
        return {"delivered": delivered} if delivered else {}

    def read(self, line: Mapping[str, Any]) -> None:
        """Take a line of the record after the opening. Raises KeyError, TypeError or ValueError for a malformed one."""
        if "exchange" in line:
            exchange = Exchange(**line["exchange"])
            calls = [self.tree.read(call) for call in line["calls"]]
            self._know(exchange)
            self._next = max(self._next, exchange.number + len(calls))
            self.limit = self.limit or exchange.limit
            self.turns += len(calls) if exchange.limit is None else 0
            self.answered(exchange, calls, line["cost"])
        for id in line.get("delivered", ()):
            self.by_id[id].delivered = True
        if "reward" in line:
            self.reward, self.metrics = line["reward"], line["metrics"]
        if "end" in line:
            self.ended, self.complete = line["end"], line["complete"]

    # ---- what is told of it

    def undelivered(self) -> set[int]:
        """Calls whose answers no client is known to have. An answer that a later call goes on from was delivered."""
        gone: set[int] = set()
        for exchange in self.by_id.values():
            has_it = exchange.delivered or any(exchange.clients.values())
            if not has_it and not any(call.children or call.followers for call in exchange.calls):
                gone |= {call.number for call in exchange.calls}
        return gone

    def share(self) -> dict[str, Any]:
        """See `Tree.share`."""
        return self.tree.share(self.undelivered(), self.incomplete)

    @property
    def incomplete(self) -> bool:
        return self.ended is not None and not self.complete

    def to_json(self) -> dict[str, Any]:
        names = ("id", "ended", "complete", "limit", "expires", "reward", "metrics", "changed")
        used = {"turns": self.turns, "tokens": self.tokens, "cost": self.cost}
        state = {name: getattr(self, name) for name in names}
        return {**state, "limits": self.limits.given(), "used": used, "share": self.share()}
