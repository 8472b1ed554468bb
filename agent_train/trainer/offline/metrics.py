"""Metrics of the modes sft, dpo and rm, and their display."""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

KINDS = {"sft": "sft", "dpo": "preference", "rm": "reward_model"}
HELD_OUT = "held_out"


@dataclass(frozen=True)
class _Measured:
    """A line of `metrics.jsonl`: the fields, and beside them the measures."""

    measures: dict[str, float]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """The reverse of `record`. A null was no finite number."""
        names = {field.name for field in fields(cls)} - {"measures"}
        numbers = {name: math.nan if value is None else value for name, value in record.items() if name != "elapsed"}
        measures = {name: value for name, value in numbers.items() if name not in names}
        return cls(measures=measures, **{name: numbers[name] for name in names})

    def record(self) -> dict[str, Any]:
        return {**{key: value for key, value in vars(self).items() if key != "measures"}, **self.measures}


@dataclass(frozen=True, kw_only=True)
class FileStep(_Measured):
    """One optimizer step of a mode.

    Attributes:
        kind: of the record: one of KINDS.
        step: from 1 to `steps`; `epoch` from 1.
        loss: before the step. Of sft nats a token, else the mean over the batch's pairs or answers.
        measures: before the step, means over the batch: accuracy, and of preferences the rewards beta * log(p / reference), of reward
            models the scores: margin, chosen, rejected.
        tokens: that were learned.
        grad_norm: before clipping.
        skipped: the weights were not changed, because the loss or the gradient was not finite.
    """

    kind: str
    step: int
    steps: int
    epoch: int
    loss: float
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool
    seconds: float

    def line(self) -> str:
        numbers = "  ".join(["", *_told(self.measures)]) if self.measures else ""
        skipped = "  skipped: not finite" if self.skipped else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}{numbers}  grad norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2g}  {self.tokens:,} tokens  {self.seconds:.1f} s{skipped}"
        )


@dataclass(frozen=True, kw_only=True)
class HeldOut(_Measured):
    """The examples of `data.test` with the weights of a step; `loss` and `measures` as in `FileStep`, means over all of them."""

    step: int
    loss: float
    examples: int
    kind: str = HELD_OUT

    def line(self) -> str:
        told = ", ".join([f"loss {self.loss:.4f}", *_told(self.measures)])
        return f"held-out after step {self.step}: {told} ({self.examples:,} examples)"


def closing(held_out: list[HeldOut], steps: list[FileStep], seconds: float) -> list[tuple[str, str]]:
    """The rows of the table at the end of a run."""
    rows = []
    if held_out:
        for name, one in (("held-out at the start", held_out[0]), ("held-out at the end", held_out[-1])):
            rows.append((name, ", ".join([f"loss {one.loss:.4f}", *_told(one.measures)])))
    elif steps:
        rows.append(("loss", f"{steps[0].loss:.4f} in the first step, {steps[-1].loss:.4f} in the last"))
    rows.append(("time", f"{seconds / 60:.1f} minutes"))
    rows.append(("training", f"{len(steps)} steps, {sum(step.tokens for step in steps):,} learned tokens"))
    return rows


def _told(measures: dict[str, float]) -> list[str]:
    return [
        f"{name.replace('_', ' ')} {value:.1%}" if name == "accuracy" else f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in measures.items()
        if math.isfinite(value)
    ]
