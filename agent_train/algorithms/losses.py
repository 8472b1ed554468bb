"""PPO's clipped loss, and the parts that every loss is made of. Pure functions on tensors.

A policy loss is one value per token. `weighted_sum` adds them up: what a token weighs, and with it every mean, is decided
outside. Elementwise losses take no mask, since a masked cell touches only itself: `policy_loss.PolicyLoss` keeps what goes in
and what comes out. The other losses are in `sequence_losses` and `policy_losses`.

Legend: T tokens of one packed micro-batch. Log-probabilities are in nats. `old` is the proximal policy, at the start of
the training step; it is not the engine's (behaviour) policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: far outside any clip range, and its square still fits fp32.
MAX_LOG_RATIO = 20.0


def keep(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """`values_T` where the mask is True and 0 elsewhere, whatever is there.

    Multiplying by the mask would carry a NaN or an infinity through, and so would the gradient of a `where` applied only
    after the arithmetic: keep the inputs of a loss, then keep its result.
    """
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def single(values: Tensor) -> Tensor:
    """In fp32, or as it is where it is more precise: no ratio and no sum is computed in half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(logprobs_T: Tensor, old_T: Tensor) -> Tensor:
    """`log(p / old)` per token in fp32, clamped to +-20."""
    return (single(logprobs_T) - single(old_T)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate per token, `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`.

    PPO (arXiv 1707.06347) with the two bounds of DAPO (arXiv 2503.14476) and the dual clip of arXiv 1912.09729.

    Args:
        logprobs_T: log-probabilities under the policy that is trained.
        old_T: log-probabilities under the proximal policy, without gradient.
        advantages_T: advantage of each token.
        clip_low: how far the ratio counts below 1.
        clip_high: how far it counts above 1.
        dual_clip: the ratio up to which a negative advantage counts, above 1; None for no limit.

    Returns:
        loss_T, to be summed with weights by `weighted_sum`.

    Raises:
        ValueError: `dual_clip` is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, or null for none, not {dual_clip}")
    ratio_T = log_ratio(logprobs_T, old_T).exp()
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)


def clipped(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Which tokens `ppo_clip` holds back: their ratio is out of range on the side that their advantage pushes to, or past
    the dual clip."""
    ratio_T = log_ratio(logprobs_T, old_T).exp()
    high_T = (advantages_T > 0) & (ratio_T > 1.0 + clip_high)
    low_T = (advantages_T < 0) & (ratio_T < 1.0 - clip_low)
    if dual_clip is None:
        return high_T | low_T
    return high_T | low_T | ((advantages_T < 0) & (ratio_T > dual_clip))


def entropy_bonus(entropy_T: Tensor, mask_T: Tensor, coef: float) -> Tensor:
    """The entropy bonus of each token, `-coef * entropy` (arXiv 1602.01783).

    No correction for stale data multiplies it: the entropy is of the trained policy, whoever sampled the token.
    """
    return -coef * keep(single(entropy_T), mask_T)


def weighted_sum(loss_T: Tensor, weights_T: Tensor, mask_T: Tensor) -> Tensor:
    """The sum of the masked tokens' losses times their weights; with weights of 1 / N it is a part of the token mean."""
    return keep(keep(loss_T, mask_T) * weights_T, mask_T).sum()


def k3(log_ratio_T: Tensor) -> Tensor:
    """An estimate per token of KL(q || p) from samples of q, never negative, with `log_ratio_T = log(p / q)`.

    `exp(x) - x - 1`; see http://joschu.net/blog/kl-approx.html. The plain estimate, k1, is `-log_ratio_T`.
    """
    x_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(x_T) - x_T
