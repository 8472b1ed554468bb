"""Sides of a comparison, measured in turn on one thread of this process's CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from learning.flops import Shape
from transformers import Qwen3ForCausalLM

from agent_train.data.packing import MicroBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.attention import PACKED
from agent_train.learner.fsdp import plain
from agent_train.learner.head import PackedPolicy

MODELS = {"1M": Shape(128, 4, 4, 2, 32, 384, 512), "44M": Shape(512, 8, 8, 4, 64, 1536, 32768)}


def make_policy(name: str) -> PackedPolicy:
    """A model of `MODELS` with random weights, as the learner loads it."""
    torch.manual_seed(0)
    config = MODELS[name].config(max_position_embeddings=32768, attn_implementation=PACKED)
    return PackedPolicy(plain(Qwen3ForCausalLM(config), gradient_checkpointing=False), 1024)


def make_row(
    prompt: Sequence[int], completion: int, rng: random.Random, group: str = "", vocab: int = 512
) -> TrainingSample:
    """A row with a sampled completion of so many tokens, some of whose ids are drawn."""
    ids = [*prompt, *(rng.randrange(vocab) for _ in range(completion))]
    mask = [False] * len(prompt) + [True] * completion
    advantage = rng.gauss(0, 1)
    return TrainingSample(
        ids,
        mask,
        [0.0] * len(ids),
        trajectory=f"{group}/{rng.random()}",
        group=group,
        advantages=[advantage if on else 0.0 for on in mask],
    )


def train_once(policy: PackedPolicy, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """CPU seconds of forward and backward over the micro-batches; and the loss, to compare sides by."""
    policy.zero_grad(set_to_none=True)
    total, started = 0.0, time.process_time()
    for batch in batches:
        logprobs_T, _ = policy(batch)
        loss = -(logprobs_T * batch.advantages_T * batch.weights_T).sum()
        loss.backward()
        total += loss.item()
    return time.process_time() - started, total


def in_turn(sides: Mapping[str, Callable[[], tuple[float, float]]], rounds: int) -> dict[str, tuple[float, float]]:
    """Each side once to warm up, then all in turn; the least seconds of each, and its last other number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: [side()][:0] for name, side in sides.items()}
        for _ in range(rounds):
            for name, side in sides.items():
                found[name].append(side())
    finally:
        torch.set_num_threads(threads)
    return {name: (min(seconds for seconds, _ in runs), runs[-1][1]) for name, runs in found.items()}
