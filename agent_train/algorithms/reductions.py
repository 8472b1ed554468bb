"""Reductions: what each sampled token weighs in the loss, so that a loss is a plain weighted sum.

The weights are made once for all rows of an optimizer step, before they are dealt to ranks and micro-batches. Every
denominator is therefore global, and any split gives the same loss and gradient.

A trajectory may leave several rows (fan-out), each of its sampled tokens in exactly one of them. Its rows share its weight:
none of the modes below counts a trajectory more because it left more rows. A row without sampled tokens weighs nothing and
is counted nowhere.

Legend: R rows of the whole optimizer step, over all ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def row_weights(
    mode: str, tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor, max_length: float | None = None
) -> Tensor:
    """The loss weight of every sampled token of each sample.

    Args:
        mode: one of `MODES`.
        tokens_R: sampled tokens of each row that take part in the loss, integers.
        trajectory_R: number of the trajectory that a row belongs to, any integers.
        prompt_R: number of the prompt (group) that a row belongs to, any integers.
        max_length: of "constant" only: the constant length that a trajectory's sum is divided by.

    Returns:
        weights_R, fp32, 0 for rows without sampled tokens.

    Raises:
        ValueError: an unknown mode, inputs of different lengths, a negative count, no sampled token at all, or `max_length`
            missing, not positive, or given to a mode that has none.
    """
    if mode not in MODES:
        raise ValueError(f"reduction must be one of {', '.join(MODES)}, not {mode!r}")
    if not len(tokens_R) == len(trajectory_R) == len(prompt_R):
        raise ValueError(
            f"{len(tokens_R)} counts, {len(trajectory_R)} trajectories and {len(prompt_R)} prompts of rows"
        )
    if (mode == "constant") != (max_length is not None):
        raise ValueError(f"reduction {mode!r} with max_length {max_length}: 'constant' needs it and no other takes it")
    if max_length is not None and not max_length > 0:
        raise ValueError(f"max_length must be positive, not {max_length}")
    if (tokens_R < 0).any() or not (tokens_R > 0).any():
        raise ValueError(f"nothing to reduce: {len(tokens_R)} rows without a sampled token, or a negative count")
    live_R = tokens_R > 0
    weights_R = torch.zeros(len(tokens_R), dtype=torch.float64, device=tokens_R.device)
    weights_R[live_R] = MODES[mode](tokens_R[live_R].double(), trajectory_R[live_R], prompt_R[live_R])
    if max_length is not None:
        weights_R /= max_length
    return weights_R.float()


def token_mean(tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor) -> Tensor:
    """Every sampled token alike: 1 / N. DAPO (arXiv 2503.14476)."""
    return torch.ones_like(tokens_R) / tokens_R.sum()


def seq_mean_token_mean(tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor) -> Tensor:
    """Every trajectory alike, its k rows alike (1 / k each), and the tokens of a row alike. GRPO (arXiv 2402.03300)."""
    rows_R = totals(torch.ones_like(tokens_R), trajectory_R)
    return 1.0 / (distinct(trajectory_R) * rows_R * tokens_R)


def seq_mean_token_sum(tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor) -> Tensor:
    """The sum over a trajectory's tokens, the mean over trajectories: 1 / B.

    Divided by a constant length it is Dr. GRPO (arXiv 2503.20783), which does not favour long wrong answers.
    """
    return torch.ones_like(tokens_R) / distinct(trajectory_R)


def prompt_mean(tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor) -> Tensor:
    """Every prompt alike, and the tokens of all its trajectories alike. Known from SkyRL."""
    return 1.0 / (distinct(prompt_R) * totals(tokens_R, prompt_R))


def trajectory_mean(tokens_R: Tensor, trajectory_R: Tensor, prompt_R: Tensor) -> Tensor:
    """Every trajectory alike, and its tokens alike in whichever row they lie. Agent Lightning (arXiv 2508.03680).

    Without fan-out it is `seq_mean_token_mean`.
    """
    return 1.0 / (distinct(trajectory_R) * totals(tokens_R, trajectory_R))


def distinct(ids_R: Tensor) -> int:
    """The number of different ids."""
    return len(ids_R.unique())


def totals(values_R: Tensor, ids_R: Tensor) -> Tensor:
    """For each row, the sum of the values of all rows that have its id."""
    unique_U, index_R = ids_R.unique(return_inverse=True)
    sums_U = torch.zeros(len(unique_U), dtype=values_R.dtype, device=values_R.device)
    return sums_U.index_add(0, index_R, values_R)[index_R]


MODES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "constant": seq_mean_token_sum,
    "prompt-mean": prompt_mean,
    "trajectory-mean": trajectory_mean,
}
