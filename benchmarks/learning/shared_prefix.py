"""What rows cost whose prefix is computed once: 8 rows that share P tokens, four times as many as an answer has (G = 8, P = 4R).

`prompt`: a group with one prompt, of P tokens. `system`: rows of 8 tasks, whose prompts begin with the same P tokens and have R
of their own. Three sides, forward and backward with the head: naive (each row whole), shared, and the floor: the same tokens as
rows that share nothing, so that no answer attends to the prefix. The goal: at most 15% above the naive side's seconds times the
tokens' ratio, (P + G*R) / (G*(P + R)) with one prompt. The head sees the same G*R tokens on all sides.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

from learning.sides import MODELS, in_turn, make_policy, make_row, train_once

from agent_train.data.packing import rank_batches
from agent_train.data.samples import TrainingSample

GROUP = 8
ANSWERS = {"1M": (32, 64, 128), "44M": (32, 64)}


def samples_of(model: str, answer: int, groups: int, own: int) -> dict[str, list[TrainingSample]]:
    """Rows with `own` prompt tokens behind the shared ones, and those of the floor: the prefix without a sampled token, and the rest."""
    rng, vocab = random.Random(0), MODELS[model].vocab
    rows, floor = [], []
    for number in range(groups):
        prefix = [rng.randrange(vocab) for _ in range(4 * answer)]
        for place in range(GROUP):
            name = f"task {number} {place}" if own else f"group {number}"
            prompt = [rng.randrange(vocab) for _ in range(own)]
            rows.append(make_row([*prefix, *prompt], answer, rng, name, vocab))
            # The first token of a row by itself has nothing that predicts it.
            floor.append(make_row(prompt or [0], answer - (not own), rng, "", vocab))
        floor.append(make_row(prefix, 0, rng, "", vocab))
    return {"naive": rows, "shared": rows, "floor": floor}


def measure(quick: bool = False, rounds: int = 5) -> list[dict[str, Any]]:
    """CPU seconds of each side, for each model and length of answers."""
    found = []
    for model in ("1M",) if quick else MODELS:
        policy = make_policy(model)
        answers = ANSWERS[model][:1] if quick else ANSWERS[model]
        for answer, what in product(answers, ("prompt", "system")):
            own, groups = answer if what == "system" else 0, max(1, 512 // answer // GROUP)
            sides = {}
            for side, rows in samples_of(model, answer, groups, own).items():
                (share,) = rank_batches(rows, 1, 4096, shared_prefix=side == "shared")
                sides[side] = partial(train_once, policy, share.batches())
            least = in_turn(sides, rounds)
            seconds = {side: least[side][0] for side in sides}
            if abs(least["naive"][1] - least["shared"][1]) > 1e-4 * max(1.0, abs(least["naive"][1])):
                raise RuntimeError(f"the losses differ: {least}")
            beyond = GROUP * (own + answer)
            tokens = (4 * answer + beyond) / (GROUP * 4 * answer + beyond)
            found.append(
                {
                    "model": model,
                    "what": what,
                    "group": GROUP,
                    "prompt": 4 * answer,
                    "answer": answer,
                    **{f"{side}_cpu_seconds": round(taken, 4) for side, taken in seconds.items()},
                    "tokens_ratio": round(tokens, 3),
                    "ratio": round(seconds["shared"] / seconds["naive"], 3),
                    "over_tokens": round(seconds["shared"] / seconds["naive"] / tokens - 1, 3),
                    "over_floor": round(seconds["shared"] / seconds["floor"] - 1, 3),
                }
            )
    return found
