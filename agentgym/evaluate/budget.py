"""The budget of a run, and its usage so far."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.results import usage_of
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

    def reached(self, tally: UsageCounter, running: Collection[Sequence[Policy]] = ()) -> str | None:
        """The limit that is reached ("episodes", "tokens", "cost", "seconds"), None where there is none.

        Args:
            tally: of what has ended.
            running: the episodes that run, each as the policies of its tries: their tokens are spent too.
        """
        if self.episodes is not None and tally.earlier.episodes + tally.episodes + len(running) >= self.episodes:
            return "episodes"
        if self.tokens is not None:
            spent = sum(tokens_of(calls.usage) for tries in running if (calls := calls_of(tries)))
            if tally.earlier.tokens + tally.tokens + spent >= self.tokens:
                return "tokens"
        if self.cost is not None and tally.earlier.cost + tally.cost >= self.cost:
            return "cost"
        if self.seconds is not None and time.monotonic() - tally.begun >= self.seconds:
            return "seconds"
        return None

    def to_json(self) -> dict[str, Any]:
        """The limits that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class Spent:
    """The usage of stored episodes."""

    episodes: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __iadd__(self, other: Spent) -> Spent:
        self.episodes += other.episodes
        self.tokens += other.tokens
        self.cost += other.cost
        return self

    def add(self, record: dict[str, Any]) -> None:
        """Count a stored trajectory."""
        metadata = record["metadata"]
        self.episodes += 1
        usage = (metadata.get("calls") or {}).get("usage")
        self.tokens += tokens_of(usage) if usage else sum(map(_stored_tokens, record["turns"]))
        self.cost += metadata.get("cost") or 0.0


@dataclass
class UsageCounter:
    """The usage of this start of a run; a display reads it while the run continues.

    Attributes:
        episodes: that ended, those that failed included.
        errors: episodes that failed.
        reward, success: sums over the episodes that did not fail.
        tokens: by the endpoints' count.
        cost: US dollars, of what has a price.
        requests, retries: of endpoints, those of failed tries included.
        earlier: what was already stored when this start began.
        begun: `time.monotonic()` of the start.
    """

    episodes: int = 0
    errors: int = 0
    reward: float = 0.0
    success: float = 0.0
    tokens: int = 0
    cost: float = 0.0
    requests: int = 0
    retries: int = 0
    earlier: Spent = field(default_factory=Spent)
    begun: float = field(default_factory=time.monotonic)

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode that has ended."""
        self.episodes += 1
        if trajectory.failed:
            self.errors += 1
        else:
            self.reward += trajectory.reward
            self.success += trajectory.success
        calls = trajectory.metadata.get("calls") or {}
        self.tokens += tokens_of(calls.get("usage") or usage_of(trajectory))
        self.cost += trajectory.metadata.get("cost") or 0.0
        self.requests += calls.get("requests", 0)
        self.retries += sum(calls.get("retries", {}).values())


def tokens_of(usage: dict[str, int]) -> int:
    """Tokens read and written; cached and reasoning tokens are parts of these."""
    return usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)


def _stored_tokens(turn: dict[str, Any]) -> int:
    """Of a stored turn, as `usage_of` counts them."""
    usage, tokens = turn.get("usage"), turn.get("tokens")
    if usage or not tokens:
        return tokens_of(usage or {})
    return tokens["shared"] + len(tokens["new_prompt_ids"]) + len(tokens["completion_ids"])


def calls_of(tries: Iterable[Policy]) -> EndpointUsage | None:
    """The endpoint usage of all tries of one episode; None where no policy asks an endpoint."""
    total = None
    for policy in tries:
        calls = getattr(policy, "calls", None)
        if isinstance(calls, EndpointUsage):
            total = total or EndpointUsage()
            total.requests += calls.requests
            total.waited += calls.waited
            for mine, theirs in ((total.retries, calls.retries), (total.usage, calls.usage)):
                for name, count in theirs.items():
                    mine[name] = mine.get(name, 0) + count
    return total
