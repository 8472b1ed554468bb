"""Returns over sampled tokens, and their whitening over a whole training step.

Only tokens in the mask exist here: they are selected first and the results are put back, so that an observation between two
turns neither discounts nor interrupts anything, and whatever stands at an unsampled token (NaN too) is never read.

Legend: T tokens, M of them sampled, S segments. `segment_T` says of which segment, 0 to S-1, a token is; the tokens of a
segment lie together and in order. For returns a segment is a trajectory: where it has several rows, they follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agent_train.algorithms.advantages import RELATIVE_SPREAD, group_advantages


def return_to_go(rewards_T: Tensor, mask_T: Tensor, segment_T: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each sampled token to the end of its segment.

    `G_t = r_t + gamma * G(next sampled token)`. With one score on the last sampled token this is what REINFORCE++
    (arXiv 2501.03262) whitens: `return_to_go`, `moments` of every rank added up, then `whiten`.

    Args:
        rewards_T: rewards of sampled tokens; see `turn_rewards.place` for where they lie.
        mask_T: True on sampled tokens.
        segment_T: the trajectory of each token.
        gamma: discount per sampled token.

    Returns:
        returns_T, fp32, 0 where nothing was sampled.
    """
    index_M = mask_T.nonzero()[:, 0]
    rewards_M = rewards_T[index_M].float()
    returns_M = decayed_sum(rewards_M, gamma * goes_on(segment_T[index_M]))
    return put_back(returns_M, index_M, len(mask_T))


def moments(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Count, sum and sum of squares of the sampled tokens: fp64, shape [3]. Those of all ranks are added before `whiten`."""
    values_M = values_T[mask_T].double()
    return torch.stack([torch.ones_like(values_M).sum(), values_M.sum(), values_M.square().sum()])


def whiten(values_T: Tensor, mask_T: Tensor, totals: Tensor, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """`(x - mean) / (std + eps)` with mean and standard deviation over every sampled token of the training step.

    Each token counts once, so a long trajectory moves the mean more (arXiv 2501.03262).

    Args:
        values_T: what is whitened.
        mask_T: True on sampled tokens.
        totals: `moments` summed over all micro-batches and ranks, these tokens included.
        std: "sample" (n-1) or "population" (n).
        eps: added to the standard deviation.

    Returns:
        whitened_T, fp32, 0 where nothing was sampled; all 0 where the values of the step do not differ.

    Raises:
        ValueError: an unknown `std`.
    """
    if std not in ("sample", "population"):
        raise ValueError(f"std must be sample or population, not {std!r}")
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

    A group of one or without spread gets exactly 0 and is not counted in the whitening either: the others get what they
    would get if it had been filtered out before.

    Args:
        groups: the rewards of every group of the training step; None takes no part.
        lengths: sampled tokens of each trajectory; one without any takes no part.
        std: "sample" (n-1) or "population" (n), over tokens.
        eps: added to the standard deviation.
        trained: which trajectories are in the loss; None all. The others are in their group's mean, not in the whitening, and get 0.

    Returns:
        One number per trajectory, group by group.
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
    values_R = torch.tensor([a for advantages in centred for a in advantages], dtype=torch.float64)
    counts_R = torch.tensor(counted, dtype=torch.int64)
    values_T = values_R.repeat_interleave(counts_R)
    totals = moments(values_T, torch.ones_like(values_T, dtype=torch.bool))
    whitened = iter(whiten(values_R, counts_R > 0, totals, std, eps).tolist())
    return [[next(whitened) for _ in group] for group in groups]


def decayed_sum(values_M: Tensor, decay_M: Tensor) -> Tensor:
    """`y[m] = values[m] + decay[m] * y[m + 1]`, from the right, in log2(M) steps; the decay of the last one does nothing.

    Step k adds what lies 2^k to the right, times the product of the decays on the way.
    """
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
