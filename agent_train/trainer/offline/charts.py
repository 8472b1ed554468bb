"""What the page of a run on files shows: numbers at the top, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_train.trainer.offline.metrics import HELD_OUT, KINDS
from agentgym.viewer.charts import Frame, Series, line_chart
from agentgym.viewer.page import PAGE

Record = dict[str, Any]

# Title, fields, whether they are shares.
CURVES = (
    ("Loss", ("loss",), False),
    ("Accuracy", ("accuracy",), True),
    ("Rewards or scores of the answers", ("chosen", "rejected"), False),
    ("Gradient norm", ("grad_norm",), False),
)


def file_steps(records: Sequence[Record]) -> list[Record]:
    """The optimizer steps of a mode that learns from files. Those of a warm start are none: they have no epoch."""
    return [record for record in records if record["kind"] in KINDS.values() and "epoch" in record]


def cards(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Title, number and remark of each number at the top of the page."""
    steps = file_steps(records)
    held_out = [record for record in records if record["kind"] == HELD_OUT and record["loss"] is not None]
    found = []
    for name, one in (("start", held_out[0]), ("end", held_out[-1])) if held_out else ():
        right = (
            f"accuracy {one['accuracy']:.1%}" if one.get("accuracy") is not None else f"{one['examples']:,} examples"
        )
        found.append((f"held-out loss, {name}", f"{one['loss']:.4f}", right))
    if steps:
        skipped = sum(step["skipped"] for step in steps)
        remark = f"{skipped:,} of them skipped" if skipped else f"{steps[-1]['epoch']} epochs"
        found.append(("optimizer steps", f"{len(steps):,}", remark))
        found.append(("learned tokens", f"{sum(step['tokens'] for step in steps):,}", ""))
    return found


def charts(records: Sequence[Record]) -> list[str]:
    """A curve for each number that the run has, with the held-out examples beside the batches."""
    steps, held_out = file_steps(records), [record for record in records if record["kind"] == HELD_OUT]
    found = []
    for title, keys, share in CURVES if steps else ():
        lines = [
            Series(f"{key}{suffix}", points)
            for key in keys
            for suffix, part in (("", steps), (", held out", held_out))
            if (points := [(r["step"], r[key]) for r in part if r.get(key) is not None])
        ]
        frame = (
            Frame(title, "optimizer step", percent=True, y_range=(0, 1)) if share else Frame(title, "optimizer step")
        )
        if lines:
            found.append(line_chart(lines, frame, PAGE))
    return found
