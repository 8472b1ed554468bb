"""Policy losses whose ratio belongs to a whole sequence. One value per token, as everywhere.

A sequence is what has one number in `segment_T`: a row of the micro-batch, or a turn where ratios are wanted turn by turn. Its
loss is written on each of its tokens, so that weights of 1 / (sequences * length), which are the papers' own reduction, give
the mean over sequences. A sequence lies in one micro-batch whole.

Legend: T tokens of one packed micro-batch, S sequences in it. `segment_T` is int64, the number of each token's sequence from 0 on;
`n_segments` is S, known on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, keep, log_ratio, single
from agent_train.algorithms.segments import segment_means, segment_sums


def sequence_log_ratio(logprobs_T: Tensor, old_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """On each token the log of its sequence's ratio: the mean of `log(p / old)` over the sampled tokens, clamped to +-20.

    The geometric mean of the tokens' ratios, `s` of GSPO (arXiv 2507.18071). Every token of a sequence gets the same number, those
    outside the mask too.
    """
    change_T = single(keep(logprobs_T, mask_T)) - single(keep(old_T, mask_T))
    means_S = segment_means(change_T, mask_T, segment_T, n_segments)
    return means_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[segment_T]


def gspo(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """PPO's clip on the ratio of the whole sequence, `-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`.

    GSPO (arXiv 2507.18071), whose ranges are the defaults: a mean of many log ratios is much nearer to 0 than one. All tokens of a
    sequence must have the same advantage; `gspo_token` is for those that differ.
    """
    ratio_T = sequence_log_ratio(logprobs_T, old_T, mask_T, segment_T, n_segments).exp()
    return _clip(ratio_T, keep(advantages_T, mask_T), clip_low, clip_high)


def gspo_token(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO with an advantage for each token: the value is the sequence's ratio, the gradient goes through the token alone.

    `s` is detached and multiplied by `p / detach(p)`, which is 1 (arXiv 2507.18071, section 4.3). Where the tokens of a sequence weigh
    and gain the same, value and gradient are those of `gspo`.
    """
    log_s_T = sequence_log_ratio(logprobs_T.detach(), old_T, mask_T, segment_T, n_segments)
    kept_T = single(keep(logprobs_T, mask_T))
    ratio_T = log_s_T.exp() * (kept_T - kept_T.detach()).exp()
    return _clip(ratio_T, keep(advantages_T, mask_T), clip_low, clip_high)


def gmpo(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """The geometric mean over a sequence of clipped ratios, times `-A` (GMPO, arXiv 2507.20673).

    Each token's log ratio is clipped by itself, on the side that its advantage pushes to: at `clip_high` from above where A > 0,
    at `-clip_low` from below elsewhere. The bounds are of the log ratio: 0.4 is the paper's range (e^-0.4, e^0.4).
    """
    advantages_T = keep(advantages_T, mask_T)
    change_T = log_ratio(keep(logprobs_T, mask_T), keep(old_T, mask_T))
    clamped_T = torch.where(advantages_T > 0, change_T.clamp(max=clip_high), change_T.clamp(min=-clip_low))
    return -segment_means(clamped_T, mask_T, segment_T, n_segments)[segment_T].exp() * advantages_T


def topr_sequence(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
) -> Tensor:
    """Likelihood where A > 0, and elsewhere weighed by `min(p / old, 1)` of the whole sequence, the product of its tokens.

    TOPR as written (arXiv 2503.14286); `policy_losses.topr` weighs token by token. The weight is detached.
    """
    advantages_T, kept_T = keep(advantages_T, mask_T), single(keep(logprobs_T, mask_T))
    change_T = kept_T.detach() - single(keep(old_T, mask_T))
    weight_T = segment_sums(change_T, mask_T, segment_T, n_segments).clamp(max=0.0).exp()[segment_T]
    return -torch.where(advantages_T > 0, 1.0, weight_T) * advantages_T * kept_T


def _clip(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
