"""The policy's objective: a policy loss with its corrections, the KL to a reference, and an entropy bonus.

Three policies: p is trained, o is the trainer's at the start of the training step (the proximal one), b sampled (the engine's).
The loss of a token is

    correction(o / b) * policy_loss(p / o) + kl_coef * kl(p, reference) - entropy_coef * entropy(p)

and a micro-batch gives the sum of its tokens' losses times their weights. A correction multiplies the first term alone, and what
it drops stays in the denominators, which are those of the weights.

In the first optimizer step of a training step o is p: its log-probabilities are those of the same forward pass, and the ratio is
exactly 1. For later ones they are computed before the first, over the same micro-batches, where something reads them.

Legend: T tokens of one packed micro-batch, N sampled tokens of an optimizer step over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agent_train.algorithms.corrections import Gap, check_one_weight, drifted, gap_of, proximal_share
from agent_train.algorithms.kl import estimator, kl_loss
from agent_train.algorithms.losses import entropy_bonus, keep, weighted_sum
from agent_train.algorithms.policy_loss import LossInputs, PolicyLoss, policy_loss
from agent_train.algorithms.policy_losses import m2po_drift, m2po_limit
from agent_train.config.extensions import WHOLE_SAMPLE_LOSSES, corrections
from agent_train.config.schema import AlgorithmConfig
from agent_train.data.packing import MicroBatch, RankBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.measures import MicroBatchLoss, PolicyTerms, policy_sums

ROUNDING = 1e-5  # of fp32 numbers that were computed in another order


@dataclass(frozen=True)
class PolicyStep:
    """One optimizer step of the policy, on one rank.

    Attributes:
        batches: its micro-batches.
        referenced: for each, whether its rows have log-probabilities of the reference.
        number: which optimizer step of the training step it is, from 0.
        steps: how many there are.
        kl_coef: coefficient of the KL in the loss.
        version: of the trainer's weights at the start of the training step; None where it is not known.
        start: for each micro-batch the trainer's log-probabilities at that time; None where nothing reads them, and for step 0.
        drift_limit: of losses that read one.
    """

    batches: Sequence[MicroBatch]
    referenced: Sequence[bool]
    number: int = 0
    steps: int = 1
    kl_coef: float = 0.0
    version: int | None = None
    start: Sequence[Tensor] | None = None
    drift_limit: Tensor | None = None


@dataclass(frozen=True)
class PolicyObjective:
    """The objective that the settings describe. Make one with `policy_objective`.

    Attributes:
        loss: of the policy.
        settings: of the algorithm.
    """

    loss: PolicyLoss
    settings: AlgorithmConfig

    @property
    def needs_start(self) -> bool:
        """True if the second and later optimizer steps read log-probabilities of the start, which costs a forward pass."""
        kl = self.settings.kl
        importance = kl.place == "loss" and kl.coef > 0 and kl.importance != "none"
        reads = self.loss.needs_proximal or self.settings.correction.name is not None or importance
        return self.settings.proximal == "recomputed" and reads

    @property
    def needs_drift_limit(self) -> bool:
        """True if each optimizer step begins with a forward pass, since its loss reads a limit made of all its tokens."""
        return "drift_limit" in self.loss.reads

    def check(self, rows: Sequence[TrainingSample], kl_coef: float, version: int | None) -> None:
        """The fields that samples must have for this objective.

        Raises:
            ValueError: a row with sampled tokens lacks it.
        """
        interpolated = self.settings.proximal == "interpolated"
        if interpolated and version is None:
            raise ValueError("algorithm.proximal=interpolated needs the version of the trainer's weights")
        for row in rows:
            where = f"row of trajectory {row.trajectory!r}"
            if kl_coef and row.sampled and not row.reference:
                raise ValueError(
                    f"{where}: algorithm.kl needs its log-probabilities under the reference, and it has none"
                )
            if self.loss.name in WHOLE_SAMPLE_LOSSES and _differ(row):
                raise ValueError(
                    f"{where}: loss {self.loss.name!r} needs one advantage for all its sampled tokens, and they differ: take gspo_token"
                )
            versions = row.versions or [-1] * len(row.ids)
            if interpolated and any(on and v < 0 for on, v in zip(row.mask, versions, strict=True)):
                raise ValueError(f"{where}: algorithm.proximal=interpolated needs the version that sampled each token")

    def contribute(self, step: PolicyStep) -> MicroBatchLoss:
        """Each micro-batch's part of the loss, and its `measures.policy_sums`."""

        def of_batch(index: int, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            loss, terms = self.terms(step, index, *output)
            return loss, *policy_sums(step.batches[index], terms)

        return of_batch

    def terms(self, step: PolicyStep, index: int, logprobs_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, PolicyTerms]:
        """The loss of micro-batch `index`, to be differentiated, and what it was made of."""
        batch, coef = step.batches[index], self.settings.entropy_coef
        start_T = logprobs_T.detach() if step.number == 0 else step.start[index] if step.start else None
        gap = self._gap(step, batch, logprobs_T, start_T)
        weights_T = self._correction(batch, gap, logprobs_T)
        policy_T, clip_mask_T = self.loss.with_clip_mask(self._inputs(step, batch, logprobs_T, entropy_T, gap))
        if weights_T is not None:
            policy_T = policy_T * weights_T
        kl_T, measured_T = self._kl(step, index, logprobs_T, gap)
        bonus_T = entropy_bonus(entropy_T, batch.mask_T, coef) if coef else None
        policy, kl, bonus = (_summed(part_T, batch) for part_T in (policy_T, kl_T, bonus_T))
        loss = policy + kl + bonus
        return loss, PolicyTerms(
            loss=loss.detach(),
            parts=(policy.detach(), kl.detach(), bonus.detach()),
            logprobs_T=logprobs_T.detach(),
            entropy_T=entropy_T.detach(),
            old_T=gap.old_T if gap else None,
            start_T=start_T,
            clip_mask_T=clip_mask_T,
            correction_T=weights_T,
            cap=self.settings.correction.cap,
            kl_T=measured_T,
            version=step.version,
        )

    def drift_limit(
        self,
        batches: Sequence[MicroBatch],
        logprobs: Sequence[Tensor],
        n_tokens: int,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The limit of one optimizer step, from all its tokens, the same on every rank. One collective.

        Args:
            batches: this rank's.
            logprobs: of the policy as it is, for each micro-batch.
            n_tokens: sampled tokens of the step over all ranks.
            group: the ranks that hold different tokens; None is all.
        """
        given = [(batch, p_T[batch.mask_T]) for batch, p_T in zip(batches, logprobs, strict=True)]
        own_N = torch.cat(
            [m2po_drift(p_N, b.behaviour_logprobs_T[b.mask_T], b.advantages_T[b.mask_T]) for b, p_N in given]
        )
        # The ranks gather tensors of one length: a drift of 0 does not count.
        padded_N = torch.nn.functional.pad(own_N, (0, n_tokens - len(own_N)))
        everyone = [torch.empty_like(padded_N) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, padded_N, group=group)
        budget = self.loss.settings.get("budget")
        return m2po_limit(torch.cat(everyone), *([] if budget is None else [budget]))

    def _gap(self, step: PolicyStep, batch: MicroBatch, logprobs_T: Tensor, start_T: Tensor | None) -> Gap | None:
        """The log-probabilities that the ratio divides by; None where no loss reads them."""
        proximal, share_T = self.settings.proximal, None
        if proximal == "interpolated" and step.number == 0:
            # The share is 1: the policy itself, to the last bit.
            proximal = "recomputed"
        elif proximal == "interpolated":
            # In optimizer steps, of which each version has as many as this one.
            now = (step.version or 0) * step.steps
            share_T = proximal_share(batch.versions_T * step.steps, now, now + step.number)
        if proximal == "recomputed" and start_T is None:
            return None
        recomputed_T = start_T if proximal == "recomputed" else None
        return gap_of(proximal, logprobs_T, batch.behaviour_logprobs_T, batch.mask_T, recomputed_T, share_T)

    def _correction(self, batch: MicroBatch, gap: Gap | None, logprobs_T: Tensor) -> Tensor | None:
        """The factor of each token's policy loss; None where nothing corrects."""
        settings = self.settings.correction
        weights_T = None
        where = (batch.mask_T, batch.segment_T, batch.n_segments)
        if settings.name is not None and gap is not None:
            high = math.inf if settings.high is None else settings.high
            correct = corrections.load(settings.name)
            weights_T = correct(gap, *where, cap=settings.cap, low=settings.low, high=high)
        if settings.drift is not None:
            left = drifted(
                logprobs_T.detach(), batch.behaviour_logprobs_T, batch.advantages_T, *where, delta=settings.drift
            )
            stays_T = (batch.mask_T & ~left).float()
            weights_T = stays_T if weights_T is None else weights_T * stays_T
        return weights_T

    def _inputs(
        self, step: PolicyStep, batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor, gap: Gap | None
    ) -> LossInputs:
        return LossInputs(
            logprobs_T=logprobs_T,
            advantages_T=batch.advantages_T,
            mask_T=batch.mask_T,
            old_T=gap.old_T if gap else None,
            behaviour_T=batch.behaviour_logprobs_T,
            entropy_T=entropy_T,
            segment_T=batch.segment_T,
            n_segments=batch.n_segments,
            drift_limit=step.drift_limit,
        )

    def _kl(
        self, step: PolicyStep, index: int, logprobs_T: Tensor, gap: Gap | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The term of the loss, None at coefficient 0, and the estimates to report, None where rows have no reference."""
        if not step.referenced[index]:
            return None, None
        kl, batch = self.settings.kl, step.batches[index]
        given = (keep(logprobs_T.detach(), batch.mask_T), keep(batch.reference_T, batch.mask_T))
        measured_T = estimator(kl.value)(*given)
        if not step.kl_coef:
            return None, measured_T
        old_T = logprobs_T.detach() if gap is None else gap.old_T
        how = (kl.value, kl.gradient, kl.importance, kl.max_value)
        return step.kl_coef * kl_loss(logprobs_T, batch.reference_T, old_T, batch.mask_T, *how), measured_T


def policy_objective(settings: AlgorithmConfig) -> PolicyObjective:
    """The objective that these settings describe. It imports and tries the loss, so it is made once.

    Raises:
        ValueError: no such loss or correction, settings that it does not have, or two weights for one gap.
    """
    loss = policy_loss(settings.loss, settings.loss_settings)
    check_one_weight(settings.proximal, settings.correction.name, loss.divides_by_behaviour)
    return PolicyObjective(loss, settings)


def referenced(share: RankBatch) -> list[bool]:
    """For each micro-batch whether every row with sampled tokens has log-probabilities of the reference, and there is one."""
    live = [[row for row in rows if row.sampled] for rows in share.micro_batches]
    return [bool(rows) and all(row.reference for row in rows) for rows in live]


def _differ(row: TrainingSample) -> bool:
    """True if the advantages of the sampled tokens differ by more than rounding."""
    own = [a for a, on in zip(row.advantages, row.mask, strict=False) if on]
    return bool(own) and max(own) - min(own) > ROUNDING * max(map(abs, own))


def _summed(loss_T: Tensor | None, batch: MicroBatch) -> Tensor:
    if loss_T is None:
        return torch.zeros((), device=batch.mask_T.device)
    return weighted_sum(loss_T, batch.weights_T, batch.mask_T)
