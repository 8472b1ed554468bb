"""Optimizer steps by TRL's GRPOTrainer, in this process. The last line of the output is JSON.

The rows of the case come in through `rollout_func` and their rewards through a reward function; what those two take is
taken off the step again. With --generate the trainer samples by its own default, `model.generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from cases import read_case, reward_of, tokens_of

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROWS_AT_A_TIME = 8  # TRL's default of per_device_train_batch_size


class Clock(TrainerCallback):
    """CPU seconds of each step, without what was spent in `outside` calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._outside = 0.0

    def outside(self, function: Any) -> Any:
        """The same function, its time counted as no part of a step."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._outside += time.process_time() - began

        return counted

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began, self._outside = time.process_time(), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self._began - self._outside)


class KeepGradients(TrainerCallback):
    """Before the first optimizer step, write the (clipped) gradients."""

    def __init__(self, path: Path):
        self.path = path

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.path.exists():
            torch.save({name: p.grad for name, p in model.named_parameters()}, self.path)


def replay(case: dict[str, Any]) -> Any:
    """A rollout function that gives the case's rows; each prompt comes once for each of its completions, side by side."""
    groups = {group["prompt"]: group for group in case["groups"]}

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "row_reward": []}
        for place, prompt in enumerate(prompts):
            group = groups[prompt]
            sample = place % len(group["completions"])
            found["prompt_ids"].append(list(group["ids"]))
            found["completion_ids"].append(list(group["completions"][sample]))
            found["row_reward"].append(group["rewards"][sample])
        return {**found, "logprobs": [[0.0] * len(ids) for ids in found["completion_ids"]]}

    return rollout


def row_reward(completion_ids: list[list[int]], row_reward: list[float] | None = None, **kwargs: Any) -> list[float]:
    """That of the case's row, or of what was sampled."""
    return row_reward or [reward_of(ids) for ids in completion_ids]


def settings(case: dict[str, Any], args: argparse.Namespace, out: Path) -> GRPOConfig:
    """The same objective and optimizer as our side's; everything else is TRL's default."""
    rows = sum(len(group["completions"]) for group in case["groups"])
    at_a_time = min(ROWS_AT_A_TIME, rows)
    return GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        max_steps=args.steps,
        per_device_train_batch_size=at_a_time,
        gradient_accumulation_steps=rows // at_a_time,
        gradient_checkpointing=args.checkpointing,
        num_generations=len(case["groups"][0]["completions"]),
        max_completion_length=args.generate or max(len(i) for g in case["groups"] for i in g["completions"]),
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1000,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gradients", type=Path)
    parser.add_argument("--generate", type=int, default=0, help="most tokens of a completion; 0: the case's rows")
    parser.add_argument("--checkpointing", action="store_true", help="TRL's default; ours is without")
    args = parser.parse_args()
    torch.set_num_threads(1)
    case, clock = read_case(args.folder), Clock()
    trainer = GRPOTrainer(
        model=str(args.folder / "model"),
        reward_funcs=clock.outside(row_reward),
        args=settings(case, args, args.folder / "trl"),
        train_dataset=Dataset.from_list([{"prompt": group["prompt"]} for group in case["groups"]]),
        rollout_func=None if args.generate else clock.outside(replay(case)),
        callbacks=[clock, *([KeepGradients(args.gradients)] if args.gradients else [])],
    )
    sampled: list[int] = []
    generate = trainer._generate_single_turn

    def counting(*given: Any, **named: Any) -> Any:
        ids, logprobs = generate(*given, **named)
        sampled.append(sum(map(len, ids)))
        return ids, logprobs

    trainer._generate_single_turn = counting
    trainer.train()
    tokens = sampled if args.generate else [tokens_of(case["groups"])] * args.steps
    found = {"seconds": clock.seconds, "tokens": tokens}
    print(json.dumps({**found, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
