"""Seeds, batches and learning rates by their purpose, never by the order of events, so a resumed run continues as it would have."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

from agent_train.config.schema import Config
from agent_train.learner.roles import lr_scale

T = TypeVar("T")


def derive_seed(*parts: int | str) -> int:
    """A seed of 48 bits from a run's seed and its purpose: `derive_seed(run, "train", step, task, k)`, in every process the same."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def step_count(samples: int, size: int, epochs: int) -> int:
    """Optimizer steps of a run: the last batch of an epoch may be smaller than the others."""
    return -(-samples // size) * epochs


def batch_of_step(samples: Sequence[T], size: int, seed: int, step: int, purpose: str = "data") -> list[T]:
    """The batch of step `step`, from 1. Each epoch has every sample once, in a new order."""
    epoch, place = divmod(step - 1, -(-len(samples) // size))
    order = list(range(len(samples)))
    random.Random(derive_seed(seed, purpose, epoch)).shuffle(order)
    return [samples[i] for i in order[place * size :][:size]]


def rate_of_step(config: Config, step: int, steps: int) -> float:
    """The learning rate of step `step`, from 1, with the warm-up."""
    settings = config.learner
    return settings.lr * lr_scale(config, step, steps) * min(1.0, step / max(settings.warmup_steps, 1))
