"""Metrics of an update: sums and maxima per micro-batch, reduced over all ranks, and the means made from them.

Numbers are read back to the host once for each optimizer step.

Legend: T tokens of one packed micro-batch, K numbers that are measured, R ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent_train.algorithms.kl import mismatch, mismatch_sums
from agent_train.algorithms.losses import k3, keep, log_ratio
from agent_train.algorithms.policy_loss import LossInputs
from agent_train.data.packing import MicroBatch

Numbers = dict[str, Tensor]  # scalars by name
# Of a micro-batch and the model's output for it: the loss to differentiate, sums and maxima to report. The loss is among the sums.
MicroBatchLoss = Callable[[MicroBatch, Any], tuple[Tensor, Numbers, Numbers]]


@dataclass(frozen=True)
class UpdateMetrics:
    """One update of the policy, over all ranks, micro-batches and optimizer steps. Means are over sampled tokens; nats."""

    loss: float  # reduced as the settings say; the mean over the optimizer steps
    ratio_mean: (
        float  # of the trained policy to the proximal one, or to the engine's for `algorithm.proximal=behaviour`
    )
    ratio_max: float  # the largest
    clip_fraction: float  # share of tokens that the clip holds back: they have an advantage and no gradient by it
    kl_k1: float  # KL(proximal || trained), estimated as the mean of -log ratio
    kl_k3: float  # the same, by the estimate that is never negative
    entropy: float  # of the policy, at its temperature
    grad_norm: float  # before clipping; the mean over the optimizer steps
    gap_mean: float  # mean |trainer's - engine's log-probability| of the sampled tokens, before the update
    gap_max: float  # the largest
    gap_k3: float  # KL(engine || trainer), the estimate that is never negative
    tokens: int  # sampled tokens
    packed_tokens: int  # tokens that went through the model, prompts too
    lr: float  # of the last optimizer step
    skipped: int  # optimizer steps left out because the loss or the gradient was not finite
    seconds: float  # wall time of rank 0
    loss_policy: float = 0.0  # the policy's part of the loss, corrections included
    loss_kl: float = 0.0  # the part of the KL to the reference policy, times its coefficient
    loss_entropy: float = 0.0  # the part of the entropy bonus, times its coefficient
    kl_coef: float = 0.0  # coefficient of the KL in the loss
    kl_reference: float = 0.0  # KL(trained || reference) by the estimator `algorithm.kl.value`; 0 without a reference
    gap_k1: float = 0.0  # KL(engine || trainer), the estimate of either sign
    gap_chi_square: float = 0.0  # mean of (trainer / engine - 1)^2, what importance weights cost in variance
    gap_ess: float = 1.0  # effective sample size of the weights trainer / engine, as a share of the tokens
    correction_mean: float = 1.0  # factor of the policy's loss; 1 without a correction
    cut_fraction: float = 0.0  # share of tokens whose weight a correction cut to its cap
    dropped_fraction: float = 0.0  # share of tokens that a correction dropped
    staleness: float = 0.0  # versions that the trainer is ahead of the weights that sampled a token, before the update
    staleness_max: float = 0.0  # the largest
    # By the versions that a token's weights were older ("0", "1", ... `trainer.staleness`): `tokens`, and `mean`, `k1`, `k3`,
    # `chi_square` and `ess` of their gap. Without staleness, and of lags that no token has, there is none.
    gap_by_lag: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of any role, reduced over micro-batches and ranks: the same on every rank."""

    sums: dict[str, float]  # of the objective
    maxima: dict[str, float]  # of the objective
    grad_norm: float  # of the whole gradient, before clipping
    lr: float  # the learning rate
    skipped: bool  # the weights were left as they are, because the loss or the gradient was not finite
    tokens: int  # sampled tokens

    @property
    def loss(self) -> float:
        return self.sums["loss"]


def loss_alone(loss: Tensor) -> tuple[Tensor, Numbers, Numbers]:
    """A micro-batch's loss without other measures."""
    return loss, {"loss": loss.detach()}, {}


def reduced(
    measured: Sequence[Sequence[Numbers]], norm: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, float], dict[str, float], float]:
    """Sums and maxima over micro-batches and ranks: one collective, and the step's only wait for the device.

    `norm` is the gradient's, read back with the rest. `group` has the ranks that hold different tokens; None is all.
    """
    sums, maxima = measured[0]
    sums_K = torch.stack([torch.stack([x.double() for x in own.values()]) for own, _ in measured]).sum(0)
    maxima_K = [torch.stack([own[name].double() for _, own in measured]).amax() for name in maxima]
    local_K = torch.cat([sums_K, *(x[None] for x in maxima_K)])
    everyone = [torch.empty_like(local_K) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, local_K, group=group)
    all_RK = torch.stack(everyone)
    split = len(sums)
    values = torch.cat([all_RK[:, :split].sum(0), all_RK[:, split:].amax(0), norm.double()[None]]).tolist()
    return dict(zip(sums, values, strict=False)), dict(zip(maxima, values[split:-1], strict=True)), values[-1]


@torch.no_grad()
def policy_sums(
    batch: MicroBatch,
    weighted: Numbers,
    inputs: LossInputs,
    clip_mask_T: Tensor,
    *,
    start_T: Tensor | None,
    correction_T: Tensor | None,
    cap: float | None,
    kl_T: Tensor | None,
    version: int | None,
    lags: int,
) -> tuple[Numbers, Numbers]:
    """The sums over tokens and the maxima of one micro-batch, on its device; nothing is read back to the host.

    `weighted` is the loss and its parts. What nothing makes is None: `start_T`, the trainer's log-probabilities at the
    start of the update, `version` of its weights then; `correction_T`, the factor of the policy's loss, cut at `cap`;
    `kl_T`, estimates of the KL to the reference. The gap is also summed for each lag below `lags`.
    """
    mask_T, old_T, zeros_T = batch.mask_T, inputs.old_T, torch.zeros_like(inputs.logprobs_T)
    none_T = torch.zeros_like(mask_T)
    log_ratio_T = zeros_T if old_T is None else keep(log_ratio(inputs.logprobs_T, old_T), mask_T)
    compared_T = none_T if old_T is None else mask_T
    ratio_T = keep(log_ratio_T.exp(), compared_T)
    weight_T = mask_T if correction_T is None else correction_T
    dated_T = none_T if version is None else mask_T & (batch.versions_T >= 0)
    lag_T = keep((version or 0) - batch.versions_T, dated_T)
    per_token = {
        "tokens": mask_T,
        "entropy": zeros_T if inputs.entropy_T is None else keep(inputs.entropy_T, mask_T),
        "compared": compared_T,
        "ratio": ratio_T,
        "kl_k1": -log_ratio_T,
        "kl_k3": k3(log_ratio_T),
        "clipped": clip_mask_T,
        "correction": keep(weight_T, mask_T),
        "cut": none_T if correction_T is None or cap is None else mask_T & (weight_T >= cap),
        "dropped": none_T if correction_T is None else mask_T & (weight_T == 0),
        "referenced": none_T if kl_T is None else mask_T,
        "kl_reference": zeros_T if kl_T is None else keep(kl_T, mask_T),
        "dated": dated_T,
        "lag": lag_T,
    }
    gap_T = zeros_T if start_T is None else keep(start_T - batch.behaviour_logprobs_T, mask_T)
    gaps = {"gap_": none_T if start_T is None else mask_T}
    gaps |= {f"gap{lag}_": none_T if start_T is None else dated_T & (lag_T == lag) for lag in range(lags)}
    sums = {name: number.detach() for name, number in weighted.items()}
    sums |= {name: x_T.sum(dtype=torch.float64) for name, x_T in per_token.items()}
    for prefix, tokens_T in gaps.items():
        sums |= {prefix + name: number for name, number in mismatch_sums(gap_T, tokens_T).items()}
    return sums, {"ratio_max": ratio_T.max(), "lag_max": lag_T.max(), "gap_max": gap_T.abs().max()}


def totals(steps: Sequence[OptimizerStep]) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Sums and maxima over the optimizer steps of an update, and what all metrics say of them."""
    sums = {name: math.fsum(step.sums[name] for step in steps) for name in steps[0].sums}
    maxima = {name: max(step.maxima[name] for step in steps) for name in steps[0].maxima}
    of_steps = {
        "grad_norm": math.fsum(step.grad_norm for step in steps) / len(steps),
        "lr": steps[-1].lr,
        "skipped": sum(step.skipped for step in steps),
    }
    return sums, maxima, of_steps


def summarise(
    steps: Sequence[OptimizerStep], packed_tokens: int, seconds: float, kl_coef: float = 0.0, lags: int = 0
) -> UpdateMetrics:
    """`lags` as of `policy_sums`."""
    total, largest, of_steps = totals(steps)
    gap = _gap(total, "gap_")

    def mean(name: str, count: str = "tokens") -> float:
        return total[name] / max(total[count], 1.0)

    same_names: dict[str, Any] = {
        **{name: total[name] / len(steps) for name in ("loss", "loss_policy", "loss_kl", "loss_entropy")},
        **{f"gap_{name}": gap[name] for name in ("k1", "k3", "chi_square", "ess")},
        **of_steps,
    }
    return UpdateMetrics(
        **same_names,
        gap_mean=gap["mean"],
        gap_max=largest["gap_max"],
        ratio_mean=mean("ratio", "compared"),
        ratio_max=largest["ratio_max"],
        clip_fraction=mean("clipped"),
        kl_k1=mean("kl_k1", "compared"),
        kl_k3=mean("kl_k3", "compared"),
        entropy=mean("entropy"),
        tokens=int(total["tokens"]),
        packed_tokens=packed_tokens,
        seconds=seconds,
        kl_coef=kl_coef,
        kl_reference=mean("kl_reference", "referenced"),
        correction_mean=mean("correction"),
        cut_fraction=mean("cut"),
        dropped_fraction=mean("dropped"),
        staleness=mean("lag", "dated"),
        staleness_max=largest["lag_max"],
        gap_by_lag={str(lag): own for lag in range(lags) if (own := _gap(total, f"gap{lag}_"))["tokens"]},
    )


def _gap(total: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The panel of the tokens whose sums have these names."""
    sums = {name.removeprefix(prefix): number for name, number in total.items() if name.startswith(prefix)}
    found = mismatch(sums)
    return {"tokens": sums["tokens"], "mean": found.pop("abs"), **found}
