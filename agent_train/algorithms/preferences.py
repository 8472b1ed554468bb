"""Losses of preference data: pairs, or single answers that were liked or not. One value per pair or per answer.

Legend: T tokens, S sequences, P pairs, R answers. A margin is how much more likely the trained
policy makes an answer than the reference does: the sum over its tokens of log(p / reference), from `margins`. The answers of a
whole optimizer step are here together: what is in one pair may have been scored in different micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agent_train.algorithms.losses import keep, single
from agent_train.algorithms.segments import segment_means, segment_sums


def margins(
    logprobs_T: Tensor, reference_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int, *, mean: bool = False
) -> Tensor:
    """margin_S: the sum over each sequence's masked tokens of `log(p / reference)`; the mean where `mean` is set.

    Args:
        logprobs_T: under the trained policy, with gradient.
        reference_T: under the reference. Zeros, for losses without one.
        mask_T: True on the tokens of the answer.
        segment_T: number of each token's sequence.
        n_segments: how many there are.
        mean: divide by the number of tokens, as IPO needs where answers differ in length.
    """
    change_T = single(keep(logprobs_T, mask_T)) - single(keep(reference_T, mask_T))
    reduce = segment_means if mean else segment_sums
    return reduce(change_T, mask_T, segment_T, n_segments)


def dpo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`-log sigmoid(beta * (chosen - rejected))` of the margins (DPO, arXiv 2305.18290).

    Args:
        chosen_P: margins of the preferred answers, sums.
        rejected_P: margins of the others.
        beta: how strongly the reference holds.
    """
    return -logsigmoid(beta * (single(chosen_P) - single(rejected_P)))


def ipo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`(chosen - rejected - 1 / (2 * beta))^2` of the margins (IPO, arXiv 2310.12036).

    The margins are means over tokens, as in the peers (`margins(..., mean=True)`): the target is one number for all lengths.
    """
    return (single(chosen_P) - single(rejected_P) - 1.0 / (2.0 * beta)).square()


def kto_reference(mismatched_R: Tensor) -> Tensor:
    """The reference point of `kto`, `max(0, mean)` of the margins of answers under prompts that are not their own, detached.

    It estimates KL(policy || reference), and is one number for the whole optimizer step: gather the margins of all ranks first.
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
    """KTO's loss (arXiv 2402.01306): the value of an answer against the reference point, by Kahneman and Tversky.

    `liked_weight * (1 - sigmoid(beta * (margin - reference)))` for a liked answer, `disliked_weight * (1 - sigmoid(beta *
    (reference - margin)))` for another. Weights make up for unequal numbers: keep (liked * weight) / (disliked * weight) from 1 to 4/3.

    Args:
        margin_R: margin of each answer, sums.
        liked_R: booleans.
        reference: from `kto_reference`, no gradient.
        beta: how strongly the reference holds.
        liked_weight: what a liked answer counts.
        disliked_weight: what another one counts.
    """
    gain_R = beta * (single(margin_R) - reference.detach())
    return torch.where(liked_R, liked_weight * torch.sigmoid(-gain_R), disliked_weight * torch.sigmoid(gain_R))


def reward_model(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected)` of the scores that a reward model gives (arXiv 2203.02155).

    Args:
        chosen_P: scores of the preferred answers.
        rejected_P: scores of the others.
    """
    return -logsigmoid(single(chosen_P) - single(rejected_P))
