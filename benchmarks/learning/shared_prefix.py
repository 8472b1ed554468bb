"""What rows cost whose prompt is computed once: a group of 8 with prompts four times as long as the answers (G = 8, P = 4R).

Three sides, forward and backward with the head: naive (each row whole), shared, and the floor: the same tokens, P + G*R, as rows
that share nothing, so that no answer attends to the prompt. The goal: at most 15% above the naive side's seconds times the
tokens' ratio, (P + G*R) / (G*(P + R)). The head sees the same G*R tokens on all sides.

python benchmarks/learning/shared_prefix.py
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from typing import Any

from agent_train.data.packing import rank_batches
from agent_train.data.samples import TrainingSample

try:
    from learning.sides import MODELS, in_turn, make_policy, make_row, train_once
except ImportError:  # run alone
    from sides import MODELS, in_turn, make_policy, make_row, train_once

GROUP = 8
ANSWERS = {"1M": (32, 64, 128), "44M": (32, 64)}


def samples_of(model: str, answer: int, groups: int) -> dict[str, list[TrainingSample]]:
    """The rows of the group, and those of the floor: a prompt without a sampled token, and the answers by themselves."""
    rng, vocab = random.Random(0), MODELS[model][-1]
    group, floor = [], []
    for number in range(groups):
        prompt = [rng.randrange(vocab) for _ in range(4 * answer)]
        group += [make_row(prompt, answer, rng, f"g{number}", vocab) for _ in range(GROUP)]
        floor += [make_row(prompt, 0, rng, "", vocab)]
        # The first token of a row by itself has nothing that predicts it.
        floor += [make_row([0], answer - 1, rng, "", vocab) for _ in range(GROUP)]
    return {"naive": group, "shared": group, "floor": floor}


def measure(quick: bool = False, rounds: int = 5) -> list[dict[str, Any]]:
    """CPU seconds of each side, for each model and length of answers."""
    found = []
    for model in ("1M",) if quick else MODELS:
        policy = make_policy(model)
        for answer in ANSWERS[model][:1] if quick else ANSWERS[model]:
            groups = max(1, 512 // answer // GROUP)
            sides = {}
            for side, rows in samples_of(model, answer, groups).items():
                (share,) = rank_batches(rows, 1, 4096, shared_prefix=side == "shared")
                sides[side] = partial(train_once, policy, share.batches())
            least = in_turn(sides, rounds)
            seconds = {side: least[side][0] for side in sides}
            if abs(least["naive"][1] - least["shared"][1]) > 1e-4 * max(1.0, abs(least["naive"][1])):
                raise RuntimeError(f"the losses differ: {least}")
            found.append(
                {
                    "model": model,
                    "group": GROUP,
                    "prompt": 4 * answer,
                    "answer": answer,
                    **{f"{side}_cpu_seconds": round(own, 4) for side, own in seconds.items()},
                    "tokens_ratio": round((4 + GROUP) / (GROUP * 5), 3),
                    "ratio": round(seconds["shared"] / seconds["naive"], 3),
                    "over_tokens": round(seconds["shared"] / seconds["naive"] * GROUP * 5 / (4 + GROUP) - 1, 3),
                    "over_floor": round(seconds["shared"] / seconds["floor"] - 1, 3),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest case only")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least counts (default: 5)")
    args = parser.parse_args()
    rows = measure(args.quick, args.rounds)
    print(
        "| model | P | R | naive CPU s | shared CPU s | floor CPU s | shared / naive (tokens) | above the tokens' ratio | above the floor |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{row[f'{side}_cpu_seconds']:.3f}" for side in ("naive", "shared", "floor"))
        ratios = f"{row['ratio']:.2f} ({row['tokens_ratio']:.2f}) | {100 * row['over_tokens']:+.0f}% | {100 * row['over_floor']:+.0f}%"
        print(f"| {row['model']} | {row['prompt']} | {row['answer']} | {times} | {ratios} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
