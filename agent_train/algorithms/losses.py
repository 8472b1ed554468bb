"""The parts that losses are made of, and the critic's loss. A loss is one value per token; `weighted_sum` adds them up.

Legend: T tokens of one packed micro-batch, S samples (segments) in it. Log-probabilities are in nats. `old` is the
proximal policy, at the start of the training step; it is not the engine's (behaviour) policy.
"""

import torch
from torch import Tensor

# exp(20) is 5e8: far outside any clip range, and its square still fits fp32.
MAX_LOG_RATIO = 20.0


def keep(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """`values_T` where the mask is True and 0 elsewhere, whatever is there, NaN too.

    The gradient of a `where` after the arithmetic would carry it through: keep the inputs of a loss, then keep its
    result.
    """
    return torch.where(mask_T, values_T, torch.zeros((), dtype=values_T.dtype, device=values_T.device))


def running_sum(values: Tensor, dim: int) -> Tensor:
    """`cumsum`; on the host where a run is deterministic on a GPU, for which torch has no such sum of floats."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(dim).to(values.device)
    return values.cumsum(dim)


def single(values: Tensor) -> Tensor:
    """In fp32 or better: ratios and sums are never computed in half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(logprobs_T: Tensor, old_T: Tensor) -> Tensor:
    """`log(p / old)` per token in fp32, clamped to +-20."""
    return (single(logprobs_T) - single(old_T)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio_T: Tensor) -> Tensor:
    """KL(q || p) per token from samples of q, never negative: `exp(x) - x - 1` of `x = log(p / q)`; http://joschu.net/blog/kl-approx.html."""
    x_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(x_T) - x_T


def segment_sums(values_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """values_S: the sum of each segment's masked tokens, 0 where there are none. Differentiable."""
    sums_S = torch.zeros(n_segments, dtype=values_T.dtype, device=values_T.device)
    return sums_S.index_add(0, segment_T, keep(values_T, mask_T))


def segment_means(values_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """values_S: the mean of each segment's masked tokens, 0 where there are none. Differentiable."""
    sums_S = segment_sums(values_T, mask_T, segment_T, n_segments)
    counts_S = segment_sums(torch.ones_like(values_T), mask_T, segment_T, n_segments)
    return sums_S / counts_S.clamp(min=1.0)


def weighted_sum(loss_T: Tensor, weights_T: Tensor, mask_T: Tensor) -> Tensor:
    return keep(keep(loss_T, mask_T) * weights_T, mask_T).sum()


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """The critic's loss, `0.5 * max((V - R)^2, (clip(V, V_old +- clip) - R)^2)`, 0 outside the mask; and True on clipped values.

    The clip is that of PPO's implementation (arXiv 1707.06347; see arXiv 2005.12729): a value gains nothing by moving
    farther than `clip` from the one at the start of the training step, and still loses by being wrong. Clipped values
    left the range towards the return, and have no gradient. None is no limit.
    """
    values_T, returns_T = single(keep(values_T, mask_T)), single(keep(returns_T, mask_T))
    error_T = values_T - returns_T
    if clip is None:
        return 0.5 * error_T.square(), torch.zeros_like(mask_T)
    old_values_T = single(keep(old_values_T, mask_T))
    moved_T = values_T - old_values_T
    near_error_T = old_values_T + moved_T.clamp(-clip, clip) - returns_T
    clipped_T = mask_T & (near_error_T.abs() > error_T.abs()) & (moved_T.abs() > clip)
    return 0.5 * torch.maximum(error_T.square(), near_error_T.square()), clipped_T
