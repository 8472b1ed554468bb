"""Losses of preference data: pairs, or single answers that were liked or not. One value per pair or per answer.

A margin is how much more likely the trained policy makes an answer than the reference does, from `margins`.

Legend: T tokens, S sequences, P pairs, R answers of a whole optimizer step.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agent_train.algorithms.losses import keep, segment_means, segment_sums, single


def margins(
    logprobs_T: Tensor, reference_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int, *, mean: bool = False
) -> Tensor:
    """margin_S: the sum, or the `mean` (for IPO), over each sequence's masked tokens of `log(p / reference)`."""
    change_T = single(keep(logprobs_T, mask_T)) - single(keep(reference_T, mask_T))
    reduce = segment_means if mean else segment_sums
    return reduce(change_T, mask_T, segment_T, n_segments)


def dpo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`-log sigmoid(beta * (chosen - rejected))` of the margins, sums (DPO, arXiv 2305.18290)."""
    return -logsigmoid(beta * (single(chosen_P) - single(rejected_P)))


def ipo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`(chosen - rejected - 1 / (2 * beta))^2` of the margins, means over tokens (IPO, arXiv 2310.12036): one target for all lengths."""
    return (single(chosen_P) - single(rejected_P) - 1.0 / (2.0 * beta)).square()


def kto_reference(mismatched_R: Tensor) -> Tensor:
    """The reference point of `kto` for a whole optimizer step: `max(0, mean)` of the margins of answers under prompts that are not their own.

    It estimates KL(policy || reference), and is detached.
    """
    return single(mismatched_R).detach().mean().clamp(min=0.0)


def kto(
    margin_R: Tensor,
    liked_R: Tensor,
    reference: Tensor,
    *,
    beta: float = 0.1,
    liked_weight: float = 1.0,
    disliked_weight: float = 1.0,
) -> Tensor:
    """KTO (arXiv 2402.01306): the value of an answer against the reference point of `kto_reference`; margins are sums.

    `liked_weight * (1 - sigmoid(beta * (margin - reference)))` for a liked answer, `disliked_weight * (1 - sigmoid(beta
    * (reference - margin)))` for another. Weights make up for unequal numbers: keep (liked * weight) / (disliked *
    weight) from 1 to 4/3.
    """
    gain_R = beta * (single(margin_R) - reference.detach())
    return torch.where(liked_R, liked_weight * torch.sigmoid(-gain_R), disliked_weight * torch.sigmoid(gain_R))


def reward_model(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected)` of the scores that a reward model gives (arXiv 2203.02155)."""
    return -logsigmoid(single(chosen_P) - single(rejected_P))
