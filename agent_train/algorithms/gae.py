"""Generalised advantage estimation with a critic, over sampled tokens only.

The value of a token is the critic's estimate before that token is sampled. Tokens of observations have no value, no reward
and no part in the discount: the next value is that of the next sampled token.

Legend: T tokens, M of them sampled, S segments (trajectories), K turns. See `returns` for `segment_T`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_train.algorithms.returns import decayed_sum, goes_on, put_back


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> Tensor:
    """GAE (arXiv 1506.02438) along the sampled tokens of each segment.

    `delta_t = r_t + gamma * V(next) - V_t` and `A_t = delta_t + gamma * lambda * A(next)`, where next is the next sampled
    token of the segment; after the last one value and sum are 0.

    Args:
        rewards_T: rewards of sampled tokens; see `turn_rewards.place`.
        values_T: the critic's values.
        mask_T: True on sampled tokens. What stands elsewhere in rewards and values is never read.
        segment_T: the trajectory of each token.
        gamma: discount per sampled token.
        lam: one number, or lam_T, one for each token (see `adaptive_lambda`).

    Returns:
        advantages_T, fp32, without gradient, 0 where nothing was sampled.
    """
    index_M = mask_T.nonzero()[:, 0]
    lam_M = lam[index_M] if isinstance(lam, Tensor) else lam
    rewards_M, values_M = rewards_T[index_M].float(), values_T[index_M].float()
    advantages_M = _gae(rewards_M, values_M, goes_on(segment_T[index_M]), gamma, lam_M)
    return put_back(advantages_M, index_M, len(mask_T)).detach()


def bilevel_gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    turn_T: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    turn_gamma: float = 0.95,
    turn_lam: float | None = None,
) -> Tensor:
    """Bi-level GAE (arXiv 2510.16907, 2504.20073): first over turns, then over the tokens inside each turn.

    Over the last sampled tokens e_k of the turns: `D_k = r(e_k) + turn_gamma * V(e_k+1) - V(e_k)` and
    `B_k = D_k + turn_gamma * turn_lam * B_k+1`. Then GAE inside each turn, where the reward at its end is `B_k + V(e_k)` and
    nothing follows. Turns are told by `turn_T`, never by where rewards are: a turn of reward 0 is a turn.

    Args:
        rewards_T: a turn's reward lies on its last sampled token; rewards before it (of KL, say) stay inside the turn.
        values_T: the critic's values.
        mask_T: True on sampled tokens.
        segment_T: the trajectory of each token.
        turn_T: the turn of each token, another number than that of the turn before; see `turn_rewards.turn_segments`.
        gamma: discount per sampled token inside a turn.
        lam: lambda inside a turn, one number or lam_T.
        turn_gamma: discount from one turn to the next.
        turn_lam: lambda over turns; None takes `lam`, which must be a number then.

    Returns:
        advantages_T, fp32, without gradient, 0 where nothing was sampled.

    Raises:
        ValueError: `lam` is a tensor and `turn_lam` is None.
    """
    if turn_lam is None:
        if isinstance(lam, Tensor):
            raise ValueError("bi-level GAE with a lambda for each token needs turn_lam, the one over turns")
        turn_lam = lam
    index_M = mask_T.nonzero()[:, 0]
    segment_M = segment_T[index_M]
    rewards_M, values_M = rewards_T[index_M].float(), values_T[index_M].float()
    in_turn_M = goes_on(turn_T[index_M]) * goes_on(segment_M)

    ends_K = (in_turn_M == 0).nonzero()[:, 0]
    values_K = values_M[ends_K]
    advantages_K = _gae(rewards_M[ends_K], values_K, goes_on(segment_M[ends_K]), turn_gamma, turn_lam)
    rewards_M = rewards_M.index_copy(0, ends_K, advantages_K + values_K)

    lam_M = lam[index_M] if isinstance(lam, Tensor) else lam
    advantages_M = _gae(rewards_M, values_M, in_turn_M, gamma, lam_M)
    return put_back(advantages_M, index_M, len(mask_T)).detach()


def adaptive_lambda(mask_T: Tensor, segment_T: Tensor, alpha: float = 0.05) -> Tensor:
    """Length-adaptive lambda of VAPO (arXiv 2504.05118): `1 - 1 / (alpha * length)`, at least 0.

    The length of a segment is how many of its tokens were sampled; what tools wrote between them does not count.

    Returns:
        lam_T, fp32: the lambda of its segment at each token.

    Raises:
        ValueError: `alpha` is not positive.
    """
    if not alpha > 0:
        raise ValueError(f"alpha of the length-adaptive lambda must be positive, not {alpha}")
    _, index_T = segment_T.unique_consecutive(return_inverse=True)
    lengths_S = torch.zeros(len(segment_T), device=mask_T.device).index_add(0, index_T, mask_T.float())
    return (1.0 - 1.0 / (alpha * lengths_S.clamp(min=1.0))).clamp(min=0.0)[index_T]


def _gae(rewards_M: Tensor, values_M: Tensor, goes_on_M: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """GAE along M sampled tokens (or turns), where `goes_on_M` is 1 unless the chain ends there."""
    next_M = values_M.roll(-1) * goes_on_M
    return decayed_sum(rewards_M + gamma * next_M - values_M, gamma * lam * goes_on_M)
