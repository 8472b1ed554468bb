"""Sums and means over the rows that lie one after another in a packed micro-batch. Differentiable.

Legend: T tokens of one packed micro-batch, S rows (segments) in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep


def segment_sums(values_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """values_S: the sum of each row's masked tokens, 0 where there are none. What stands outside the mask does not matter."""
    sums_S = torch.zeros(n_segments, dtype=values_T.dtype, device=values_T.device)
    return sums_S.index_add(0, segment_T, keep(values_T, mask_T))


def segment_means(values_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    """values_S: the mean of each row's masked tokens, 0 where there are none."""
    sums_S = segment_sums(values_T, mask_T, segment_T, n_segments)
    counts_S = segment_sums(torch.ones_like(values_T), mask_T, segment_T, n_segments)
    return sums_S / counts_S.clamp(min=1.0)
