"""Policy losses. Each gives one value per token, to be summed with weights.

Losses that read `segment_T` have one ratio for a whole sequence, a sample of the micro-batch, and write their loss on
each of its tokens, so that weights of 1 / (sequences * length) give the papers' mean over sequences.

Legend: T tokens of one packed micro-batch, S sequences in it, N sampled tokens of the optimizer step. `old` is the
proximal policy, `behaviour` the engine's, which sampled.
"""

import torch
from torch import Tensor

from agent_train.algorithms.losses import (
    MAX_LOG_RATIO,
    keep,
    log_ratio,
    running_sum,
    segment_means,
    segment_sums,
    single,
)


def ppo_clip(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO (arXiv 1707.06347), `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`.

    The two bounds are DAPO's (arXiv 2503.14476). `dual_clip` (arXiv 1912.09729) is the ratio up to which a negative
    advantage counts, above 1; None is no limit.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, or null for none, not {dual_clip}")
    loss_T = _clipped(log_ratio(logprobs_T, old_T).exp(), advantages_T, clip_low, clip_high)
    if dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)


def reinforce(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """`-A * log p`: the plain policy gradient (Williams 1992; arXiv 2402.14740 for language models)."""
    return -advantages_T * single(logprobs_T)


def cispo(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, clip_low: float = 1.0, clip_high: float = 0.28
) -> Tensor:
    """`-clip(p / old, 1 - clip_low, 1 + clip_high) * A * log p`, the weight detached (CISPO, arXiv 2506.13585).

    The paper has no lower bound, which is `clip_low` 1. `clip_high` is a distance from 1: an "epsilon_high" of 5 is 4.
    """
    weight_T = log_ratio(logprobs_T, old_T).exp().clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return -weight_T * advantages_T * single(logprobs_T)


def sapo(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """A soft gate in place of the clip, `-(4 / tau) * sigmoid(tau * (p / old - 1)) * A` (SAPO, arXiv 2511.20347).

    `tau_positive` is for A > 0, `tau_negative` for A <= 0; a larger one fades faster on both sides of ratio 1.
    """
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative)
    gate_T = torch.sigmoid(tau_T * (log_ratio(logprobs_T, old_T).exp() - 1.0))
    return -4.0 / tau_T * gate_T * advantages_T


def topr(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Likelihood where A > 0; where A < 0 weighed by `min(p / old, 1)`, detached (TOPR, arXiv 2503.14286), token by token."""
    weight_T = log_ratio(logprobs_T, old_T).clamp(max=0.0).exp().detach()
    return -torch.where(advantages_T > 0, 1.0, weight_T) * advantages_T * single(logprobs_T)


def raft_pp(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """PPO's loss on successes, 0 on the rest (RAFT++, arXiv 2504.11343), whose advantages are rewards of 1 and 0 without a baseline."""
    return ppo_clip(logprobs_T, old_T, advantages_T.clamp(min=0.0), clip_low, clip_high)


def kimi(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, tau: float = 0.1) -> Tensor:
    """`-A * log p + tau / 2 * (log p - log old)^2`: a pull back to the old policy in place of a clip (Kimi k1.5, arXiv 2501.12599).

    The difference is not clamped: the pull must not end where the policy has gone farthest.
    """
    logprobs_T = single(logprobs_T)
    return -advantages_T * logprobs_T + 0.5 * tau * (logprobs_T - single(old_T)).square()


def dppo(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    tau: float = 1e-3,
) -> Tensor:
    """`-keep * A * p / behaviour + tau * (log p - log behaviour)^2` (DPPO with the binary total variation, arXiv 2602.04879).

    `keep` drops tokens whose probability has moved beyond the range in the advantage's direction: a ratio of 3 matters
    little at probability 1e-4 and much at 0.3. The pull `tau` is on dropped tokens too.
    """
    moved_T = single(logprobs_T.detach()).exp() - single(behaviour_T).exp()
    keeps_T = ~(((advantages_T > 0) & (moved_T > high)) | ((advantages_T < 0) & (moved_T < -low)))
    surrogate_T = keep(log_ratio(logprobs_T, behaviour_T).exp() * advantages_T, keeps_T)
    return tau * (single(logprobs_T) - single(behaviour_T)).square() - surrogate_T


def aipo(logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, *, cap: float = 4.0) -> Tensor:
    """`-min(p / behaviour, cap) * A * log p`, the weight detached (AIPO, arXiv 2505.24034, cap 2 to 10)."""
    weight_T = log_ratio(logprobs_T, behaviour_T).exp().clamp(max=cap).detach()
    return -weight_T * advantages_T * single(logprobs_T)


def m2po_drift(logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor) -> Tensor:
    """`|log(p / behaviour)|` of each token that moved in its advantage's direction, 0 of the others: a clip could act on these."""
    moved_T = (single(logprobs_T) - single(behaviour_T)).detach()
    return (moved_T * advantages_T.sign()).clamp(min=0.0)


def m2po_limit(drift_N: Tensor, budget: float = 0.04) -> Tensor:
    """The smallest drift that `m2po` drops, so that the mean square of those that count and stay is at most `budget`; infinity if all stay.

    `drift_N` is `m2po_drift` of the whole optimizer step, where 0 does not count. Equal drifts all stay or none does.
    """
    counted_N = single(drift_N)[drift_N > 0].sort().values
    counts_N = torch.arange(1, len(counted_N) + 1, dtype=torch.float64, device=counted_N.device)
    # The mean of the n smallest never falls as n grows, so those within the budget come first.
    within_N = running_sum(counted_N.double().square(), 0) / counts_N <= budget
    none = torch.full((1,), torch.inf, dtype=counted_N.dtype, device=counted_N.device)
    return torch.cat([counted_N.masked_fill(within_N, torch.inf), none]).min()


def m2po(
    logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, drift_limit: Tensor, *, budget: float = 0.04
) -> Tensor:
    """`-A * p / behaviour` on tokens whose `m2po_drift` is below `drift_limit`, 0 on the rest (M2PO, arXiv 2510.01161, Algorithm 1).

    A token that moved against its advantage keeps the gradient that brings it back. `m2po_limit` makes the limit with
    `budget`, which is not read here.
    """
    keeps_T = m2po_drift(logprobs_T, behaviour_T, advantages_T) < drift_limit
    return -keep(log_ratio(logprobs_T, behaviour_T).exp() * advantages_T, keeps_T)


def sequence_log_ratio(logprobs_T: Tensor, old_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """On each token the log of its sequence's ratio, `s` of GSPO: the mean of `log(p / old)` over the sampled tokens, within +-20."""
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
    """PPO's clip on the ratio of the whole sequence, `-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)` (GSPO, arXiv 2507.18071).

    The ranges are the paper's: a mean of many log ratios is much nearer to 0 than one. All tokens of a sequence must
    have the same advantage.
    """
    ratio_T = sequence_log_ratio(logprobs_T, old_T, mask_T, segment_T, n_segments).exp()
    return _clipped(ratio_T, keep(advantages_T, mask_T), clip_low, clip_high)


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
    """GSPO with an advantage for each token (arXiv 2507.18071, section 4.3): `s` is detached and multiplied by `p / detach(p)`, which is 1."""
    log_s_T = sequence_log_ratio(logprobs_T.detach(), old_T, mask_T, segment_T, n_segments)
    kept_T = single(keep(logprobs_T, mask_T))
    ratio_T = log_s_T.exp() * (kept_T - kept_T.detach()).exp()
    return _clipped(ratio_T, keep(advantages_T, mask_T), clip_low, clip_high)


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

    Log ratios are clipped, to the paper's range: at `clip_high` from above where A > 0, at `-clip_low` from below
    elsewhere.
    """
    advantages_T = keep(advantages_T, mask_T)
    change_T = log_ratio(keep(logprobs_T, mask_T), keep(old_T, mask_T))
    clamped_T = torch.where(advantages_T > 0, change_T.clamp(max=clip_high), change_T.clamp(min=-clip_low))
    return -segment_means(clamped_T, mask_T, segment_T, n_segments)[segment_T].exp() * advantages_T


def topr_sequence(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int
) -> Tensor:
    """TOPR as written (arXiv 2503.14286): where A <= 0 weighed by `min(p / old, 1)` of the whole sequence, the product of its tokens."""
    advantages_T, kept_T = keep(advantages_T, mask_T), single(keep(logprobs_T, mask_T))
    change_T = kept_T.detach() - single(keep(old_T, mask_T))
    weight_T = segment_sums(change_T, mask_T, segment_T, n_segments).clamp(max=0.0).exp()[segment_T]
    return -torch.where(advantages_T > 0, 1.0, weight_T) * advantages_T * kept_T


def _clipped(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
