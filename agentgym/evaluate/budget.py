"""The budget of a run, and its usage so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.evaluate.results import summed
from agentgym.policies.base import EndpointUsage, Policy


@dataclass(frozen=True)
class Budget:
    """Limits of a whole run; None means no limit. When one is reached no episode is begun and those that run are finished.

    Attributes:
        episodes: played, those that failed included.
        tokens: read and written by models, by the endpoints' own count.
        cost: US dollars, by the user's table of prices.
        seconds: wall time of one start of the run.
        patience: seconds past `seconds` after which episodes that still run are cancelled; they are not stored.
    """

    episodes: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None
    patience: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"the limit of {name} must be positive, not {value!r}")

    def reached(self, spent: Spent, seconds: float, running: Collection[Sequence[Policy]] = ()) -> str | None:
        """The limit that is reached ("episodes", "tokens", "cost", "seconds"), else None.

        Args:
            spent: by all episodes that ended.
            seconds: since this start of the run.
            running: the policies of the tries of each episode that runs: their tokens are spent too.
        """
        if self.episodes is not None and spent.episodes + len(running) >= self.episodes:
            return "episodes"
        if self.tokens is not None:
            more = sum(tokens_of(calls.usage) for tries in running if (calls := calls_of(tries)))
            if spent.tokens + more >= self.tokens:
                return "tokens"
        if self.cost is not None and spent.cost >= self.cost:
            return "cost"
        return "seconds" if self.seconds is not None and seconds >= self.seconds else None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class Spent:
    episodes: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __iadd__(self, other: Spent) -> Spent:
        self.episodes += other.episodes
        self.tokens += other.tokens
        self.cost += other.cost
        return self

    def add(self, record: dict[str, Any]) -> None:
        metadata = record["metadata"]
        self.episodes += 1
        usage = (metadata.get("calls") or {}).get("usage")
        self.tokens += tokens_of(usage) if usage else sum(map(_stored_tokens, record["turns"]))
        self.cost += metadata.get("cost") or 0.0


def tokens_of(usage: dict[str, int]) -> int:
    """Tokens read and written; cached and reasoning tokens are parts of these."""
    return usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)


def _stored_tokens(turn: dict[str, Any]) -> int:
    usage, tokens = turn.get("usage"), turn.get("tokens")
    if usage or not tokens:
        return tokens_of(usage or {})
    return tokens["shared"] + len(tokens["new_prompt_ids"]) + len(tokens["completion_ids"])


def calls_of(tries: Iterable[Policy]) -> EndpointUsage | None:
    """The endpoint usage of all tries of one episode; None where no policy asks an endpoint."""
    found = [calls for policy in tries if isinstance(calls := getattr(policy, "calls", None), EndpointUsage)]
    if not found:
        return None
    retries, usage = (summed(getattr(calls, name) for calls in found) for name in ("retries", "usage"))
    requests, waited = sum(calls.requests for calls in found), sum(calls.waited for calls in found)
    return EndpointUsage(requests=requests, retries=retries, waited=waited, usage=usage)
