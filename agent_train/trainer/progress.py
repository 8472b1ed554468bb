"""The progress of a run: the loop's state in a checkpoint, from which the next step follows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The loop's state between two training steps.

    Attributes:
        step: training steps done, which is the version of the weights too.
        tasks: how many tasks of the endless sequence were taken (`sampler.pick_tasks`); the next step begins there.
        kl_coef: the coefficient of the KL to the reference in the next step.
        episodes, tokens: of all finished episodes, trained on or dropped.
    """

    step: int = 0
    tasks: int = 0
    kl_coef: float = 0.0
    episodes: int = 0
    tokens: int = 0

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Progress:
        """The reverse of `dataclasses.asdict`. Raises ValueError if another version wrote the record."""
        if wrong := sorted({field.name for field in fields(cls)} ^ set(record)):
            raise ValueError(f"not the progress of a run of this version: {wrong[0]!r} is missing or unknown")
        return cls(**record)
