"""The objectives of a critic, of PRIME's process reward model, and of losses whose derivatives are known.

Legend: T tokens of one packed micro-batch, S trajectories or samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, value_loss, weighted_sum
from agent_train.algorithms.prime import outcome_loss, process_rewards
from agent_train.data.packing import MicroBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.head import last_sampled
from agent_train.learner.measures import Numbers, OptimizerStep, loss_alone, totals

# A trajectory weighs one part of the mean, whatever its length: the loss of PRIME's reward model is of trajectories.
PRM_REDUCTION = "seq-mean-token-sum"


@dataclass(frozen=True)
class CriticMetrics:
    """One update of the critic, over all ranks, micro-batches and optimizer steps. Means are over sampled tokens."""

    loss: float  # the weighted sum of half the squared errors; the mean over the optimizer steps
    # 1 - Var(target - value) / Var(target), with the values before each optimizer step: 1 is perfect, 0 as good as a
    # constant. 0 where the targets do not vary.
    explained_variance: float
    clip_fraction: float  # share of tokens that the clip holds back
    value_mean: float  # of the values, before each optimizer step
    return_mean: float  # of the targets
    error_max: float  # the largest |target - value|
    grad_norm: float  # before clipping; the mean over the optimizer steps
    lr: float  # of the last optimizer step
    skipped: int  # optimizer steps left out because the loss or the gradient was not finite
    seconds: float  # wall time of rank 0


def check_targets(samples: Sequence[TrainingSample], clip: float | None) -> None:
    """Raise ValueError where a sample with sampled tokens has no targets, or no old values where a clip needs them."""
    for sample in samples:
        for name in ("targets", *(["values"] if clip is not None else [])):
            if sample.sampled and not getattr(sample, name):
                why = "the critic learns" if name == "targets" else "critic.clip needs"
                raise ValueError(f"sample of trajectory {sample.trajectory!r} has no {name}, which {why}")


def critic_contribute(batch: MicroBatch, values_T: Tensor, clip: float | None) -> tuple[Tensor, Numbers, Numbers]:
    """The micro-batch's part of the critic's loss, `losses.value_loss`, its sums over sampled tokens, and the largest error."""
    mask_T = batch.mask_T
    loss_T, clipped_T = value_loss(values_T, batch.values_T, batch.targets_T, mask_T, clip)
    loss = weighted_sum(loss_T, batch.weights_T, mask_T)
    targets_T, kept_T = keep(batch.targets_T, mask_T).double(), keep(values_T.detach(), mask_T).double()
    error_T = targets_T - kept_T
    per_token = {
        "tokens": mask_T,
        "value": kept_T,
        "target": targets_T,
        "target_square": targets_T.square(),
        "error": error_T,
        "error_square": error_T.square(),
        "clipped": clipped_T,
    }
    sums = {"loss": loss.detach(), **{name: x_T.detach().double().sum() for name, x_T in per_token.items()}}
    return loss, sums, {"error": error_T.abs().max()}


def summarise_critic(steps: Sequence[OptimizerStep], seconds: float) -> CriticMetrics:
    total, largest, of_steps = totals(steps)
    tokens = max(total["tokens"], 1.0)
    spread = total["target_square"] / tokens - (total["target"] / tokens) ** 2
    unexplained = total["error_square"] / tokens - (total["error"] / tokens) ** 2
    # Equal targets leave only rounding.
    varies = spread > 1e-12 * max(1.0, total["target_square"] / tokens)
    return CriticMetrics(
        loss=total["loss"] / len(steps),
        explained_variance=1.0 - unexplained / spread if varies else 0.0,
        clip_fraction=total["clipped"] / tokens,
        value_mean=total["value"] / tokens,
        return_mean=total["target"] / tokens,
        error_max=largest["error"],
        seconds=seconds,
        **of_steps,
    )


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

    That is minus the derivative of the cross-entropy of `sigmoid(sum of process rewards)` and the outcome (arXiv
    2502.01456) by the log-probability of any token of the trajectory. `samples` are all those of each trajectory, with
    `prm` and `reference`; `outcomes` are from 0 (wrong) to 1 (right).
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


def prm_contribute(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Numbers, Numbers]:
    """The weighted sum of `-advantage * logprob`, whose gradient is the cross-entropy's."""
    taught_T = keep(batch.advantages_T, batch.mask_T) * keep(output[0], batch.mask_T)
    return loss_alone(weighted_sum(-taught_T, batch.weights_T, batch.mask_T))


def along_logprobs(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Numbers, Numbers]:
    """The sum of the tokens' log-probabilities times the derivatives of `algorithms.preferences`, which lie in `advantages_T`."""
    return loss_alone((keep(output[0], batch.mask_T) * keep(batch.advantages_T, batch.mask_T)).sum())


def along_scores(batch: MicroBatch, scores_S: Tensor) -> tuple[Tensor, Numbers, Numbers]:
    """As `along_logprobs`, of scores_S times the derivative that lies at each sample's last sampled token."""
    return loss_alone((scores_S * batch.advantages_T[last_sampled(batch)]).sum())
