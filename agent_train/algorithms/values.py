"""The critic's loss. One value per token, to be summed with weights like a policy loss.

Legend: T tokens of one packed micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, single


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, clip: float | None = None
) -> Tensor:
    """Half the squared error of the value, `0.5 * max((V - R)^2, (clip(V, V_old +- clip) - R)^2)`; 0 outside the mask.

    The clip of PPO's implementation (arXiv 1707.06347; arXiv 2005.12729 looks at what it does): a value gains nothing by moving
    farther than `clip` from the old one in a training step. The maximum means that it still loses by being wrong.

    Args:
        values_T: of the critic that is trained, with gradient.
        old_values_T: of the critic at the start of the training step.
        returns_T: what the value is to be.
        mask_T: True on sampled tokens.
        clip: how far a value may move; None for no limit.
    """
    values_T = single(keep(values_T, mask_T))
    returns_T = single(keep(returns_T, mask_T))
    error_T = (values_T - returns_T).square()
    if clip is not None:
        old_values_T = single(keep(old_values_T, mask_T))
        near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
        error_T = torch.maximum(error_T, (near_T - returns_T).square())
    return 0.5 * error_T


def value_clip_mask(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, clip: float) -> Tensor:
    """The mask of clipped values: they left the range towards the return, and their gradient is 0."""
    moved_T = keep(values_T, mask_T) - keep(old_values_T, mask_T)
    near_T = keep(old_values_T, mask_T) + moved_T.clamp(-clip, clip)
    returns_T = keep(returns_T, mask_T)
    farther_T = (near_T - returns_T).abs() > (keep(values_T, mask_T) - returns_T).abs()
    return mask_T & farther_T & (moved_T.abs() > clip)
