"""Policy losses token by token, besides PPO's. Each gives one value per token, to be summed with weights.

Two kinds. Those that differentiate a ratio lose the gradient of a token that a clip holds back. Those that differentiate `A * log p`
with a detached weight keep every token's gradient and bound its size.

Legend: T tokens of one packed micro-batch. `old` is the proximal policy, `behaviour` the engine's, which sampled. A loss that
reads `behaviour_T` closes that gap itself, and no correction weight may be added to it. Where `old` was not recomputed
and the engine's log-probabilities stand in for it, a loss of `old_T` is one of the behaviour policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, log_ratio, ppo_clip, single


def reinforce(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """`-A * log p`: the plain policy gradient (Williams 1992; arXiv 2402.14740 for language models)."""
    return -advantages_T * single(logprobs_T)


def cispo(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, clip_low: float = 1.0, clip_high: float = 0.28
) -> Tensor:
    """`-clip(p / old, 1 - clip_low, 1 + clip_high) * A * log p`, the weight detached (CISPO, arXiv 2506.13585).

    No token loses its gradient. The paper leaves the lower bound off, which is `clip_low` 1. `clip_high` is a distance from 1: a peer's
    "epsilon_high 5", meant as the bound itself, is 4 here.
    """
    weight_T = log_ratio(logprobs_T, old_T).exp().clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return -weight_T * advantages_T * single(logprobs_T)


def sapo(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """A soft gate in place of the clip, `-(4 / tau) * sigmoid(tau * (p / old - 1)) * A` (SAPO, arXiv 2511.20347).

    At ratio 1 its gradient is that of the ratio; it fades on both sides, faster with a larger tau. `tau_positive` is for A > 0,
    `tau_negative` for A <= 0; both positive.
    """
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative)
    gate_T = torch.sigmoid(tau_T * (log_ratio(logprobs_T, old_T).exp() - 1.0))
    return -4.0 / tau_T * gate_T * advantages_T


def topr(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Likelihood where A > 0; where A < 0 weighed by `min(p / old, 1)`, detached (TOPR, arXiv 2503.14286), token by token.

    The paper's ratio is of the whole trajectory: `sequence_losses.topr_sequence`.
    """
    weight_T = log_ratio(logprobs_T, old_T).clamp(max=0.0).exp().detach()
    return -torch.where(advantages_T > 0, 1.0, weight_T) * advantages_T * single(logprobs_T)


def raft_pp(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """PPO's loss on what succeeded, 0 on the rest (RAFT++, arXiv 2504.11343).

    With the rewards 1 and 0 themselves as advantages, no baseline, it is the paper's. The dropped tokens stay in the denominator.
    """
    return ppo_clip(logprobs_T, old_T, advantages_T.clamp(min=0.0), clip_low, clip_high)


def kimi(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, tau: float = 0.1) -> Tensor:
    """`-A * log p + tau / 2 * (log p - log old)^2`: a pull back to the old policy in place of a clip (Kimi k1.5, arXiv 2501.12599).

    The difference is not clamped: the pull must not end where the policy has gone farthest.
    """
    logprobs_T = single(logprobs_T)
    return -advantages_T * logprobs_T + 0.5 * tau * (logprobs_T - single(old_T)).square()


def dppo_keeps(logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, low: float, high: float) -> Tensor:
    """The mask of `dppo`: tokens whose probability has not yet moved beyond the range in the advantage's direction."""
    moved_T = single(logprobs_T).exp() - single(behaviour_T).exp()
    return ~(((advantages_T > 0) & (moved_T > high)) | ((advantages_T < 0) & (moved_T < -low)))


def dppo(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    tau: float = 1e-3,
) -> Tensor:
    """`-keep * A * p / behaviour + tau * (log p - log behaviour)^2`, `keep` by the change of probability.

    DPPO with the binary total variation (arXiv 2602.04879). A ratio of 3 matters little at probability 1e-4 and much at 0.3; a
    bound on the difference sees that. `low` and `high` are probabilities. The pull `tau` is on dropped tokens too. There is no
    old policy, so no second forward pass.
    """
    keeps_T = dppo_keeps(logprobs_T.detach(), behaviour_T, advantages_T, low, high)
    surrogate_T = keep(log_ratio(logprobs_T, behaviour_T).exp() * advantages_T, keeps_T)
    return tau * (single(logprobs_T) - single(behaviour_T)).square() - surrogate_T


def aipo(logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, *, cap: float = 4.0) -> Tensor:
    """`-min(p / behaviour, cap) * A * log p`, the weight detached (AIPO, arXiv 2505.24034, cap 2 to 10)."""
    weight_T = log_ratio(logprobs_T, behaviour_T).exp().clamp(max=cap).detach()
    return -weight_T * advantages_T * single(logprobs_T)


def m2po_drift(logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor) -> Tensor:
    """The move of each token in its advantage's direction, `|log(p / behaviour)|`; 0 where it moved the other way or A is 0.

    These are the tokens on which a clip could act: A > 0 and p > behaviour, or A < 0 and p < behaviour.
    """
    moved_T = (single(logprobs_T) - single(behaviour_T)).detach()
    return (moved_T * advantages_T.sign()).clamp(min=0.0)


def m2po_limit(drift_N: Tensor, budget: float = 0.04) -> Tensor:
    """From which drift on `m2po` drops tokens, so that the mean square of those that count and stay is at most `budget`.

    Args:
        drift_N: from `m2po_drift`, of the N sampled tokens of the whole optimizer step, over all micro-batches and ranks: a limit of
            a micro-batch's own would change with the split. Those with drift 0 do not count.
        budget: the second moment that stays, 0.04 in arXiv 2510.01161.

    Returns:
        A scalar on the device: the smallest drift that is dropped, infinity where all stay. Of tokens with the same drift all are
        dropped or none, so that their order does not matter.
    """
    counted_N = single(drift_N)[drift_N > 0].sort().values
    counts_N = torch.arange(1, len(counted_N) + 1, dtype=torch.float64, device=counted_N.device)
    # The mean of the n smallest never falls as n grows, so those within the budget come first.
    within_N = counted_N.double().square().cumsum(0) / counts_N <= budget
    none = torch.full((1,), torch.inf, dtype=counted_N.dtype, device=counted_N.device)
    return torch.cat([counted_N.masked_fill(within_N, torch.inf), none]).min()


def m2po(
    logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, drift_limit: Tensor, *, budget: float = 0.04
) -> Tensor:
    """`-A * p / behaviour` on the tokens whose `m2po_drift` is below `drift_limit`, 0 on the rest (M2PO, arXiv 2510.01161).

    By Algorithm 1 only tokens that have moved the way their advantage pushes are counted and dropped. One that moved the other
    way keeps the gradient that brings it back, however far it is.

    `m2po_limit` makes the limit from all tokens of the optimizer step, with `budget`, which is a setting of the loss and not read
    here. There is no clip. The dropped tokens stay in the denominator.
    """
    keeps_T = m2po_drift(logprobs_T, behaviour_T, advantages_T) < drift_limit
    return -keep(log_ratio(logprobs_T, behaviour_T).exp() * advantages_T, keeps_T)
