"""What an update measures: sums and maxima per micro-batch, reduced over all ranks, and the means made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_train.algorithms.losses import k3, keep, log_ratio
from agent_train.packing import MicroBatch

# Sums over sampled tokens, except the loss, whose tokens are weighted already.
SUMS = ("loss", "tokens", "ratio", "clipped", "kl_k1", "kl_k3", "entropy", "gap", "gap_k3")
MAXIMA = ("ratio_max", "gap_max")


@dataclass(frozen=True)
class UpdateMetrics:
    """One update, over all ranks, micro-batches and optimizer steps. Means are over sampled tokens; nats.

    Attributes:
        loss: the token mean of the policy loss (the mean over the optimizer steps, where there are several).
        ratio_mean: of the trained policy to the proximal one. 1 where there is one optimizer step.
        ratio_max: the largest.
        clip_fraction: share of tokens that the clip holds back.
        kl_k1: KL(proximal || trained), estimated as the mean of -log ratio.
        kl_k3: the same, by the estimate that is never negative.
        entropy: of the policy, at its temperature.
        grad_norm: before clipping; the mean over the optimizer steps.
        gap_mean: mean |trainer's - engine's log-probability| of the sampled tokens, before the update.
        gap_max: the largest.
        gap_k3: KL(engine || trainer), the estimate that is never negative.
        tokens: sampled tokens.
        packed_tokens: tokens that went through the model, prompts too.
        lr: of the last optimizer step.
        skipped: optimizer steps left out because the loss or the gradient was not finite.
        seconds: wall time of rank 0.
    """

    loss: float
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    kl_k1: float
    kl_k3: float
    entropy: float
    grad_norm: float
    gap_mean: float
    gap_max: float
    gap_k3: float
    tokens: int
    packed_tokens: int
    lr: float
    skipped: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The metrics by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class SftMetrics:
    """One supervised step, over all ranks.

    Attributes:
        loss: mean negative log-likelihood of the masked tokens, nats.
        grad_norm: before clipping.
        tokens: masked tokens.
        lr: of the step.
        skipped: whether the weights were left as they are because the loss or the gradient was not finite.
        seconds: wall time of rank 0.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float
    skipped: bool
    seconds: float


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, reduced: sums and maxima by name, the gradient's norm, whether the weights were changed."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    applied: bool
    lr: float


@torch.no_grad()
def policy_sums(
    batch: MicroBatch, loss: Tensor, logprobs_T: Tensor, old_T: Tensor, entropy_T: Tensor, held_T: Tensor
) -> tuple[Tensor, Tensor]:
    """The SUMS and MAXIMA of one micro-batch as two fp64 vectors on its device; nothing is read back to the host."""
    mask_T = batch.mask_T
    log_ratio_T = keep(log_ratio(logprobs_T, old_T), mask_T)
    gap_T = keep(old_T - batch.behaviour_logprobs_T, mask_T)
    per_token = [
        mask_T,
        keep(log_ratio_T.exp(), mask_T),
        held_T,
        -log_ratio_T,
        k3(log_ratio_T),
        keep(entropy_T, mask_T),
        gap_T.abs(),
        k3(gap_T),
    ]
    sums = torch.stack([loss.double(), *(x_T.double().sum() for x_T in per_token)])
    maxima = torch.stack([keep(log_ratio_T.exp(), mask_T).max(), gap_T.abs().max()]).double()
    return sums, maxima


def summarise(steps: Sequence[StepResult], packed_tokens: int, seconds: float) -> UpdateMetrics:
    """The metrics of an update from its optimizer steps."""
    total = {name: math.fsum(step.sums[name] for step in steps) for name in SUMS}
    tokens = max(total["tokens"], 1.0)
    return UpdateMetrics(
        loss=total["loss"] / len(steps),
        ratio_mean=total["ratio"] / tokens,
        ratio_max=max(step.maxima["ratio_max"] for step in steps),
        clip_fraction=total["clipped"] / tokens,
        kl_k1=total["kl_k1"] / tokens,
        kl_k3=total["kl_k3"] / tokens,
        entropy=total["entropy"] / tokens,
        grad_norm=math.fsum(step.grad_norm for step in steps) / len(steps),
        gap_mean=total["gap"] / tokens,
        gap_max=max(step.maxima["gap_max"] for step in steps),
        gap_k3=total["gap_k3"] / tokens,
        tokens=int(total["tokens"]),
        packed_tokens=packed_tokens,
        lr=steps[-1].lr,
        skipped=sum(not step.applied for step in steps),
        seconds=seconds,
    )
