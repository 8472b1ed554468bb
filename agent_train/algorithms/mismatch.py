"""The mismatch of two policies on the tokens that one sampled: a fixed panel, summed over micro-batches and ranks.

Legend: T tokens of one packed micro-batch, K numbers. Log ratios are `log(o / b)` of tokens that b sampled: `b` is the
engine and `o` the trainer for the panel of the engine, `o` and `p` for the drift of an update.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, k3, keep

SUMS = ("tokens", "k1", "k3", "abs", "ratio", "ratio_squared", "chi_square")


@torch.no_grad()
def mismatch_sums(log_ratio_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """The `SUMS` of one micro-batch, fp64, and its largest |log ratio|, shape [1]. Ratios are cut at e^+-20, logs are not."""
    x_T = keep(log_ratio_T, mask_T).double()
    one_T = mask_T.double()
    ratio_T = keep(x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), mask_T)
    sums_K = [one_T, -x_T, k3(x_T), x_T.abs(), ratio_T, ratio_T.square(), (ratio_T - one_T).square()]
    largest = x_T.abs().max() if len(x_T) else x_T.sum()
    return torch.stack([s_T.sum() for s_T in sums_K]), largest[None]


def mismatch(total: Mapping[str, float]) -> dict[str, float]:
    """Means over sampled tokens from the reduced `SUMS` by name; nats. Without tokens all is 0, and `ess` 1.

    `k1` is KL(b || o), of either sign, `k3` the same, never negative. `chi_square` of o from b, the mean of (o / b -
    1)^2, is what importance weights cost in variance. `ess` is the effective sample size of the weights o / b as a
    share of the tokens.
    """
    mean = {name: total[name] / (total["tokens"] or 1) for name in SUMS}
    return {
        **{name: mean[name] for name in ("k1", "k3", "chi_square", "abs")},
        "ess": mean["ratio"] ** 2 / mean["ratio_squared"] if total["tokens"] else 1.0,
    }
