"""The examples and learning rate of a step, from its number alone, so that a resumed run continues as it would have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from agent_train.config.schema import Config
from agent_train.learner.roles import lr_scale
from agent_train.trainer.seeds import derive_seed

T = TypeVar("T")


def step_count(samples: int, size: int, epochs: int) -> int:
    """Optimizer steps of a run: the last batch of an epoch may be smaller than the others."""
    return -(-samples // size) * epochs


def batch_of_step(samples: Sequence[T], size: int, seed: int, step: int) -> list[T]:
    """The batch of step `step`, from 1, by these arguments alone. Each epoch has every sample once, in a new order."""
    epoch, place = divmod(step - 1, -(-len(samples) // size))
    order = list(range(len(samples)))
    random.Random(derive_seed(seed, "data", epoch)).shuffle(order)
    return [samples[i] for i in order[place * size :][:size]]


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate of step `step`, from 1: constant, or falling in a line to 1/steps of it at the last, times the warm-up."""
    settings = config.learner
    return settings.lr * lr_scale(config, step, steps) * min(1.0, step / max(settings.warmup_steps, 1))
