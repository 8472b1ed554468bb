"""Reductions: the weight of each sampled token in the loss, so that a loss is a plain weighted sum.

The weights are computed once for all samples of an optimizer step, before ranks get them, so any split gives the same loss
and gradient. Samples of one trajectory share its weight.

Legend: N samples of the whole optimizer step, over all ranks and micro-batches.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def sample_weights(
    mode: str, tokens_N: Tensor, trajectory_N: Tensor, prompt_N: Tensor, max_length: float | None = None
) -> Tensor:
    """weights_N, fp32: the loss weight of every sampled token of each sample, by the mode, one of `MODES`; 0 without a sampled token.

    `tokens_N` counts the sampled tokens that take part in the loss; `trajectory_N` and `prompt_N` (group) are any
    integers. `max_length`, of "constant" only, divides a trajectory's sum.
    """
    live_N = tokens_N > 0
    weights_N = torch.zeros(len(tokens_N), dtype=torch.float64, device=tokens_N.device)
    weights_N[live_N] = MODES[mode](tokens_N[live_N].double(), trajectory_N[live_N], prompt_N[live_N])
    if max_length is not None:
        weights_N /= max_length
    return weights_N.float()


def _totals(values_N: Tensor, ids_N: Tensor) -> Tensor:
    """For each sample, the sum of the values of all samples that have its id."""
    unique_U, index_N = ids_N.unique(return_inverse=True)
    sums_U = torch.zeros(len(unique_U), dtype=values_N.dtype, device=values_N.device)
    return sums_U.index_add(0, index_N, values_N)[index_N]


MODES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # Every sampled token alike. DAPO (arXiv 2503.14476).
    "token-mean": lambda tokens_N, trajectory_N, prompt_N: torch.ones_like(tokens_N) / tokens_N.sum(),
    # Every trajectory alike, its k samples alike (1 / k each), and the tokens of a sample alike. GRPO (arXiv 2402.03300).
    "seq-mean-token-mean": lambda tokens_N, trajectory_N, prompt_N: (
        1.0 / (len(trajectory_N.unique()) * _totals(torch.ones_like(tokens_N), trajectory_N) * tokens_N)
    ),
    # The sum over a trajectory's tokens, the mean over trajectories.
    "seq-mean-token-sum": lambda tokens_N, trajectory_N, prompt_N: (
        torch.ones_like(tokens_N) / len(trajectory_N.unique())
    ),
    # The same, divided by `max_length`. Dr. GRPO (arXiv 2503.20783).
    "constant": lambda tokens_N, trajectory_N, prompt_N: torch.ones_like(tokens_N) / len(trajectory_N.unique()),
    # Every prompt alike, and the tokens of all its trajectories alike. Known from SkyRL.
    "prompt-mean": lambda tokens_N, trajectory_N, prompt_N: (
        1.0 / (len(prompt_N.unique()) * _totals(tokens_N, prompt_N))
    ),
    # Every trajectory alike, and its tokens alike in whichever sample they lie. Agent Lightning (arXiv 2508.03680).
    "trajectory-mean": lambda tokens_N, trajectory_N, prompt_N: (
        1.0 / (len(trajectory_N.unique()) * _totals(tokens_N, trajectory_N))
    ),
}
