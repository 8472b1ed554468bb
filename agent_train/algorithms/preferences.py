"""Losses of preference data: DPO, IPO and KTO on log-probabilities, Bradley-Terry or squared errors on scores.

Such a loss joins answers of different micro-batches and ranks, and reads each only through a few sums. So the driver
computes the loss and its derivative by each log-probability or score from a first pass; a second differentiates the sum
of derivative times log-probability, which at these weights has exactly the loss's gradient. A margin is how much more
likely the trained policy makes an answer than the reference does.

Legend: M sampled tokens of a whole optimizer step, A answers, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agent_train.algorithms.losses import segment_means, segment_sums, single
from agent_train.data.samples import TrainingSample


@dataclass(frozen=True)
class Judged:
    """A loss of a step, as the driver computes it from a first pass."""

    loss: float  # the mean over pairs, or over single answers
    # by each log-probability of each sample, in order, 0.0 outside the mask; or by the score of each, a list of one
    derivatives: list[list[float]]
    measures: dict[str, float]  # means of accuracy, margin, chosen, rejected, as far as there are any


def of_pairs(
    loss: str,
    beta: float,
    chosen: Sequence[Sequence[TrainingSample]],
    rejected: Sequence[Sequence[TrainingSample]],
    logprobs: Sequence[Sequence[float]],
) -> Judged:
    """DPO or IPO ("dpo", "ipo"), whose margins are means over tokens, of P pairs of answers, each some samples with `reference`.

    `logprobs` are of each sample under the trained policy: all of `chosen`, then all of `rejected`.
    """
    answers = [*chosen, *rejected]
    logprobs_M = _sampled(answers, logprobs).requires_grad_()
    margin_A = _margins(answers, logprobs_M, mean=loss == "ipo")
    chosen_P, rejected_P = margin_A.chunk(2)
    value = (dpo if loss == "dpo" else ipo)(chosen_P, rejected_P, beta=beta).mean()
    return Judged(value.item(), _derivatives(value, logprobs_M, answers), _pair_measures(chosen_P, rejected_P, beta))


def of_liked(
    beta: float,
    answers: Sequence[Sequence[TrainingSample]],
    liked: Sequence[bool],
    logprobs: Sequence[Sequence[float]],
    mismatched: Sequence[Sequence[TrainingSample]],
    mismatched_logprobs: Sequence[Sequence[float]],
    weights: tuple[float, float] = (1.0, 1.0),
) -> Judged:
    """KTO of A answers, each some samples with `reference`. `weights` are of a liked and a disliked answer.

    Its reference point comes from `mismatched`, answers under prompts that are not their own, without gradient.
    """
    logprobs_M = _sampled(answers, logprobs).requires_grad_()
    margin_A = _margins(answers, logprobs_M)
    point = kto_reference(_margins(mismatched, _sampled(mismatched, mismatched_logprobs)))
    liked_A = torch.tensor(liked)
    value = kto(margin_A, liked_A, point, beta=beta, liked_weight=weights[0], disliked_weight=weights[1]).mean()
    reward_A = beta * margin_A.detach()
    measures = {
        "accuracy": ((reward_A > beta * point) == liked_A).double().mean().item(),
        # NaN where there are none, which records leave out.
        "chosen": reward_A[liked_A].mean().item(),
        "rejected": reward_A[~liked_A].mean().item(),
        "reference_point": float(beta * point),
    }
    return Judged(value.item(), _derivatives(value, logprobs_M, answers), measures)


def of_scored_pairs(scores: Sequence[float]) -> Judged:
    """Bradley-Terry of P pairs. `scores` has those of the preferred answers, then of the others in the same order."""
    scores_A = torch.tensor(scores, dtype=torch.float64).requires_grad_()
    chosen_P, rejected_P = scores_A.chunk(2)
    value = reward_model(chosen_P, rejected_P).mean()
    (grad_A,) = torch.autograd.grad(value, scores_A)
    return Judged(value.item(), [[g] for g in grad_A.tolist()], _pair_measures(chosen_P, rejected_P))


def of_scores(scores: Sequence[float], wanted: Sequence[float]) -> Judged:
    error_A = torch.tensor(scores, dtype=torch.float64) - torch.tensor(wanted, dtype=torch.float64)
    value = error_A.square().mean().item() / 2
    measures = {"error": error_A.abs().mean().item()}
    return Judged(value, [[error / len(scores)] for error in error_A.tolist()], measures)


def dpo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`-log sigmoid(beta * (chosen - rejected))` of the margins, sums (DPO, arXiv 2305.18290)."""
    return -logsigmoid(beta * (single(chosen_P) - single(rejected_P)))


def ipo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """`(chosen - rejected - 1 / (2 * beta))^2` of the margins, means over tokens (IPO, arXiv 2310.12036): one target for all lengths."""
    return (single(chosen_P) - single(rejected_P) - 1.0 / (2.0 * beta)).square()


def kto_reference(mismatched_A: Tensor) -> Tensor:
    """The reference point of `kto` for a whole optimizer step: `max(0, mean)` of the margins of answers under prompts that are not their own.

    It estimates KL(policy || reference), and is detached.
    """
    return single(mismatched_A).detach().mean().clamp(min=0.0)


def kto(
    margin_A: Tensor,
    liked_A: Tensor,
    reference: Tensor,
    *,
    beta: float = 0.1,
    liked_weight: float = 1.0,
    disliked_weight: float = 1.0,
) -> Tensor:
    """KTO (arXiv 2402.01306): the value of an answer against the reference point of `kto_reference`; margins are sums.

    `liked_weight * (1 - sigmoid(beta * (margin - reference)))` for a liked answer, `disliked_weight * (1 - sigmoid(beta
    * (reference - margin)))` for another. Keep (liked * weight) / (disliked * weight) from 1 to 4/3.
    """
    gain_A = beta * (single(margin_A) - reference.detach())
    return torch.where(liked_A, liked_weight * torch.sigmoid(-gain_A), disliked_weight * torch.sigmoid(gain_A))


def reward_model(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected)` of the scores that a reward model gives (arXiv 2203.02155)."""
    return -logsigmoid(single(chosen_P) - single(rejected_P))


def _sampled(answers: Sequence[Sequence[TrainingSample]], values: Sequence[Sequence[float]]) -> Tensor:
    """values_M: of the sampled tokens of the answers' samples, one after another; fp64, so that sums keep what they are given."""
    samples = list(chain.from_iterable(answers))
    found = [
        value
        for sample, own in zip(samples, values, strict=True)
        for value, on in zip(own, sample.mask, strict=True)
        if on
    ]
    return torch.tensor(found, dtype=torch.float64)


def _margins(answers: Sequence[Sequence[TrainingSample]], logprobs_M: Tensor, mean: bool = False) -> Tensor:
    """margin_A: the sum, or the `mean` (for IPO), of `log(p / reference)` over the tokens of all samples of each answer."""
    for sample in chain.from_iterable(answers):
        if not sample.reference:
            raise ValueError(
                f"sample of {sample.trajectory!r} has no log-probabilities under the reference, which the loss needs"
            )
    reference_M = _sampled(answers, [sample.reference for sample in chain.from_iterable(answers)])
    sizes_A = torch.tensor([sum(sample.sampled for sample in own) for own in answers])
    answer_M = torch.arange(len(answers)).repeat_interleave(sizes_A)
    everything_M = torch.ones(len(logprobs_M), dtype=torch.bool)
    reduce = segment_means if mean else segment_sums
    return reduce(logprobs_M - reference_M, everything_M, answer_M, len(answers))


def _derivatives(value: Tensor, logprobs_M: Tensor, answers: Sequence[Sequence[TrainingSample]]) -> list[list[float]]:
    (grad_M,) = torch.autograd.grad(value, logprobs_M)
    left = iter(grad_M.tolist())
    return [[next(left) if on else 0.0 for on in sample.mask] for sample in chain.from_iterable(answers)]


@torch.no_grad()
def _pair_measures(chosen_P: Tensor, rejected_P: Tensor, scale: float = 1.0) -> dict[str, float]:
    return {
        "accuracy": (chosen_P > rejected_P).double().mean().item(),
        "margin": scale * (chosen_P - rejected_P).mean().item(),
        "chosen": scale * chosen_P.mean().item(),
        "rejected": scale * rejected_P.mean().item(),
    }
