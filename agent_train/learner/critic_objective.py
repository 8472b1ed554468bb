"""The critic's objective: the error of its values against the targets of the samples, `losses.value_loss`.

Legend: T tokens of one packed micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, value_clip_mask, value_loss, weighted_sum
from agent_train.data.packing import MicroBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.measures import OptimizerStep

# Sums over sampled tokens, except the loss, whose tokens are weighted already.
VALUE_SUMS = ("loss", "tokens", "value", "target", "target_square", "error", "error_square", "clipped")


@dataclass(frozen=True)
class CriticMetrics:
    """One update of the critic, over all ranks, micro-batches and optimizer steps. Means are over sampled tokens."""

    loss: float  # the weighted sum of half the squared errors; the mean over the optimizer steps
    # 1 - Var(target - value) / Var(target), with the values before each optimizer step: 1 is perfect, 0 as good as a
    # constant. 0 where the targets do not vary.
    explained_variance: float
    clip_fraction: float  # share of tokens that the clip holds back
    value_mean: float  # of the values, before each optimizer step
    return_mean: float  # of the targets
    error_max: float  # the largest |target - value|
    grad_norm: float  # before clipping; the mean over the optimizer steps
    lr: float  # of the last optimizer step
    skipped: int  # optimizer steps left out because the loss or the gradient was not finite
    seconds: float  # wall time of rank 0


def check_targets(samples: Sequence[TrainingSample], clip: float | None) -> None:
    """Raise ValueError where a sample with sampled tokens has no targets, or no old values where a clip needs them."""
    for sample in samples:
        for name in ("targets", *(["values"] if clip is not None else [])):
            if sample.sampled and not getattr(sample, name):
                why = "the critic learns" if name == "targets" else "critic.clip needs"
                raise ValueError(f"sample of trajectory {sample.trajectory!r} has no {name}, which {why}")


def critic_contribute(batch: MicroBatch, values_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The micro-batch's part of the critic's loss, its VALUE_SUMS, and the largest error."""
    mask_T, given = batch.mask_T, (values_T, batch.values_T, batch.targets_T, batch.mask_T)
    loss = weighted_sum(value_loss(*given, clip), batch.weights_T, mask_T)
    clip_mask_T = torch.zeros_like(mask_T) if clip is None else value_clip_mask(*given, clip)
    targets_T, kept_T = keep(batch.targets_T, mask_T).double(), keep(values_T.detach(), mask_T).double()
    error_T = targets_T - kept_T
    per_token = [mask_T, kept_T, targets_T, targets_T.square(), error_T, error_T.square(), clip_mask_T]
    sums = torch.stack([loss.detach().double(), *(x_T.detach().double().sum() for x_T in per_token)])
    return loss, sums, error_T.abs().max()[None]


def summarise_critic(steps: Sequence[OptimizerStep], seconds: float) -> CriticMetrics:
    total = {name: math.fsum(step.sums[place] for step in steps) for place, name in enumerate(VALUE_SUMS)}
    tokens = max(total["tokens"], 1.0)
    spread = total["target_square"] / tokens - (total["target"] / tokens) ** 2
    unexplained = total["error_square"] / tokens - (total["error"] / tokens) ** 2
    # Equal targets leave only rounding.
    varies = spread > 1e-12 * max(1.0, total["target_square"] / tokens)
    return CriticMetrics(
        loss=total["loss"] / len(steps),
        explained_variance=1.0 - unexplained / spread if varies else 0.0,
        clip_fraction=total["clipped"] / tokens,
        value_mean=total["value"] / tokens,
        return_mean=total["target"] / tokens,
        error_max=max(step.maxima[0] for step in steps),
        grad_norm=math.fsum(step.grad_norm for step in steps) / len(steps),
        lr=steps[-1].lr,
        skipped=sum(step.skipped for step in steps),
        seconds=seconds,
    )
