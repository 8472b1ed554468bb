"""Metrics of an update: sums and maxima per micro-batch, reduced over all ranks, and the means made from them.

A fixed panel, the same whatever the objective is. Nothing is read back to the host but once for each optimizer step.

Legend: T tokens of one packed micro-batch, K numbers that are measured, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent_train.algorithms import mismatch as panel
from agent_train.algorithms.losses import k3, keep, log_ratio
from agent_train.algorithms.mismatch import mismatch, mismatch_sums
from agent_train.data.packing import MicroBatch

# What an objective makes of micro-batch i and what the model gave for it: the loss to differentiate, fp64 sums and maxima to report.
# The first sum is the loss.
MicroBatchLoss = Callable[[int, Any], tuple[Tensor, Tensor, Tensor]]

# The first four are sums of tokens weighted already, `gap_*` are those of the mismatch panel; the rest are sums over tokens.
_OWN_SUMS = (
    "loss",
    "loss_policy",
    "loss_kl",
    "loss_entropy",
    "tokens",
    "entropy",
    "compared",
    "ratio",
    "kl_k1",
    "kl_k3",
    "clipped",
    "correction",
    "cut",
    "dropped",
    "referenced",
    "kl_reference",
    "dated",
    "lag",
)
SUMS = (*_OWN_SUMS, *(f"gap_{name}" for name in panel.SUMS))
MAXIMA = ("ratio_max", "lag_max", *(f"gap_{name}_max" for name in panel.MAXIMA))


@dataclass(frozen=True)
class UpdateMetrics:
    """One update, over all ranks, micro-batches and optimizer steps. Means are over sampled tokens; nats.

    Attributes:
        loss: what is differentiated, reduced as the settings say (the mean over the optimizer steps, where there are several).
        ratio_mean: of the trained policy to what the loss's ratio divides by: the proximal policy, or the engine's where
            `algorithm.proximal` says so. 1 where there is one optimizer step and the proximal policy is recomputed.
        ratio_max: the largest.
        clip_fraction: share of tokens that the clip holds back: they have an advantage and no gradient.
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
        loss_policy: the policy's part of the loss, corrections included.
        loss_kl: the part of the KL to the reference policy, times its coefficient.
        loss_entropy: the part of the entropy bonus, times its coefficient.
        kl_coef: coefficient of the KL in the loss.
        kl_reference: KL(trained || reference) by the estimator `algorithm.kl.value`; 0 where rows have no reference.
        gap_k1: KL(engine || trainer), the estimate of either sign.
        gap_chi_square: mean of (trainer / engine - 1)^2, what importance weights cost in variance.
        gap_ess: effective sample size of the weights trainer / engine, as a share of the tokens.
        correction_mean: what a correction multiplies the policy's loss by; 1 without one.
        cut_fraction: share of tokens whose weight a correction cut to its cap.
        dropped_fraction: share of tokens that a correction dropped.
        staleness: how many versions the trainer is ahead of the weights that sampled a token, at the start of the update.
        staleness_max: the largest.
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
    loss_policy: float = 0.0
    loss_kl: float = 0.0
    loss_entropy: float = 0.0
    kl_coef: float = 0.0
    kl_reference: float = 0.0
    gap_k1: float = 0.0
    gap_chi_square: float = 0.0
    gap_ess: float = 1.0
    correction_mean: float = 1.0
    cut_fraction: float = 0.0
    dropped_fraction: float = 0.0
    staleness: float = 0.0
    staleness_max: float = 0.0


@dataclass(frozen=True)
class SftUpdate:
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
    """One optimizer step of any role, reduced over micro-batches and ranks: the same on every rank.

    Attributes:
        sums: what the objective sums, in its order; the first is the loss.
        maxima: what it compares.
        grad_norm: of the whole gradient, before clipping.
        applied: whether the weights were changed; not if the loss or the gradient was not finite.
        lr: the learning rate.
    """

    sums: list[float]
    maxima: list[float]
    grad_norm: float
    applied: bool
    lr: float


def reduced(
    measured: Sequence[tuple[Tensor, Tensor]], norm: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[list[float], list[float], float]:
    """Sums and maxima over micro-batches and ranks: one collective, and the step's only wait for the device.

    Args:
        measured: fp64 sums and maxima of each micro-batch.
        norm: the gradient's, the same on all ranks; it is read back with the rest.
        group: the ranks that hold different tokens; None is all.
    """
    sums_K = torch.stack([sums for sums, _ in measured]).sum(0)
    maxima_K = torch.stack([maxima for _, maxima in measured]).amax(0)
    local_K = torch.cat([sums_K, maxima_K])
    everyone = [torch.empty_like(local_K) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, local_K, group=group)
    all_RK = torch.stack(everyone)
    split = len(sums_K)
    values = torch.cat([all_RK[:, :split].sum(0), all_RK[:, split:].amax(0), norm.double()[None]]).tolist()
    return values[:split], values[split:-1], values[-1]


@dataclass(frozen=True)
class PolicyTerms:
    """The terms of one micro-batch's policy objective, without gradient. Per token where the name ends in T.

    Attributes:
        loss: the weighted sum that is differentiated.
        parts: its three parts: policy, KL, entropy.
        logprobs_T: of the policy that is trained.
        entropy_T: its entropy.
        old_T: what the loss's ratio divides by; None where nothing asks for it.
        start_T: the trainer's log-probabilities at the start of the update; None where they are not known.
        clip_mask_T: tokens that the clip holds back.
        correction_T: what the policy's loss was multiplied by; None where nothing corrects.
        cap: of the correction.
        kl_T: estimates of the KL to the reference; None where the rows have none.
        version: of the trainer's weights at the start of the update; None where it is not known.
    """

    loss: Tensor
    parts: tuple[Tensor, Tensor, Tensor]
    logprobs_T: Tensor
    entropy_T: Tensor
    old_T: Tensor | None
    start_T: Tensor | None
    clip_mask_T: Tensor
    correction_T: Tensor | None
    cap: float | None
    kl_T: Tensor | None
    version: int | None


@torch.no_grad()
def policy_sums(batch: MicroBatch, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """The SUMS and MAXIMA of one micro-batch as two fp64 vectors on its device; nothing is read back to the host."""
    mask_T = batch.mask_T
    none_T = torch.zeros_like(mask_T)
    zeros_T = torch.zeros_like(terms.logprobs_T)
    log_ratio_T = zeros_T if terms.old_T is None else keep(log_ratio(terms.logprobs_T, terms.old_T), mask_T)
    compared_T = none_T if terms.old_T is None else mask_T
    ratio_T = keep(log_ratio_T.exp(), compared_T)
    weight_T = mask_T if terms.correction_T is None else terms.correction_T
    cut_T = none_T if terms.correction_T is None or terms.cap is None else mask_T & (weight_T >= terms.cap)
    dropped_T = none_T if terms.correction_T is None else mask_T & (weight_T == 0)
    dated_T = none_T if terms.version is None else mask_T & (batch.versions_T >= 0)
    lag_T = keep((terms.version or 0) - batch.versions_T, dated_T)
    per_token = (
        mask_T,
        keep(terms.entropy_T, mask_T),
        compared_T,
        ratio_T,
        -log_ratio_T,
        k3(log_ratio_T),
        terms.clip_mask_T,
        keep(weight_T, mask_T),
        cut_T,
        dropped_T,
        none_T if terms.kl_T is None else mask_T,
        zeros_T if terms.kl_T is None else keep(terms.kl_T, mask_T),
        dated_T,
        lag_T,
    )
    known_T = none_T if terms.start_T is None else mask_T
    gap_T = zeros_T if terms.start_T is None else terms.start_T - batch.behaviour_logprobs_T
    gap_sums_K, gap_maxima_K = mismatch_sums(gap_T, known_T)
    totals = torch.stack([x_T.sum(dtype=torch.float64) for x_T in per_token])
    weighted = torch.stack([terms.loss, *terms.parts]).double()
    maxima = torch.stack([ratio_T.max().double(), lag_T.max().double()])
    return torch.cat([weighted, totals, gap_sums_K]), torch.cat([maxima, gap_maxima_K])


def summarise(steps: Sequence[StepResult], packed_tokens: int, seconds: float, kl_coef: float = 0.0) -> UpdateMetrics:
    """The metrics of an update from its optimizer steps."""
    total = {name: math.fsum(step.sums[k] for step in steps) for k, name in enumerate(SUMS)}
    largest = {name: max(step.maxima[k] for step in steps) for k, name in enumerate(MAXIMA)}
    gap = mismatch([total[f"gap_{name}"] for name in panel.SUMS], [largest[f"gap_{name}_max"] for name in panel.MAXIMA])

    def mean(name: str, count: str = "tokens") -> float:
        return total[name] / max(total[count], 1.0)

    return UpdateMetrics(
        loss=total["loss"] / len(steps),
        ratio_mean=mean("ratio", "compared"),
        ratio_max=largest["ratio_max"],
        clip_fraction=mean("clipped"),
        kl_k1=mean("kl_k1", "compared"),
        kl_k3=mean("kl_k3", "compared"),
        entropy=mean("entropy"),
        grad_norm=math.fsum(step.grad_norm for step in steps) / len(steps),
        gap_mean=gap.abs_mean,
        gap_max=gap.abs_max,
        gap_k3=gap.k3,
        tokens=int(total["tokens"]),
        packed_tokens=packed_tokens,
        lr=steps[-1].lr,
        skipped=sum(not step.applied for step in steps),
        seconds=seconds,
        loss_policy=total["loss_policy"] / len(steps),
        loss_kl=total["loss_kl"] / len(steps),
        loss_entropy=total["loss_entropy"] / len(steps),
        kl_coef=kl_coef,
        kl_reference=mean("kl_reference", "referenced"),
        gap_k1=gap.k1,
        gap_chi_square=gap.chi_square,
        gap_ess=gap.ess,
        correction_mean=mean("correction"),
        cut_fraction=mean("cut"),
        dropped_fraction=mean("dropped"),
        staleness=mean("lag", "dated"),
        staleness_max=largest["lag_max"],
    )
