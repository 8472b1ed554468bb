"""The objective of PRIME's process reward model: outcomes of whole trajectories (arXiv 2502.01456).

The loss of a trajectory, the cross-entropy of `sigmoid(sum of its process rewards)` and its outcome, reads all its
tokens, which may lie in several samples, on several ranks. Its derivative by the log-probability of any of them is the
same number, `beta * (sigmoid(sum) - outcome)`. So one pass without gradient gives the sums, and the update is a plain
weighted sum over tokens.

Legend: T tokens, S trajectories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, weighted_sum
from agent_train.algorithms.prime import outcome_loss, process_rewards
from agent_train.data.packing import MicroBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.measures import loss_alone

# A trajectory weighs one part of the mean, whatever its length: the loss is of trajectories.
REDUCTION = "seq-mean-token-sum"


@dataclass(frozen=True)
class PrmMetrics:
    """One optimizer step of the process reward model, over all ranks."""

    loss: float  # mean cross-entropy of the trajectories, before the step
    # share of the trajectories on whose right side of one half it was, with outcomes of a half and over as right
    accuracy: float
    reward_mean: float  # mean process reward of a trajectory's tokens together, before the step
    grad_norm: float  # before clipping
    lr: float  # of the step
    skipped: bool  # whether the weights were left as they are because the gradient was not finite
    seconds: float  # wall time of rank 0


def prm_targets(
    samples: Sequence[TrainingSample], outcomes: Mapping[str, float], beta: float
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples with `beta * (outcome - sigmoid(sum))` of their trajectory as advantage, and `loss`, `accuracy`, `reward_mean` of `PrmMetrics`.

    `samples` are all those of each trajectory, with `prm` and `reference`; `outcomes` of each trajectory are from 0
    (wrong) to 1 (right).
    """
    for sample in samples:
        if not 0.0 <= outcomes.get(sample.trajectory, -1.0) <= 1.0:
            found = outcomes.get(sample.trajectory)
            raise ValueError(f"trajectory {sample.trajectory!r}: PRIME needs an outcome from 0 to 1, not {found}")
    live = [sample for sample in samples if sample.sampled]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(sample.trajectory for sample in live))}
    segment_T = torch.tensor([numbers[sample.trajectory] for sample in live for _ in sample.ids], dtype=torch.long)
    mask_T = torch.tensor([on for sample in live for on in sample.mask], dtype=torch.bool)
    scored_T = torch.tensor([x for sample in live for x in sample.prm])
    reference_T = torch.tensor([x for sample in live for x in sample.reference])
    if not len(scored_T) == len(reference_T) == len(mask_T):
        raise ValueError(
            f"{len(mask_T)} tokens, {len(scored_T)} log-probabilities and {len(reference_T)} of the reference"
        )
    outcomes_S = torch.tensor([outcomes[name] for name in numbers], dtype=torch.float64)
    process_T = process_rewards(scored_T, reference_T, mask_T, beta)
    sums_S = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, segment_T, process_T.double())
    taught = dict(zip(numbers, (beta * (outcomes_S - sums_S.sigmoid())).tolist(), strict=True))
    count = max(len(numbers), 1)
    right = ((sums_S > 0) == (outcomes_S >= 0.5)).double().sum()
    measures = {
        "loss": float(outcome_loss(process_T, mask_T, segment_T, outcomes_S).double().sum() / count),
        "accuracy": float(right / count),
        "reward_mean": float(sums_S.sum() / count),
    }
    return [replace(each, advantages=each.spread(taught.get(each.trajectory, 0.0))) for each in samples], measures


def prm_contribute(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of `-advantage * logprob`, whose gradient is the cross-entropy's."""
    taught_T = keep(batch.advantages_T, batch.mask_T) * keep(output[0], batch.mask_T)
    return loss_alone(weighted_sum(-taught_T, batch.weights_T, batch.mask_T))
