"""The budget of a run, its usage so far, and token prices from the user's table. No prices are built in, since they go stale."""

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.core.trajectory import Trajectory
from agentgym.core.usage_error import instead
from agentgym.evaluate.plan import read_values
from agentgym.evaluate.results import summed, usage_of
from agentgym.policies.base import EndpointUsage, Policy


@dataclass(frozen=True)
class Budget:
    """Limits of a whole run; None means no limit. When one is reached, no new episode begins and running ones finish.

    Attributes:
        episodes: played, those that failed included.
        tokens: of prompts and answers, as the endpoints count them.
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

    def reached(self, spent: "Spent", seconds: float, running: Collection[Sequence[Policy]] = ()) -> str | None:
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

    def __iadd__(self, other: "Spent") -> "Spent":
        self.episodes += other.episodes
        self.tokens += other.tokens
        self.cost += other.cost
        return self

    @classmethod
    def of(cls, episode: Trajectory) -> "Spent":
        return cls(1, tokens_of(usage_of(episode)), episode.metadata.get("cost") or 0.0)


def tokens_of(usage: dict[str, int]) -> int:
    """Tokens read and written; cached and reasoning tokens are parts of these."""
    return usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)


def calls_of(tries: Iterable[Policy]) -> EndpointUsage | None:
    """The endpoint usage of all tries of one episode; None where no policy asks an endpoint."""
    found = [calls for policy in tries if isinstance(calls := getattr(policy, "calls", None), EndpointUsage)]
    if not found:
        return None
    retries, usage = (summed(getattr(calls, name) for calls in found) for name in ("retries", "usage"))
    requests, waited = sum(calls.requests for calls in found), sum(calls.waited for calls in found)
    return EndpointUsage(requests=requests, retries=retries, waited=waited, usage=usage)


MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """Of one model, in US dollars per million tokens. Reasoning counts as `output`; `cached_input` None: as `input`."""

    input: float
    output: float
    cached_input: float | None = None


@dataclass(frozen=True)
class Prices:
    """Prices by model: by its exact name, else by the longest pattern (`*`, `?`) that fits.

    A table is `my-model: {input: 0.15, output: 0.60, cached_input: 0.075}`, US dollars per million tokens.
    """

    by_model: Mapping[str, Price]

    @classmethod
    def load(cls, path: str | Path) -> "Prices":
        """The table of a YAML or JSON file. Raises ValueError, naming file, model and field."""
        return cls.from_json(read_values(Path(path)), str(path))

    @classmethod
    def from_json(cls, record: Any, where: str = "prices") -> "Prices":
        """The table of an object `{model: {input, output, cached_input}}`."""
        if not isinstance(record, Mapping) or not record:
            raise ValueError(f"{where}: a table of prices is {{model: {{input: $, output: $}}}}, not {record!r:.80}")
        return cls({str(model): _price(f"{where}: {model}", fields) for model, fields in record.items()})

    def to_json(self) -> dict[str, dict[str, float]]:
        return {
            model: {name: value for name, value in vars(price).items() if value is not None}
            for model, price in self.by_model.items()
        }

    def of(self, model: str) -> Price | None:
        fitting = [pattern for pattern in self.by_model if fnmatch.fnmatchcase(model, pattern)]
        return self.by_model.get(model) or (self.by_model[max(fitting, key=len)] if fitting else None)

    def cost(self, model: str, usage: Mapping[str, int]) -> float | None:
        """Cost in US dollars of counted tokens (see `Reply.usage`); None if the model has no price.

        Tokens that an endpoint does not count cost nothing here.
        """
        price = self.of(model)
        if price is None:
            return None
        prompt = usage.get("prompt_tokens", 0)
        cached = min(usage.get("cached_tokens", 0), prompt)
        read = price.input if price.cached_input is None else price.cached_input
        written = usage.get("completion_tokens", 0) * price.output
        return ((prompt - cached) * price.input + cached * read + written) / MILLION


def _price(where: str, fields: Any) -> Price:
    if not isinstance(fields, Mapping):
        wanted = "{input: $, output: $} is needed, US dollars per million tokens"
        raise ValueError(f"{where}: {wanted}, not {fields!r:.80}")
    names = tuple(Price.__dataclass_fields__)
    for name in (*fields, "input", "output"):
        value = fields.get(name)
        if name not in names:
            raise ValueError(f"{where}: no field {name!r}{instead(str(name), names)}")
        if name not in fields:
            raise ValueError(f"{where}: {name} is missing (US dollars per million tokens)")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{where}: {name} must be US dollars per million tokens, 0 or more, not {value!r}")
    return Price(**{str(name): float(value) for name, value in fields.items()})
