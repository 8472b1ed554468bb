"""PRIME (arXiv 2502.01456): rewards of tokens from a model that is trained on outcomes only.

Legend: T tokens, M of them sampled, S trajectories, G groups (at most S). `segment_T` says of which trajectory, 0 to
S-1, a token is.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from agent_train.algorithms.advantages import RELATIVE_SPREAD
from agent_train.algorithms.losses import keep, segment_means, segment_sums
from agent_train.algorithms.returns import decayed_sum, goes_on, put_back


def process_rewards(logprobs_T: Tensor, reference_T: Tensor, mask_T: Tensor, beta: float = 0.05) -> Tensor:
    """`beta * (log q - log q_ref)` of each sampled token, 0 elsewhere, with gradient to `logprobs_T`; q is the reward model."""
    index_M = mask_T.nonzero()[:, 0]
    rewards_M = beta * (logprobs_T[index_M].float() - reference_T[index_M].float().detach())
    return put_back(rewards_M, index_M, len(mask_T))


def prime_advantages(
    process_T: Tensor, mask_T: Tensor, segment_T: Tensor, outcomes_S: Tensor, group_S: Tensor, gamma: float = 1.0
) -> Tensor:
    """advantages_T, fp32, without gradient: RLOO of the outcomes plus the discounted sum of the process rewards less those of the siblings.

    `RLOO(outcome) + sum over s >= t of gamma^(s-t) * (r_s - b)`, where b is the mean over the siblings of their mean
    process reward. Discount and means count sampled tokens only. `outcomes_S` are the rewards of the trajectories,
    `group_S` their groups, any numbers. A trajectory without siblings gets 0, as does each part in a group where it
    does not differ.
    """
    _, group_S = group_S.unique(return_inverse=True)
    index_M = mask_T.nonzero()[:, 0]
    segment_M = segment_T[index_M]
    process_M = process_T[index_M].detach().double()
    lengths_S = segment_sums(torch.ones_like(process_T, dtype=torch.float64), mask_T, segment_T, len(group_S))
    means_S = segment_means(process_T.detach().double(), mask_T, segment_T, len(group_S))
    counted_S, outcomes_S = lengths_S > 0, outcomes_S.double()

    siblings_S = _others(torch.ones_like(means_S), counted_S, group_S)
    outcomes_differ_S = _differ(outcomes_S[segment_M], group_S[segment_M], group_S)
    rloo_S = outcomes_S - _others(outcomes_S, counted_S, group_S) / siblings_S.clamp(min=1.0)
    rloo_S = torch.where(outcomes_differ_S, rloo_S, 0.0)

    process_differ_S = _differ(process_M, group_S[segment_M], group_S)
    baseline_S = _others(means_S, counted_S, group_S) / siblings_S.clamp(min=1.0)
    heard_M = (process_differ_S & (siblings_S > 0))[segment_M]
    relative_M = torch.where(heard_M, process_M - baseline_S[segment_M], 0.0)
    later_M = decayed_sum(relative_M, gamma * goes_on(segment_M))
    return put_back((rloo_S[segment_M] + later_M).float(), index_M, len(mask_T))


def outcome_loss(process_T: Tensor, mask_T: Tensor, segment_T: Tensor, outcomes_S: Tensor) -> Tensor:
    """loss_S, fp32: cross-entropy of `sigmoid(sum of the process rewards)` and the outcome, from 0 (wrong) to 1 (right); 0 without tokens."""
    process_T = process_T.float()
    logits_S = segment_sums(process_T, mask_T, segment_T, len(outcomes_S))
    counted_S = segment_sums(torch.ones_like(process_T), mask_T, segment_T, len(outcomes_S)) > 0
    loss_S = binary_cross_entropy_with_logits(logits_S, outcomes_S.float(), reduction="none")
    return torch.where(counted_S, loss_S, 0.0)


def _others(values_S: Tensor, counted_S: Tensor, group_S: Tensor) -> Tensor:
    return segment_sums(values_S, counted_S, group_S, len(group_S))[group_S] - keep(values_S, counted_S)


def _differ(values_M: Tensor, group_M: Tensor, group_S: Tensor) -> Tensor:
    """For each trajectory: whether the values of its group differ by more than rounding."""
    high_G = values_M.new_full((len(group_S),), -torch.inf).scatter_reduce(0, group_M, values_M, "amax")
    low_G = values_M.new_full((len(group_S),), torch.inf).scatter_reduce(0, group_M, values_M, "amin")
    differ_G = high_G - low_G > RELATIVE_SPREAD * torch.maximum(high_G.abs(), low_G.abs())
    return differ_G[group_S]
