"""The policy's objective: a policy loss with its corrections, the KL to a reference, and an entropy bonus. The loss of a token is

    correction(o / b) * policy_loss(p / o) + kl_coef * kl(p, reference) - entropy_coef * entropy(p)

where p is trained, o is the trainer's policy at the start of the training step (the proximal one), and b sampled (the
engine's). In the first optimizer step o is p, and the ratio exactly 1.

Legend: T tokens of one packed micro-batch, N sampled tokens of an optimizer step over all ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agent_train.algorithms.corrections import Gap, check_one_weight, drifted, gap_of, interpolated
from agent_train.algorithms.kl import kl_estimate, kl_loss
from agent_train.algorithms.losses import keep, single, weighted_sum
from agent_train.algorithms.policy_loss import LossInputs, PolicyLoss, policy_loss
from agent_train.algorithms.policy_losses import m2po_drift, m2po_limit
from agent_train.config.extensions import WHOLE_SAMPLE_LOSSES, corrections
from agent_train.config.schema import AlgorithmConfig
from agent_train.data.packing import MicroBatch
from agent_train.data.samples import TrainingSample
from agent_train.learner.measures import Numbers, policy_sums

ROUNDING = 1e-5  # of fp32 numbers that were computed in another order


@dataclass(frozen=True)
class PolicyObjective:
    loss: PolicyLoss
    settings: AlgorithmConfig

    @property
    def needs_start(self) -> bool:
        """True if the second and later optimizer steps read log-probabilities of the start, which costs a forward pass."""
        kl = self.settings.kl
        importance = kl.place == "loss" and kl.coef > 0 and kl.importance != "none"
        reads = "old_T" in self.loss.reads or self.settings.correction.name is not None or importance
        return self.settings.proximal == "recomputed" and reads

    @property
    def needs_drift_limit(self) -> bool:
        """True if each optimizer step begins with a forward pass, since its loss reads a limit made of all its tokens."""
        return "drift_limit" in self.loss.reads

    def check(self, samples: Sequence[TrainingSample], kl_coef: float, version: int | None) -> None:
        """Raise ValueError where a sample with sampled tokens lacks a field that this objective reads."""
        interpolated = self.settings.proximal == "interpolated"
        if interpolated and version is None:
            raise ValueError("algorithm.proximal=interpolated needs the version of the trainer's weights")
        for sample in samples:
            where = f"sample of trajectory {sample.trajectory!r}"
            if kl_coef and sample.sampled and not sample.reference:
                raise ValueError(
                    f"{where}: algorithm.kl needs its log-probabilities under the reference, and it has none"
                )
            if self.loss.name in WHOLE_SAMPLE_LOSSES:
                own = [a for a, on in zip(sample.advantages, sample.mask, strict=False) if on] or [0.0]
                if max(own) - min(own) > ROUNDING * max(map(abs, own)):
                    raise ValueError(
                        f"{where}: loss {self.loss.name!r} needs one advantage for all its sampled tokens, and they differ: take gspo_token"
                    )
            versions = sample.versions or [-1] * len(sample.ids)
            if interpolated and any(on and v < 0 for on, v in zip(sample.mask, versions, strict=True)):
                raise ValueError(f"{where}: algorithm.proximal=interpolated needs the version that sampled each token")

    def contribute(
        self,
        batch: MicroBatch,
        output: tuple[Tensor, Tensor],
        *,
        number: int = 0,
        steps: int = 1,
        kl_coef: float = 0.0,
        version: int | None = None,
        drift_limit: Tensor | None = None,
        lags: int = 0,
    ) -> tuple[Tensor, Numbers, Numbers]:
        """The micro-batch's part of the loss, to be differentiated, and its `measures.policy_sums`.

        `output` is logprobs_T and entropy_T, in optimizer step `number` of `steps`, from 0; from 1 on `batch.start_T`
        is read. `version` is of the trainer's weights at the start.
        """
        logprobs_T, entropy_T = output
        coef = self.settings.entropy_coef
        start_T = logprobs_T.detach() if number == 0 else batch.start_T
        gap = self._gap(batch, logprobs_T, start_T, number, steps, version)
        old_T = gap.old_T if gap else None
        correction_T = self._correction(batch, gap, logprobs_T)
        inputs = LossInputs(
            logprobs_T=logprobs_T,
            advantages_T=batch.advantages_T,
            mask_T=batch.mask_T,
            old_T=old_T,
            behaviour_T=batch.behaviour_logprobs_T,
            entropy_T=entropy_T,
            segment_T=batch.segment_T,
            n_segments=batch.n_segments,
            drift_limit=drift_limit,
        )
        policy_T, clip_mask_T = self.loss.with_clip_mask(inputs)
        if correction_T is not None:
            policy_T = policy_T * correction_T
        kl_T, measured_T = self._kl(batch, logprobs_T, old_T, kl_coef)
        # arXiv 1602.01783. No correction for stale data multiplies it.
        bonus_T = -coef * keep(single(entropy_T), batch.mask_T) if coef else None
        terms = {"loss_policy": policy_T, "loss_kl": kl_T, "loss_entropy": bonus_T}
        parts = {
            name: torch.zeros_like(batch.weights_T[0])
            if x_T is None
            else weighted_sum(x_T, batch.weights_T, batch.mask_T)
            for name, x_T in terms.items()
        }
        loss = parts["loss_policy"] + parts["loss_kl"] + parts["loss_entropy"]
        return loss, *policy_sums(
            batch,
            {"loss": loss, **parts},
            inputs,
            clip_mask_T,
            start_T=start_T,
            correction_T=correction_T,
            cap=self.settings.correction.cap,
            kl_T=measured_T,
            version=version,
            lags=lags,
        )

    def drift_limit(
        self,
        batches: Sequence[MicroBatch],
        logprobs: Sequence[Tensor],
        n_tokens: int,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The limit of one optimizer step of `n_tokens` sampled tokens, from the present `logprobs` of all ranks in `group`. One collective."""
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

    def _gap(
        self,
        batch: MicroBatch,
        logprobs_T: Tensor,
        start_T: Tensor | None,
        number: int,
        steps: int,
        version: int | None,
    ) -> Gap | None:
        """The log-probabilities that the ratio divides by; None where no loss reads them."""
        behaviour_T = batch.behaviour_logprobs_T
        if self.settings.proximal == "behaviour":
            return gap_of(behaviour_T, batch.mask_T)
        if self.settings.proximal == "interpolated":
            # In optimizer steps, of which each version has as many as this one.
            now = (version or 0) * steps
            start_T = interpolated(logprobs_T, behaviour_T, batch.versions_T * steps, now, now + number)
        return None if start_T is None else gap_of(behaviour_T, batch.mask_T, start_T)

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

    def _kl(
        self, batch: MicroBatch, logprobs_T: Tensor, old_T: Tensor | None, kl_coef: float
    ) -> tuple[Tensor | None, Tensor | None]:
        """The term of the loss, None at coefficient 0, and the estimates to report, None without a reference."""
        if not batch.has_reference:
            return None, None
        kl = self.settings.kl
        measured_T = kl_estimate(kl.value, logprobs_T.detach(), batch.reference_T, batch.mask_T)
        if not kl_coef:
            return None, measured_T
        old_T = logprobs_T.detach() if old_T is None else old_T
        how = (kl.value, kl.gradient, kl.importance, kl.max_value)
        return kl_coef * kl_loss(logprobs_T, batch.reference_T, old_T, batch.mask_T, *how), measured_T


def policy_objective(settings: AlgorithmConfig) -> PolicyObjective:
    """The objective that these settings describe. It imports and tries the loss, so it is made once."""
    loss = policy_loss(settings.loss, settings.loss_settings)
    check_one_weight(settings.proximal, settings.correction.name, "behaviour_T" in loss.reads)
    return PolicyObjective(loss, settings)
