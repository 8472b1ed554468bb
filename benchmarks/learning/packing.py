"""Packing against padding: forward and backward of the same rows end to end, and padded to the longest of their micro-batch.

Both sides are the learner's own model and head; a padded row is a row of the longest one's length whose end is in no loss. Rows
lie sorted by length in both, which is the best that padding can do. Their lengths are 32 + lognormal tokens.
"""

from __future__ import annotations

import dataclasses
import math
import random
from functools import partial
from typing import Any

from learning.sides import MODELS, in_turn, make_policy, make_row, train_once

from agent_train.data.packing import batch_of, rank_batches
from agent_train.data.samples import TrainingSample

BUDGET = 2048
ROWS = {"1M": 64, "44M": 24}


def padded(rows: list[TrainingSample]) -> list[list[TrainingSample]]:
    """Micro-batches of rows sorted by length, of at most BUDGET tokens with their padding."""
    batches: list[list[TrainingSample]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if not batches or len(batches[-1][0].ids) * (len(batches[-1]) + 1) > BUDGET:
            batches.append([])
        batches[-1].append(_longer(row, len((batches[-1] or [row])[0].ids)))
    return batches


def _longer(row: TrainingSample, size: int) -> TrainingSample:
    missing = size - len(row.ids)
    zeros = {name: [*getattr(row, name), *[0.0] * missing] for name in ("logprobs", "advantages")}
    return dataclasses.replace(row, ids=[*row.ids, *[0] * missing], mask=[*row.mask, *[False] * missing], **zeros)


def measure(quick: bool = False, rounds: int = 5) -> list[dict[str, Any]]:
    """CPU seconds of both sides for each model."""
    found = []
    for model in ("1M",) if quick else MODELS:
        rng, vocab = random.Random(0), MODELS[model].vocab
        sizes = [min(512, 8 + int(math.exp(rng.gauss(4.2, 0.8)))) for _ in range(16 if quick else ROWS[model])]
        rows = [make_row([1] * 24, size, rng, f"g{i}", vocab) for i, size in enumerate(sizes)]
        (batch,) = rank_batches(rows, 1, BUDGET)
        sides = {"packed": batch.batches(), "padded": [batch_of(own) for own in padded(batch.samples)]}
        policy = make_policy(model)
        least = in_turn({side: partial(train_once, policy, own) for side, own in sides.items()}, rounds)
        if abs(least["packed"][1] - least["padded"][1]) > 1e-4 * max(1.0, abs(least["packed"][1])):
            raise RuntimeError(f"the losses differ: {least}")
        row: dict[str, Any] = {"model": model, "rows": len(rows)}
        for side, own in sides.items():
            row[f"{side}_tokens"] = sum(len(batch.ids_T) for batch in own)
            row[f"{side}_cpu_seconds"] = round(least[side][0], 4)
        found.append(row | {"speedup": round(least["padded"][0] / least["packed"][0], 2)})
    return found
