"""The progress of a run: the loop's state in a checkpoint, from which the next step follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The loop's state between two training steps. The loop makes a new one for each step and never changes one.

    Attributes:
        step: training steps done, which is the version of the weights too.
        tasks: how many places of the endless row of tasks were taken (`generator.pick_tasks`); the next step begins there.
        kl_coef: the coefficient of the KL to the reference in the next step.
        episodes, tokens: trained and dropped ones alike: played to an end, and sampled in them.
    """

    step: int = 0
    tasks: int = 0
    kl_coef: float = 0.0
    episodes: int = 0
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object; floats keep every bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Progress:
        """The reverse of `to_json`.

        Raises:
            ValueError: a field is missing or unknown: another version wrote it.
        """
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names ^ set(record)):
            raise ValueError(f"not the progress of a run of this version: {wrong[0]!r} is missing or unknown")
        return cls(**record)
