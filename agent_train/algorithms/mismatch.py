"""The mismatch of two policies on the tokens that one sampled: a fixed panel, summed over micro-batches and ranks.

Legend: T tokens of one packed micro-batch, K sums, M maxima. Log ratios are `log(o / b)` of tokens that b sampled: `b` is the
engine and `o` the trainer for the panel of the engine, `o` and `p` for the drift of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, k3, keep

SUMS = ("tokens", "k1", "k3", "abs", "ratio", "ratio_squared", "chi_square")
MAXIMA = ("abs",)


@dataclass(frozen=True)
class Mismatch:
    """The panel; means over sampled tokens, nats.

    Attributes:
        k1: KL(b || o), unbiased, of either sign.
        k3: the same, unbiased and never negative.
        chi_square: of o from b: the mean of (o / b - 1)^2, never negative. It is what importance weights cost in variance.
        ess: effective sample size of the weights o / b, as a share of the tokens: 1 where all weights are alike.
        abs_mean: mean |log ratio|.
        abs_max: the largest.
        tokens: how many.
    """

    k1: float
    k3: float
    chi_square: float
    ess: float
    abs_mean: float
    abs_max: float
    tokens: int


@torch.no_grad()
def mismatch_sums(log_ratio_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """`SUMS` and `MAXIMA` of one micro-batch as two fp64 vectors; the sums are added, the maxima compared, over all others.

    Args:
        log_ratio_T: log(o / b); what is outside the mask does not matter. Ratios are cut at e^+-20, logs are not.
        mask_T: True on sampled tokens, or on any part of them that is looked at alone (one version, one turn).
    """
    x_T = keep(log_ratio_T, mask_T).double()
    one_T = mask_T.double()
    ratio_T = keep(x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), mask_T)
    sums_K = [one_T, -x_T, k3(x_T), x_T.abs(), ratio_T, ratio_T.square(), (ratio_T - one_T).square()]
    largest = x_T.abs().max() if len(x_T) else x_T.sum()
    return torch.stack([s_T.sum() for s_T in sums_K]), largest[None]


def mismatch(sums_K: Sequence[float], maxima_M: Sequence[float]) -> Mismatch:
    """The panel from the reduced sums and maxima. Without tokens all is 0, and the effective sample size 1."""
    total = dict(zip(SUMS, map(float, sums_K), strict=True))
    largest = dict(zip(MAXIMA, map(float, maxima_M), strict=True))
    n = total["tokens"]
    mean = {name: value / n if n else 0.0 for name, value in total.items()}
    return Mismatch(
        k1=mean["k1"],
        k3=mean["k3"],
        chi_square=mean["chi_square"],
        ess=mean["ratio"] ** 2 / mean["ratio_squared"] if n else 1.0,
        abs_mean=mean["abs"],
        abs_max=largest["abs"],
        tokens=int(n),
    )
