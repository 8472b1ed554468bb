"""Returns and generalised advantage estimation over sampled tokens, and whitening over a whole training step.

Sampled tokens are selected first and the results are put back, so an observation between two turns neither discounts
nor interrupts anything, and whatever stands at an unsampled token is never read. Results are 0 there.

Legend: T tokens, M of them sampled, S segments (trajectories), K turns. `segment_T` says of which segment, 0 to S-1, a
token is; the tokens of a segment lie together and in order. `rewards_T` is as `turn_rewards.place` lays it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agent_train.algorithms.advantages import RELATIVE_SPREAD, group_advantages


def return_to_go(rewards_T: Tensor, mask_T: Tensor, segment_T: Tensor, gamma: float = 1.0) -> Tensor:
    """returns_T, fp32: `G_t = r_t + gamma * G(next sampled token)` to the end of the segment."""
    index_M = mask_T.nonzero()[:, 0]
    returns_M = decayed_sum(rewards_T[index_M].float(), gamma * goes_on(segment_T[index_M]))
    return put_back(returns_M, index_M, len(mask_T))


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> Tensor:
    """GAE (arXiv 1506.02438) along the sampled tokens of each segment; fp32, without gradient.

    `delta_t = r_t + gamma * V(next) - V_t` and `A_t = delta_t + gamma * lambda * A(next)`, where next is the next
    sampled token of the segment; after the last one both are 0. V_t is the critic's value before token t is sampled.
    `lam` may be lam_T.
    """
    index_M = mask_T.nonzero()[:, 0]
    given = (rewards_T[index_M].float(), values_T[index_M].float(), goes_on(segment_T[index_M]))
    lam_M = lam[index_M] if isinstance(lam, Tensor) else lam
    return put_back(_gae(*given, gamma, lam_M), index_M, len(mask_T)).detach()


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
    """Bi-level GAE (arXiv 2510.16907, 2504.20073): first over turns, then over the tokens inside each turn. As `gae` otherwise.

    Over the last sampled tokens e_k of the turns: `D_k = r(e_k) + turn_gamma * V(e_k+1) - V(e_k)` and `B_k = D_k +
    turn_gamma * turn_lam * B_k+1`. Then GAE inside each turn, where the reward at its end is `B_k + V(e_k)` and nothing
    follows. `turn_T` (see `turn_rewards.turn_segments`) tells turns apart, not rewards: a turn of reward 0 is a turn.
    """
    index_M = mask_T.nonzero()[:, 0]
    segment_M = segment_T[index_M]
    rewards_M, values_M = rewards_T[index_M].float(), values_T[index_M].float()
    in_turn_M = goes_on(turn_T[index_M]) * goes_on(segment_M)

    ends_K = (in_turn_M == 0).nonzero()[:, 0]
    values_K = values_M[ends_K]
    lam_M, lam_K = (lam[index_M], lam[index_M[ends_K]]) if isinstance(lam, Tensor) else (lam, lam)
    advantages_K = _gae(
        rewards_M[ends_K], values_K, goes_on(segment_M[ends_K]), turn_gamma, lam_K if turn_lam is None else turn_lam
    )
    rewards_M = rewards_M.index_copy(0, ends_K, advantages_K + values_K)
    return put_back(_gae(rewards_M, values_M, in_turn_M, gamma, lam_M), index_M, len(mask_T)).detach()


def adaptive_lambda(mask_T: Tensor, segment_T: Tensor, alpha: float = 0.05) -> Tensor:
    """lam_T, fp32: VAPO's length-adaptive lambda (arXiv 2504.05118), `1 - 1 / (alpha * sampled tokens of the segment)`, at least 0."""
    _, index_T = segment_T.unique_consecutive(return_inverse=True)
    lengths_S = torch.zeros(len(segment_T), device=mask_T.device).index_add(0, index_T, mask_T.float())
    return (1.0 - 1.0 / (alpha * lengths_S.clamp(min=1.0))).clamp(min=0.0)[index_T]


def moments(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Count, sum and sum of squares of the sampled tokens: fp64, shape [3]."""
    values_M = values_T[mask_T].double()
    return torch.stack([torch.ones_like(values_M).sum(), values_M.sum(), values_M.square().sum()])


def whiten(values_T: Tensor, mask_T: Tensor, totals: Tensor, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """whitened_T, fp32: `(x - mean) / (std + eps)` over every sampled token of the training step, each counting once (arXiv 2501.03262).

    `totals` are `moments` of the whole step; `std` is "sample" (n-1) or "population" (n). All is 0 without spread.
    """
    index_M = mask_T.nonzero()[:, 0]
    count, total, squares = totals.double().unbind()
    mean = total / count.clamp(min=1.0)
    variance = squares / count.clamp(min=1.0) - mean.square()
    # A comparison with the mean square, so that rounding is not taken for spread. It needs no read-back to the host.
    spread = variance > RELATIVE_SPREAD**2 * squares / count.clamp(min=1.0)
    if std == "sample":
        variance = variance * count / (count - 1).clamp(min=1.0)
    scale = torch.where(spread, variance, torch.ones_like(variance)).sqrt() + eps
    whitened_M = torch.where(spread, (values_T[index_M].double() - mean) / scale, 0.0)
    return put_back(whitened_M.float(), index_M, len(mask_T))


def reinforce_pp_baseline(
    groups: Sequence[Sequence[float | None]],
    lengths: Sequence[Sequence[int]],
    std: str = "sample",
    eps: float = 1e-6,
    trained: Sequence[Sequence[bool]] | None = None,
) -> list[list[float]]:
    """REINFORCE++-baseline (arXiv 2501.03262): the reward less its group's mean, whitened over all sampled tokens.

    A reward of None and a trajectory of length 0 take no part. A group of one or without spread gets exactly 0 and is
    not counted in the whitening; nor are trajectories that are not `trained`, which are in their group's mean.
    """
    played = [
        [reward if length else None for reward, length in zip(group, sizes, strict=True)]
        for group, sizes in zip(groups, lengths, strict=True)
    ]
    centred = [group_advantages(group, std="none") for group in played]
    in_loss = [[True] * len(group) for group in groups] if trained is None else trained
    counted = [
        length if any(advantages) and reward is not None and learned else 0
        for group, advantages, sizes, flags in zip(played, centred, lengths, in_loss, strict=True)
        for reward, length, learned in zip(group, sizes, flags, strict=True)
    ]
    values_S = torch.tensor([a for advantages in centred for a in advantages], dtype=torch.float64)
    counts_S = torch.tensor(counted, dtype=torch.int64)
    values_T = values_S.repeat_interleave(counts_S)
    totals = moments(values_T, torch.ones_like(values_T, dtype=torch.bool))
    whitened = iter(whiten(values_S, counts_S > 0, totals, std, eps).tolist())
    return [[next(whitened) for _ in group] for group in groups]


def decayed_sum(values_M: Tensor, decay_M: Tensor) -> Tensor:
    """`y[m] = values[m] + decay[m] * y[m + 1]`, from the right, in log2(M) steps; the decay of the last one does nothing."""
    sums_M, factor_M, reach = values_M, decay_M.to(values_M.dtype), 1
    while reach < len(values_M):
        sums_M = sums_M + factor_M * pad(sums_M[reach:], (0, reach))
        factor_M = factor_M * pad(factor_M[reach:], (0, reach))
        reach *= 2
    return sums_M


def goes_on(segment_M: Tensor) -> Tensor:
    """1.0 where the next one is of the same segment, 0.0 where the segment ends; fp32."""
    return pad(segment_M[1:] == segment_M[:-1], (0, min(1, len(segment_M)))).float()


def put_back(values_M: Tensor, index_M: Tensor, size: int) -> Tensor:
    """The selected values at their places among `size` tokens, 0 elsewhere."""
    return values_M.new_zeros(size).index_copy(0, index_M, values_M)


def _gae(rewards_M: Tensor, values_M: Tensor, goes_on_M: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    next_M = values_M.roll(-1) * goes_on_M
    return decayed_sum(rewards_M + gamma * next_M - values_M, gamma * lam * goes_on_M)
