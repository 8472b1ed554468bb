"""Prices of tokens, from the user's table. None are built in: they go stale.

my-model: {input: 0.15, output: 0.60, cached_input: 0.075}      # US dollars per million tokens
"provider/*": {input: 3, output: 15}
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core.usage_error import instead

MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """Of one model, in US dollars per million tokens. Reasoning counts as `output`; `cached_input` None: as `input`."""

    input: float
    output: float
    cached_input: float | None = None


@dataclass(frozen=True)
class Prices:
    """Prices by model: by its exact name, else by the longest pattern (`*`, `?`) that fits. Empty where there is no table."""

    by_model: Mapping[str, Price] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path | None) -> Prices:
        """The table of a YAML or JSON file; None: an empty one. Raises ValueError, naming file, model and field."""
        return cls() if path is None else cls.from_json(_read(Path(path)), str(path))

    @classmethod
    def from_json(cls, record: Any, where: str = "prices") -> Prices:
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
        if model in self.by_model:
            return self.by_model[model]
        fitting = [pattern for pattern in self.by_model if fnmatch.fnmatchcase(model, pattern)]
        return self.by_model[max(fitting, key=len)] if fitting else None

    def cost(self, model: str, usage: Mapping[str, int]) -> float | None:
        """US dollars of what was counted (see `Reply.usage`); None where the model has no price.

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


def _read(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"prices {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prices {path}: not UTF-8 text") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"prices {path}: not valid {kind}: {' '.join(str(error).split())}") from error


def _price(where: str, fields: Any) -> Price:
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{where}: {{input: $, output: $}} is needed, US dollars per million tokens, not {fields!r:.80}"
        )
    names = tuple(Price.__dataclass_fields__)
    for name, value in fields.items():
        if name not in names:
            raise ValueError(f"{where}: no field {name!r}{instead(str(name), names)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {name} must be US dollars per million tokens, 0 or more, not {value!r}")
    for name in ("input", "output"):
        if name not in fields:
            raise ValueError(f"{where}: {name} is missing (US dollars per million tokens)")
    return Price(**{str(name): float(value) for name, value in fields.items()})
